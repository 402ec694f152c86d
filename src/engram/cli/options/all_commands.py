"""The commands, in the order in which the help lists them: the name and the class of its options."""

from __future__ import annotations

from typing import Final

from engram.cli.options.model_changes import Export, Merge, Move, Remove, Rename, Undo
from engram.cli.options.models import Check, Evaluate, Info, Learn, Predict, Serve
from engram.cli.options.runs import Demo, Doctor, List, Prepare, Report, Reproduce, Results, Resume, Run, Submit

COMMANDS: Final[dict[str, type]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Demo, Learn, Predict, Info, Evaluate, Check, Remove, Rename, Merge, Move, Undo, Export, Serve),
        *(Run, Submit, Resume, List, Report, Reproduce, Results, Prepare, Doctor),
    )
}
