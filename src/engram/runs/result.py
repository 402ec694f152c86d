"""The result of a run: what result.json holds, computed from the stages' records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from engram.core import metrics


class StageResult(TypedDict):
    """One stage in result.json."""

    stage: int
    classes: int
    accuracy: dict[str, float]
    seconds: float
    accuracy_by_stage: dict[str, list[float]]


class Result(TypedDict):
    """The content of result.json: percent, unrounded, by predictor; docs/run-directory.md defines each number."""

    engram: str
    recipe: str
    method: str
    dataset: str
    order: int | str
    seed: int
    stages: list[StageResult]
    average_incremental_accuracy: dict[str, float]
    final_accuracy: dict[str, float]
    backward_transfer: dict[str, float | None]
    forgetting: dict[str, float | None]
    seconds: float
    seconds_by: dict[str, float]


@dataclass(frozen=True)
class StageRecord:
    """What one stage came to; accuracies in percent, by predictor, accuracy_by_stage with an entry per stage so far."""

    stage: int
    classes: int
    accuracy: dict[str, float]
    seconds: float
    accuracy_by_stage: dict[str, list[float]]
    seconds_by: dict[str, float]

    def to_result(self) -> StageResult:
        """The stage's entry in result.json."""
        return {
            "stage": self.stage,
            "classes": self.classes,
            "accuracy": self.accuracy,
            "seconds": self.seconds,
            "accuracy_by_stage": self.accuracy_by_stage,
        }


SECONDS = ("train", "importance", "exemplars", "evaluate")


def summarise(identity: dict[str, Any], records: Sequence[StageRecord]) -> Result:
    """The content of result.json; `identity` has its keys up to the seed."""
    predictors = list(records[0].accuracy)
    per_stage = {name: [record.accuracy[name] for record in records] for name in predictors}
    matrices = {name: [record.accuracy_by_stage[name] for record in records] for name in predictors}
    return {  # pyright: ignore[reportReturnType]
        **identity,
        "stages": [record.to_result() for record in records],
        "average_incremental_accuracy": {
            name: metrics.average_incremental_accuracy(values) for name, values in per_stage.items()
        },
        "final_accuracy": {name: values[-1] for name, values in per_stage.items()},
        "backward_transfer": {name: metrics.backward_transfer(matrix) for name, matrix in matrices.items()},
        "forgetting": {name: metrics.forgetting(matrix) for name, matrix in matrices.items()},
        "seconds": sum(record.seconds for record in records),
        "seconds_by": {key: sum(record.seconds_by.get(key, 0.0) for record in records) for key in SECONDS},
    }
