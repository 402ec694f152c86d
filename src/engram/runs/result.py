"""The content of result.json, computed from the records of the stages."""

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
    """The numbers of one stage. Accuracies in percent, by predictor; accuracy_by_stage has one per stage so far."""

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


_DIGITS = 18  # of the largest number of a class order


def order_value(name: str) -> int | str:
    """A class order as result.json has it: a number if its name is one."""
    return int(name) if name.isdecimal() and len(name) <= _DIGITS else name


SECONDS = ("train", "importance", "exemplars", "evaluate")


def stage_metrics(accuracy: Sequence[float], matrix: metrics.Matrix) -> dict[str, float | None]:
    """The metrics of one predictor, from its accuracy after each stage and its accuracy matrix."""
    return {
        "average_incremental_accuracy": metrics.average_incremental_accuracy(accuracy),
        "final_accuracy": accuracy[-1],
        "backward_transfer": metrics.backward_transfer(matrix),
        "forgetting": metrics.forgetting(matrix),
    }


def summarise(identity: dict[str, Any], records: Sequence[StageRecord]) -> Result:
    """The content of result.json. identity: its keys up to the seed."""
    by_predictor = {
        name: stage_metrics(
            [record.accuracy[name] for record in records], [record.accuracy_by_stage[name] for record in records]
        )
        for name in records[0].accuracy
    }
    names = ("average_incremental_accuracy", "final_accuracy", "backward_transfer", "forgetting")
    return {  # pyright: ignore[reportReturnType]
        **identity,
        "stages": [record.to_result() for record in records],
        **{name: {predictor: values[name] for predictor, values in by_predictor.items()} for name in names},
        "seconds": sum(record.seconds for record in records),
        "seconds_by": {key: sum(record.seconds_by.get(key, 0.0) for record in records) for key in SECONDS},
    }
