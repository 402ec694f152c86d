"""The plan of a paper's experiments, printed: which runs they need, how many are done, what the rest would take."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from engram.cli.completed_runs import Known, origin_line, origins
from engram.cli.options.runs import Reproduce
from engram.cli.text import make_table, print_line, print_table
from engram.core.provenance import processor_name
from engram.experiment.parallel import ON_CPU, ON_CUDA
from engram.methods import OWN_METHODS
from engram.report.formatting import count_runs, join
from engram.reproduce.cell_plan import PaperPlan
from engram.reproduce.cost import Cost, this_hardware
from engram.reproduce.paper_tables import caption


def print_plan(console: Console, plan: PaperPlan, estimates: Sequence[Cost], known: Known, options: Reproduce) -> None:
    """Prints which runs the experiments need, how many are done, and what the rest would take."""
    here = this_hardware(options.device)
    if options.running.json:
        print_line(console, json.dumps(plan_json(plan, estimates, known, here)))
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
    if missing := missing_line(plan):
        print_line(console, missing)
    total, left = len(plan.runs), len(plan.left)
    print_line(console, f"{count_runs(total)}, each counted once: {total - left} done, {left} to do")
    for text in filter(None, (_bare_line(plan), origin_line(plan, known))):
        print_line(console, text)
    at_once = options.at_once or (ON_CPU if here == processor_name() else ON_CUDA)
    for text in cost_lines(estimates, here, left, min(at_once, left)):
        print_line(console, text)
    print_line(console, "this was a dry run: nothing was written")


def _bare_line(plan: PaperPlan) -> str:
    """Which of the runs to do count as done in other tables; empty where none does."""
    cells = [cell for cell in plan.cells if cell.bare]
    if not cells:
        return ""
    names = {wanted.name for cell in cells for wanted in cell.bare}
    shown = join(dict.fromkeys(cell.experiment.heading for cell in cells))
    return f"{len(names)} of those to do were run before and kept no importance, which {shown} shows"


def _runs_table(plan: PaperPlan) -> Table:
    """A line for each recipe with its changes: class orders and seeds, those done, and what needs it."""
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
    """What the runs to do would take, on every kind of hardware that was measured, this one first.

    at_once: how many this command would do at a time here.
    """
    if not left:
        return []
    ordered = sorted(estimates, key=lambda cost: cost.hardware != here)
    lines = (
        []
        if any(cost.hardware == here for cost in estimates)
        else [f"{here} (here): no measurement of such runs on this hardware"]
    )
    for cost in ordered:
        name = f"{cost.hardware}{' (here)' if cost.hardware == here else ''}"
        lacking = [f"{count} run{'s' if count > 1 else ''} {why}" for why, count in cost.uncounted.items()]
        if cost.seconds is None:
            lines.append(f"{name}: no estimate of {', '.join(lacking)}")
            continue
        beside = "one at a time" if cost.at_once == 1 else f"up to {cost.at_once} side by side"
        text = f"{name}: about {_long(cost.seconds)}, "
        text += f"from {cost.measured} measured run{'s' if cost.measured > 1 else ''}, {beside}"
        if cost.hardware == here and at_once != cost.at_once:
            text += f" (this command would do {at_once} at a time: --at-once)"
        text += "".join(f"; without {runs}" for runs in lacking)
        if cost.unmeasured:
            text += f"; not measured there and taken to cost the same: {', '.join(cost.unmeasured)}"
        lines.append(text)
    return lines


def _long(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes} min ({minutes / 60:.1f} h)"


def missing_line(plan: PaperPlan) -> str | None:
    """Which recipes of the plan there are not, by what they begin with; None where there are all."""
    missing = list(dict.fromkeys(re.sub(r"-b\d+-s\d+$", "", cell.missing) for cell in plan.cells if cell.missing))
    return f"no recipe yet: {', '.join(missing)} {OWN_METHODS}" if missing else None


def plan_json(plan: PaperPlan, estimates: Sequence[Cost], known: Known, here: str) -> dict[str, Any]:
    """The plan for programs."""
    return {
        "runs": [
            {"run": name, "recipe": wanted.config.recipe, "order": wanted.config.order, "seed": wanted.config.seed}
            | {"done": name not in plan.left}
            for name, wanted in plan.runs.items()
        ],
        "done": len(plan.runs) - len(plan.left),
        "done_in": {str(place): count for place, count in origins(plan, known).items()},
        "left": len(plan.left),
        "no_recipe": list(dict.fromkeys(cell.missing for cell in plan.cells if cell.missing)),
        "hardware": here,
        "minutes": {cost.hardware: cost.seconds / 60 for cost in estimates if cost.seconds is not None},
    }
