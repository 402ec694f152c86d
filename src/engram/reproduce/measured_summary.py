"""A few measured numbers of each recipe, included in the package for `engram list methods`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from engram.core.metrics import estimate
from engram.experiment.recipes import recipe, recipe_names
from engram.reproduce.records import Record, protocol_key

FILE = "measured.json"
COMMAND = "engram results summary src/engram/reproduce/papers/measured.json results"
AVERAGE = "average_incremental_accuracy"


def summarise(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By recipe: n, mean and standard deviation (None for one run) of the average accuracy, and mean seconds of a run.

    The latest run of each class order and seed counts, in the default precision of its device. Accuracy is in percent,
    with the predictor that the recipe reports. Runs may have shared a device.
    """
    found: dict[str, dict[tuple[str, int], Record]] = {}
    for record in sorted(records, key=lambda record: record.created):
        name = record.recipe.split(" ")[0]
        if record.has_default_precision and name in recipe_names() and _is_unchanged(record, name):
            found.setdefault(name, {})[record.order.name, record.seed] = record
    return {name: _numbers(name, list(runs.values())) for name, runs in sorted(found.items())}


def _is_unchanged(record: Record, name: str) -> bool:
    """Whether the run has the recipe's current settings, apart from class order and seed."""
    plain = recipe(name).with_value("order", record.order.name).with_value("seed", record.seed)
    return record.key == protocol_key(plain)


def _numbers(name: str, runs: Sequence[Record]) -> dict[str, Any]:
    predictor = recipe(name).predictor
    accuracy = estimate([value for run in runs if (value := run.value(AVERAGE, predictor)) is not None])
    assert accuracy is not None
    return {
        "predictor": predictor,
        "n": accuracy.n,
        "mean": round(accuracy.mean, 2),
        "std": None if accuracy.std is None else round(accuracy.std, 2),
        "seconds": round(statistics.fmean(run.result.seconds for run in runs)),
        "hardware": ", ".join(sorted({run.machine for run in runs})),
    }


def as_text(summary: dict[str, dict[str, Any]]) -> str:
    """Return the summary as JSON, one recipe per line."""
    lines = [f" {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in summary.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def measured() -> dict[str, dict[str, Any]]:
    """Return the summary in this package, by recipe."""
    return json.loads((files("engram.reproduce") / "papers" / FILE).read_text(encoding="utf-8"))
