"""The content of result.json, computed from the records of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from engram.core import metrics


class StageResult(TypedDict):
    """One stage in result.json."""

    stage: int
    classes: int
    accuracy: dict[str, float]
    seconds: float
    accuracy_by_stage: dict[str, list[float]]
    task_accuracy: NotRequired[dict[str, float]]


class Result(TypedDict):
    """The content of result.json: percent, unrounded, by predictor; docs/run-directory.md defines each number."""

    engram: str
    recipe: str
    method: str
    dataset: str
    order: int | str
    seed: int
    precision: NotRequired[str]
    code: NotRequired[str]
    stages: list[StageResult]
    average_incremental_accuracy: dict[str, float]
    final_accuracy: dict[str, float]
    backward_transfer: dict[str, float | None]
    forgetting: dict[str, float | None]
    average_task_accuracy: NotRequired[dict[str, float]]
    final_task_accuracy: NotRequired[dict[str, float]]
    seconds: float
    seconds_by: dict[str, float]


@dataclass(frozen=True)
class StageRecord:
    """The numbers of one stage. Accuracies in percent, by predictor; accuracy_by_stage has one per stage so far.

    task_accuracy: with the stage of each image known; empty in a stage of an earlier version.
    """

    stage: int
    classes: int
    accuracy: dict[str, float]
    seconds: float
    accuracy_by_stage: dict[str, list[float]]
    seconds_by: dict[str, float]
    task_accuracy: dict[str, float] = field(default_factory=dict)

    def to_result(self) -> StageResult:
        """The stage's entry in result.json."""
        entry: StageResult = {
            "stage": self.stage,
            "classes": self.classes,
            "accuracy": self.accuracy,
            "seconds": self.seconds,
            "accuracy_by_stage": self.accuracy_by_stage,
        }
        return {**entry, "task_accuracy": self.task_accuracy} if self.task_accuracy else entry


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


def task_metrics(stages: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The metrics of the accuracies with the stage of each image known, by name and predictor.

    stages: the accuracies of each stage by predictor. Empty if one of the stages has none.
    """
    if not stages or not all(stages):
        return {}
    columns = {name: [stage[name] for stage in stages] for name in stages[0]}
    return {
        "average_task_accuracy": {n: metrics.average_incremental_accuracy(column) for n, column in columns.items()},
        "final_task_accuracy": {name: column[-1] for name, column in columns.items()},
    }


def summarise(identity: dict[str, Any], records: Sequence[StageRecord]) -> Result:
    """The content of result.json. identity: its keys up to the stages."""
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
        **task_metrics([record.task_accuracy for record in records]),
        "seconds": sum(record.seconds for record in records),
        "seconds_by": {key: sum(record.seconds_by.get(key, 0.0) for record in records) for key in SECONDS},
    }
