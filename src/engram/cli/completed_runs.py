"""The complete runs that count for a paper's experiments, and where they are from."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engram.core.io import typed_path
from engram.reproduce.cell_plan import PaperPlan
from engram.reproduce.records import Record
from engram.reproduce.results_files import SUFFIX, is_ours, merge, read_results
from engram.runs.directory import find_runs

RESULTS = Path("results")
NO_RESULTS = "none"  # --results: the runs of --out alone


@dataclass(frozen=True)
class Known:
    """Every complete run that counts. places: by a record's source, where it was looked for; runs: that of --out."""

    records: list[Record]
    places: dict[str, Path]
    runs: Path


def known_records(results: str | None, runs: Path) -> Known:
    """The complete runs in the results and in the directory of runs; a damaged file is refused by its name.

    results: None takes what the folder of that name has; it may be somebody else's, whose files are left out.
    """
    places = [typed_path(results)] if results not in (None, NO_RESULTS) else []
    for file in sorted(RESULTS.glob(f"*{SUFFIX}")) if results is None else ():
        if is_ours(file):
            places.append(file)
        else:
            print(f"engram: left out {file}: it holds no results of engram (--results names others)", file=sys.stderr)
    if runs.is_dir() and find_runs(runs):
        places.append(runs)
    found = [(record, place) for place in places for record in read_results([place]).records]
    return Known(merge(record for record, _ in found), {record.source: place for record, place in found}, runs)


def origins(plan: PaperPlan, known: Known) -> dict[Path, int]:
    """How many of the runs that are done come from which place."""
    done = {
        wanted.name: known.places[record.source]
        for cell in plan.cells
        for wanted, record in zip(cell.wanted, cell.found, strict=True)
        if record is not None and wanted.name not in plan.left
    }
    return dict(Counter(done.values()))


def origin_line(plan: PaperPlan, known: Known) -> str:
    """Where the runs that are done come from; empty where none is."""
    counts = origins(plan, known)
    here = counts.pop(known.runs, 0)
    if not counts:
        return f"done: {here} in {known.runs}" if here else ""
    before = f"{sum(counts.values())} measured before ({', '.join(map(str, counts))})"
    return f"done: {before}, {here} in {known.runs}; --results none counts the latter alone"
