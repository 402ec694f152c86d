"""The data that trackers get about a run, and the protocol that each tracker implements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from engram.report.formatting import csv_text

Axis = Literal["epoch", "stage", "lesson"]
Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """A run or a lesson.

    key: 16 hex digits, the same when the run is resumed. config: every setting by dotted name. about: recipe, method,
    versions, commit, hardware and so on.
    """

    name: str
    key: str
    config: Mapping[str, Any]
    about: Mapping[str, str]

    @property
    def folder(self) -> str:
        """A file name for this run that no other run has."""
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', self.name).lstrip('.-')[:100]}-{self.key[:6]}"


@dataclass(frozen=True, eq=False)
class Confusion:
    """Test images by true class (row) and predicted class (column) after the last stage. png: the same, drawn."""

    predictor: str
    class_names: tuple[str, ...]
    counts: np.ndarray
    png: bytes

    def csv(self) -> str:
        """Return the counts as a CSV file."""
        rows = ([name, *row] for name, row in zip(self.class_names, self.counts.tolist(), strict=True))
        return csv_text(["true_class", *self.class_names], rows)


class Tracker(Protocol):
    """Takes the numbers of one run. Any method may raise any error: the run continues without the tracker."""

    def start(self, run: TrackedRun) -> None:
        """Begin, or continue a run that was resumed."""

    def log(self, axis: Axis, step: int, numbers: Mapping[str, float]) -> None:
        """Take numbers by name, such as loss/main/total. step: position on the axis, counted from 0."""

    def log_confusion(self, step: int, confusion: Confusion) -> None:
        """Take a confusion matrix. step: number of the stage."""

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """End. summary: average, final accuracy and forgetting of a run that is finished."""
