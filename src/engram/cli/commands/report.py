"""`engram report`."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from engram.cli.commands.common import print_line
from engram.cli.options import Report
from engram.cli.text import make_console
from engram.errors import EngramError
from engram.report import write_report
from engram.rundir import MANIFEST


def report_command(options: Report, typed: Sequence[str]) -> int:
    """The exit status of `engram report`."""
    del typed
    directories = [run for given in options.directories for run in expand(Path(given).expanduser())]
    path = write_report(directories, None if options.out is None else Path(options.out).expanduser())
    console = make_console()
    print_line(console, str(path))
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        print_line(console, "no browser could be opened here; open the file above in one")
    return 0


def expand(path: Path) -> list[Path]:
    """The run directory itself, or the run directories in it."""
    if not path.is_dir():
        raise EngramError(f"there is no run directory at {path}; 'engram list runs' shows those there are")
    if (path / MANIFEST).exists():
        return [path]
    inner = sorted(file.parent for file in path.glob(f"*/{MANIFEST}"))
    if not inner:
        raise EngramError(f"{path} is not a run directory (it has no {MANIFEST}) and holds none; give another")
    return inner
