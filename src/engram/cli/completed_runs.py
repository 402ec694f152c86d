"""The complete runs that count for a paper's experiments, and where they come from."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engram.core.io import typed_path
from engram.reproduce.cell_plan import Plan
from engram.reproduce.records import Record
from engram.reproduce.results_files import SUFFIX, is_ours, merge, read_results
from engram.runs.directory import find_runs

RESULTS = Path("results")
NO_RESULTS = "none"  # value of --results: count only the runs in --out


@dataclass(frozen=True)
class CompletedRuns:
    """Every complete run that counts.

    Parameters
    ----------
    places: the file or directory in which each record was found, by the record's source.
    runs: the directory of --out.
    """

    records: list[Record]
    places: dict[str, Path]
    runs: Path


def read_completed(results: str | None, runs: Path) -> CompletedRuns:
    """Read the complete runs in the results and in the directory of runs.

    results: the value of --results. None reads the folder "results" if it exists; files in it that are not engram's
    are left out.
    """
    places = [typed_path(results)] if results not in (None, NO_RESULTS) else []
    for file in sorted(RESULTS.glob(f"*{SUFFIX}")) if results is None else ():
        if is_ours(file):
            places.append(file)
        else:
            print(f"engram: left out {file}: it has no results of engram (--results names others)", file=sys.stderr)
    if runs.is_dir() and find_runs(runs):
        places.append(runs)
    found = [(record, place) for place in places for record in read_results([place]).records]
    places_by_source = {record.source: place for record, place in found}
    return CompletedRuns(merge(record for record, _ in found), places_by_source, runs)


def origins(plan: Plan, completed: CompletedRuns) -> dict[Path, int]:
    """Count the finished runs by the place that they come from."""
    done = {
        wanted.name: completed.places[record.source]
        for cell in plan.cells
        for wanted, record in zip(cell.wanted, cell.found, strict=True)
        if record is not None and wanted.name not in plan.left
    }
    return dict(Counter(done.values()))


def origin_line(plan: Plan, completed: CompletedRuns) -> str:
    """Return where the finished runs come from; empty if there are none."""
    counts = origins(plan, completed)
    here = counts.pop(completed.runs, 0)
    if not counts:
        return f"done: {here} in {completed.runs}" if here else ""
    before = f"{sum(counts.values())} measured before ({', '.join(map(str, counts))})"
    return f"done: {before}, {here} in {completed.runs}; --results none counts only the latter"
