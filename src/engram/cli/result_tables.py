"""Tables of the results of several runs: by recipe, and differences between recipes."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engram.cli.text import (
    clock,
    make_table,
    percent,
    print_line,
    print_table,
)
from engram.core.errors import EngramError
from engram.core.events import Event, RunFinished, RunSkipped, read_events
from engram.core.metrics import Estimate, estimate, paired
from engram.runs.directory import EVENTS, UNKNOWN_CODE
from engram.runs.reader import read_manifest

EndedRuns = dict[str, Event]  # the last event of each run that began, by its name
RunResult = Mapping[str, Any]


def print_results(console: Console, last: EndedRuns, parent: Path) -> None:
    """Print the results of the complete runs, and what to do next."""
    complete = [event for event in last.values() if isinstance(event, (RunFinished, RunSkipped))]
    if not complete:
        return
    results = results_of(complete)
    print_table(console, results_table(results))
    if (differences := differences_table(results)) is not None:
        print_table(console, differences)
    reused = sum(map(_reused_base, complete))
    if reused:
        print_line(console, f"time: {reused} of {len(results)} runs did not train the base stage but reused it")
    print_line(console, f"next: engram report {shlex.quote(str(parent))}")


def results_of(complete: Sequence[RunFinished | RunSkipped]) -> list[dict[str, Any]]:
    """Return the results of the runs; if runs of a recipe have different code, the recipe's name includes the code."""
    kinds = [(event.result["recipe"], _code(event)) for event in complete]
    codes = Counter(recipe for recipe, _ in set(kinds))
    return [
        event.result if codes[recipe] == 1 else {**event.result, "recipe": f"{recipe} [code {code}]"}
        for event, (recipe, code) in zip(complete, kinds, strict=True)
    ]


def _code(event: RunFinished | RunSkipped) -> str:
    """Return the recorded code of the run's method."""
    with suppress(EngramError):
        return read_manifest(Path(event.directory or "")).method_code or UNKNOWN_CODE
    return UNKNOWN_CODE


def _reused_base(event: RunFinished | RunSkipped) -> bool:
    """Whether another run trained the run's base stage, so that its time is not counted here."""
    with suppress(EngramError):
        kinds = (found.get("event") for found in read_events(Path(event.directory or "") / EVENTS))
        return next((kind for kind in kinds if kind in ("base_reused", "stage_finished")), None) == "base_reused"
    return False


def results_table(results: Sequence[RunResult]) -> Table:
    """Return number of runs, mean and standard deviation of the accuracies in percent, and total time by recipe."""
    columns = _accuracy_columns(results)
    headings = [f"{heading} %" for heading in columns]
    table = make_table(["recipe", "n", *headings, "time"], right=["n", *headings, "time"])
    table.padding = (0, 1, 0, 0)  # so that two predictors fit into 80 columns
    for recipe, runs in _by_recipe(results).items():
        cells = [estimate([run[key][name] for run in runs if name in run[key]]) for key, name in columns.values()]
        table.add_row(recipe, str(len(runs)), *map(spread, cells), clock(sum(run["seconds"] for run in runs)))
    return table


def differences_table(results: Sequence[RunResult]) -> Table | None:
    """Return each recipe's accuracies minus the first's, over the n pairs of runs with the same class order and seed.

    Recipes with other data or stages than the first are left out. None if no recipe has two pairs.
    """
    (first, base), *others = _by_recipe(results).items()
    columns = _accuracy_columns(base)
    table = make_table([f"minus {first}, run by run", "n", *columns], right=["n", *columns])
    table.padding = (0, 1, 0, 0)
    for recipe, runs in others:
        found = [paired(_by_draw(runs, *column), _by_draw(base, *column)) for column in columns.values()]
        pairs = max((value.n for value in found if value is not None), default=0)
        if pairs > 1 and _images_and_stages(runs[0]) == _images_and_stages(base[0]):
            table.add_row(recipe, str(pairs), *map(spread, found))
    return table if table.row_count else None


def _accuracy_columns(results: Sequence[RunResult]) -> dict[str, tuple[str, str]]:
    """Return metric and predictor of each column of accuracies, by heading."""
    predictors = list(dict.fromkeys(name for result in results for name in result["final_accuracy"]))
    measures = {"average_incremental_accuracy": "average", "final_accuracy": "final"}
    return {f"{label}\n{name}": (key, name) for key, label in measures.items() for name in predictors}


def _by_recipe(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result["recipe"], []).append(result)
    return groups


def _by_draw(runs: Sequence[RunResult], key: str, name: str) -> dict[object, float | None]:
    return {(run["order"], run["seed"]): run[key].get(name) for run in runs}


def _images_and_stages(run: RunResult) -> object:
    return run["dataset"], [stage["classes"] for stage in run["stages"]]


def spread(value: Estimate | None) -> str:
    """Format mean and sample standard deviation (if there are two or more values); "-" for None."""
    if value is None:
        return "-"
    return percent(value.mean) if value.std is None else f"{percent(value.mean)} ± {percent(value.std)}"
