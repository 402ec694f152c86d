"""The plan of a paper's experiments: the runs that are done, where they come from, and how long the rest would take."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engram.cli.commands.run_common import DRY_RUN
from engram.cli.options.runs import Reproduce
from engram.cli.text import make_table, print_line, print_table
from engram.contract import OWN_METHODS
from engram.core.io import typed_path
from engram.core.provenance import processor_name
from engram.experiment.parallel import ON_CPU, ON_CUDA
from engram.report.formatting import count_runs, join
from engram.reproduce.cell_plan import PaperPlan
from engram.reproduce.cost import Cost, this_hardware
from engram.reproduce.paper_tables import caption
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


def origins(plan: PaperPlan, completed: CompletedRuns) -> dict[Path, int]:
    """Count the finished runs by the place that they come from."""
    done = {
        wanted.name: completed.places[record.source]
        for cell in plan.cells
        for wanted, record in zip(cell.wanted, cell.found, strict=True)
        if record is not None and wanted.name not in plan.left
    }
    return dict(Counter(done.values()))


def origin_line(plan: PaperPlan, completed: CompletedRuns) -> str:
    """Return where the finished runs come from; empty if there are none."""
    counts = origins(plan, completed)
    here = counts.pop(completed.runs, 0)
    if not counts:
        return f"done: {here} in {completed.runs}" if here else ""
    before = f"{sum(counts.values())} measured before ({', '.join(map(str, counts))})"
    return f"done: {before}, {here} in {completed.runs}; --results none counts only the latter"


def print_plan(
    console: Console, plan: PaperPlan, estimates: Sequence[Cost], completed: CompletedRuns, options: Reproduce
) -> None:
    """Print which runs the experiments need, how many are done, and how long the rest would take."""
    here = this_hardware(options.device)
    if options.running.json:
        print_line(console, json.dumps(plan_json(plan, estimates, completed, here)))
        return
    table = make_table(["", "cells", "runs", "done", "no recipe yet"], ["cells", "runs", "done", "no recipe yet"])
    for experiment in plan.experiments:
        cells = plan.of(experiment)
        names = {wanted.name for cell in cells for wanted in cell.wanted}
        done = len(names) - len({wanted.name for cell in cells for wanted in cell.left})
        lacking = sum(bool(cell.missing) for cell in cells)
        table.add_row(caption(experiment), str(len(cells)), str(len(names)), str(done), str(lacking) if lacking else "")
    print_table(console, table)
    print_table(console, _runs_table(plan))
    total, left = len(plan.runs), len(plan.left)
    counted = f"{count_runs(total)}, each counted once: {total - left} done, {left} to do"
    at_once = options.at_once or (ON_CPU if here == processor_name() else ON_CUDA)
    texts = [missing_line(plan), counted, _bare_line(plan), origin_line(plan, completed)]
    texts += cost_lines(estimates, here, left, min(at_once, left))
    for text in filter(None, [*texts, DRY_RUN]):
        print_line(console, text)


def _bare_line(plan: PaperPlan) -> str:
    """Return how many of the runs to do count as done in other tables; empty if none does."""
    cells = [cell for cell in plan.cells if cell.bare]
    if not cells:
        return ""
    names = {wanted.name for cell in cells for wanted in cell.bare}
    shown = join(dict.fromkeys(cell.experiment.heading for cell in cells))
    return f"{len(names)} of those to do were run before without saving the importance that {shown} shows"


def _runs_table(plan: PaperPlan) -> Table:
    """Return the number of runs, of finished runs, and the experiments that need them, by recipe and its changes."""
    table = make_table(["recipe", "runs", "done", "for"], ["runs", "done"])
    users: dict[str, dict[str, None]] = {}
    names: dict[str, list[str]] = {}
    for cell in plan.cells:
        for wanted in cell.wanted:
            label = wanted.config.recipe + ("" if wanted.config.precision == "auto" else f" {wanted.config.precision}")
            users.setdefault(label, {})[cell.experiment.heading] = None
            names.setdefault(label, []).append(wanted.name)
    for label, each in names.items():
        unique = set(each)
        table.add_row(label, str(len(unique)), str(len(unique - set(plan.left))), ", ".join(users[label]))
    return table


def cost_lines(estimates: Sequence[Cost], here: str, left: int, at_once: int) -> list[str]:
    """Return how long the runs to do would take on each hardware that was measured, this one first.

    at_once: how many this command would do at a time here.
    """
    if not left:
        return []
    ordered = sorted(estimates, key=lambda cost: cost.hardware != here)
    lines: list[str] = []
    if not any(cost.hardware == here for cost in estimates):
        lines.append(f"{here} (here): no measurement of such runs on this hardware")
    for cost in ordered:
        name = f"{cost.hardware}{' (here)' if cost.hardware == here else ''}"
        lacking = [f"{count} run{'s' if count > 1 else ''} {why}" for why, count in cost.uncounted.items()]
        if cost.seconds is None:
            lines.append(f"{name}: no estimate of {', '.join(lacking)}")
            continue
        together = "one at a time" if cost.at_once == 1 else f"up to {cost.at_once} side by side"
        text = f"{name}: about {_minutes(cost.seconds)}, "
        text += f"from {cost.measured} measured run{'s' if cost.measured > 1 else ''}, {together}"
        if cost.hardware == here and at_once != cost.at_once:
            text += f" (this command would do {at_once} at a time: --at-once)"
        text += "".join(f"; without {runs}" for runs in lacking)
        if cost.unmeasured:
            text += f"; not measured there and assumed to cost the same: {', '.join(cost.unmeasured)}"
        lines.append(text)
    return lines


def _minutes(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes} min ({minutes / 60:.1f} h)"


def missing_line(plan: PaperPlan) -> str:
    """Return the beginnings of the recipes that the plan needs and that do not exist; empty if all exist."""
    missing = list(dict.fromkeys(re.sub(r"-b\d+-s\d+$", "", cell.missing) for cell in plan.cells if cell.missing))
    return f"no recipe yet: {', '.join(missing)} {OWN_METHODS}" if missing else ""


def plan_json(plan: PaperPlan, estimates: Sequence[Cost], completed: CompletedRuns, here: str) -> dict[str, Any]:
    """Return the plan as plain data."""
    return {
        "runs": [
            {"run": name, "recipe": wanted.config.recipe, "order": wanted.config.order, "seed": wanted.config.seed}
            | {"done": name not in plan.left}
            for name, wanted in plan.runs.items()
        ],
        "done": len(plan.runs) - len(plan.left),
        "done_in": {str(place): count for place, count in origins(plan, completed).items()},
        "left": len(plan.left),
        "no_recipe": list(dict.fromkeys(cell.missing for cell in plan.cells if cell.missing)),
        "hardware": here,
        "minutes": {cost.hardware: cost.seconds / 60 for cost in estimates if cost.seconds is not None},
    }
