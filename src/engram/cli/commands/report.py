"""`engram report`: write an HTML page about runs."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from engram.cli.commands.run_paths import refuse_model
from engram.cli.options.runs import Report
from engram.cli.text import make_console, print_line
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.report.html_page import is_report_folder
from engram.runs.directory import MANIFEST, RESULT, runs_in


def report_command(options: Report, typed: Sequence[str]) -> int:
    """Run `engram report`."""
    del typed
    given = [typed_path(name) for name in options.directories]
    directories = expand(given)
    out = None if options.out is None else typed_path(options.out)
    if out is None and len(given) == 1:
        out = given[0] / "report.html"  # next to its runs
    from engram.report.page import write_report  # matplotlib takes a second to import

    path = write_report(directories, out, tell=lambda text: print(f"engram: {text}", file=sys.stderr))
    console = make_console()
    print_line(console, str(path))
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        print_line(console, "no browser could be opened here; open the file above in one")
    return 0


def expand(given: Sequence[Path]) -> list[Path]:
    """Return the run directories in what was given.

    The folder of an earlier report, which a pattern such as runs/* matches, is skipped. Other directories without runs,
    and runs without a finished stage, are named and left out if there is something else to report on.
    """
    missing = [path for path in given if not path.exists()]
    if missing or (len(given) == 1 and not given[0].is_dir()):
        raise EngramError(f"there is no run directory at {(missing or given)[0]}; 'engram list runs' shows all runs")
    found = [(path, runs_in(path)) for path in given if path.is_dir()]
    if len(given) > 1:
        found = [(path, runs) for path, runs in found if runs or not is_report_folder(path)]
    runs = [run for _, inner in found for run in inner]
    finished = [run for run in runs if (run / RESULT).exists()]
    if not runs:
        path = found[0][0] if found else given[0]
        refuse_model(path)
        raise EngramError(f"{path} is not a run directory (it has no {MANIFEST}) and contains none; give another")
    for path in [path for path, inner in found if not inner]:
        print(f"engram: left out {path}: it is not a run directory and contains none", file=sys.stderr)
    if not finished:
        return runs  # the report's error says what the first one lacks
    for run in [run for run in runs if run not in finished]:
        print(f"engram: left out {run}: it has no finished stage yet", file=sys.stderr)
    return finished
