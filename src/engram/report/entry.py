"""The report on finished runs: one self-contained HTML page, its figures as SVG and its numbers as CSV.

It reads run directories and nothing else: no model, no data set, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["is_report_folder", "write_report"]

FILES = "FILES.txt"  # in the folder beside a page: the names of the files that belong to the report


def write_report(
    directories: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """The path of the HTML page made from these run directories, or from one.

    A folder that is no run stands for the runs in it that have a finished stage. `out` is the page's file name, or a
    folder for it; by default `report.html` in the one directory that was given, or in the folder that several share.
    Figures and CSV files go to a folder named like the page plus `_files`. A run that repeats another's configuration,
    class order and seed is not counted. `tell` gets a sentence on each run that is left out.
    Raises EngramError, naming the file, where a directory is not a run, has no finished stage, or is damaged.
    """
    from engram.report import page  # matplotlib takes a second to import; `engram --help` must not pay for it

    given = [directories] if isinstance(directories, (str, Path)) else directories
    return page.write_report([Path(path) for path in given], None if out is None else Path(out), tell)


def is_report_folder(path: Path) -> bool:
    """Whether this is the folder that stands beside a report's page."""
    return path.name.endswith("_files") and (path / FILES).is_file()
