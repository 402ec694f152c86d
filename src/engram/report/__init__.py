"""The report on finished runs: one self-contained HTML page, its figures as SVG and its numbers as CSV.

It reads run directories and nothing else: no model, no data set, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["is_report_folder", "write_report"]

FILES = "FILES.txt"  # in the folder beside a page: the names of the files that belong to the report


def write_report(
    directories: Sequence[Path], out: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> Path:
    """The path of the HTML page made from these run directories.

    `out` is the page's file name, or a folder for it; by default `report.html` in the run's own directory, or in the
    folder that several runs share. Figures and CSV files go to a folder named like the page plus `_files`.
    A run that repeats another's configuration, class order and seed is not counted; `tell` gets a sentence on each.
    Raises EngramError, naming the file, where a directory is not a run, has no finished stage, or is damaged.
    """
    from engram.report import page  # matplotlib takes a second to import; `engram --help` must not pay for it

    return page.write_report(directories, out, tell)


def is_report_folder(path: Path) -> bool:
    """Whether this is the folder that stands beside a report's page."""
    return path.name.endswith("_files") and (path / FILES).is_file()
