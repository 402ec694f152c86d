"""`engram report`."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from engram.cli.options.runs import Report
from engram.cli.text import make_console, print_line
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.report.html_page import is_report_folder
from engram.runs.directory import MANIFEST, RESULT, runs_in


def report_command(options: Report, typed: Sequence[str]) -> int:
    """The exit status of `engram report`."""
    del typed
    given = [typed_path(name) for name in options.directories]
    directories = expand(given)
    out = None if options.out is None else typed_path(options.out)
    if out is None and len(given) == 1:
        out = given[0] / "report.html"  # beside the runs it is about, however many they are
    from engram.report.page import write_report  # matplotlib takes a second to import

    path = write_report(directories, out, tell=lambda text: print(f"engram: {text}", file=sys.stderr))
    console = make_console()
    print_line(console, str(path))
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        print_line(console, "no browser could be opened here; open the file above in one")
    return 0


def expand(given: Sequence[Path]) -> list[Path]:
    """The run directories among what was given and in it.

    A pattern such as runs/* brings along what an earlier report left there, which is passed over. Other directories
    without runs, and runs without a finished stage, are left out by name where there is something else to report on.
    """
    missing = [path for path in given if not path.exists()]
    if missing or (len(given) == 1 and not given[0].is_dir()):
        raise EngramError(
            f"there is no run directory at {(missing or given)[0]}; 'engram list runs' shows those there are"
        )
    found = [(path, runs_in(path)) for path in given if path.is_dir()]
    if len(given) > 1:
        found = [(path, runs) for path, runs in found if runs or not is_report_folder(path)]
    runs = [run for _, inner in found for run in inner]
    finished = [run for run in runs if (run / RESULT).exists()]
    if not runs:
        path = found[0][0] if found else given[0]
        raise EngramError(f"{path} is not a run directory (it has no {MANIFEST}) and holds none; give another")
    for path in [path for path, inner in found if not inner]:
        print(f"engram: left out {path}: it is not a run directory and holds none", file=sys.stderr)
    if not finished:
        return runs  # the report says of the first what it lacks
    for run in [run for run in runs if run not in finished]:
        print(f"engram: left out {run}: it has no finished stage yet", file=sys.stderr)
    return finished
