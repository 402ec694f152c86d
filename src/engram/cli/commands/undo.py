"""`engram undo`: restore a model as it was before its last lesson."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engram.cli.commands.model_common import confirmed, exclude, printable
from engram.cli.options.models import Undo
from engram.cli.text import count_classes, make_console, print_line, shorten
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.models.edit import Undone, undo
from engram.models.labels import encode_label
from engram.models.store.codec import read_manifest
from engram.models.store.writer import clean_up_model


def undo_command(options: Undo, typed: Sequence[str]) -> int:
    """Carry out `engram undo`; return the exit status."""
    del typed
    exclude(options.quiet, options.json)
    place = typed_path(options.model)
    manifest = _manifest(place)
    if manifest is not None and manifest["undo"] is None:
        clean_up_model(place)
        raise EngramError(manifest["why_no_undo"])
    back = "" if manifest is None else f" ({back_to(manifest['undo'])})"
    if not options.yes and not options.json and not confirmed(f"undo the last lesson of {place} for good{back}?"):
        print("engram: nothing was undone", file=sys.stderr)
        return 1
    undone = undo(place, drop_learning=options.drop_learning)
    console = make_console()
    if options.json:
        named = {key: [encode_label(label) for label in getattr(undone, key)] for key in ("gone", "again")}
        print_line(console, json.dumps(asdict(undone) | named))
    elif not options.quiet:
        print_line(console, undone_line(undone))
    return 0


def back_to(undo: dict[str, Any]) -> str:
    """Describe the state that undo restores. undo: entry of `read_manifest`."""
    return f"back to lesson {undo['lesson']}, {count_classes(undo['classes'])}, of {printable(undo['date'])[:10]}"


def undone_line(undone: Undone) -> str:
    """Describe what was undone, and the model now."""
    parts = [
        f"{what} {shorten([printable(label) for label in labels], 60)}"
        for what, labels in (("gone:", undone.gone), ("as before:", undone.again))
        if labels
    ]
    return f"the last lesson was undone; {'; '.join([*parts, back_to(asdict(undone))])}"


def _manifest(place: Path) -> dict[str, Any] | None:
    """Return the manifest, or None if the model is damaged; the state before may still be readable."""
    try:
        return read_manifest(place)
    except EngramError:
        if not place.is_dir():
            raise
        return None
