"""Metrics: pure functions of the accuracy matrix, and what several runs come to.

R[t][i] is the accuracy, in percent, on the classes that arrived at stage i of the model after stage t; row t has t +
1 entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_K = TypeVar("_K")
Matrix = Sequence[Sequence[float]]
# The names in result.json; of one stage the last two are null.
METRICS = ("average_incremental_accuracy", "final_accuracy", "forgetting", "backward_transfer")


def accuracy(targets: np.ndarray, predictions: np.ndarray) -> float:
    """The share of predictions that are right, in percent."""
    if len(targets) == 0:
        raise ValueError("accuracy needs at least one prediction")
    return 100.0 * float(np.mean(targets == predictions))


def accuracy_by_stage(targets: np.ndarray, predictions: np.ndarray, sizes: Sequence[int]) -> list[float]:
    """The accuracy on the classes of each stage, for labels that count up through the stages' sizes."""
    bounds = np.cumsum([0, *sizes])
    rows: list[float] = []
    for first, last in itertools.pairwise(bounds):
        chosen = (targets >= first) & (targets < last)
        rows.append(accuracy(targets[chosen], predictions[chosen]))
    return rows


def average_incremental_accuracy(per_stage: Sequence[float]) -> float:
    """The mean over all stages, the base included, of the accuracy over the classes seen then."""
    if not per_stage:
        raise ValueError("average incremental accuracy needs at least one stage")
    return float(np.mean(per_stage))


def backward_transfer(matrix: Matrix) -> float | None:
    """The mean over stages i < T of R[T][i] - R[i][i]; None with one stage only."""
    last = len(matrix) - 1
    if last < 1:
        return None
    return float(np.mean([matrix[last][i] - matrix[i][i] for i in range(last)]))


def class_backward_transfer(matrix: Matrix, sizes: Sequence[int]) -> float | None:
    """The same with a stage counting for as much as it has classes (sizes): the mean over the old classes."""
    last = len(matrix) - 1
    if last < 1:
        return None
    return float(np.average([matrix[last][i] - matrix[i][i] for i in range(last)], weights=sizes[:last]))


def forgetting(matrix: Matrix) -> float | None:
    """The mean over stages i < T of the best R[t][i] with t < T, less R[T][i]; None with one stage only."""
    last = len(matrix) - 1
    if last < 1:
        return None
    drops = [max(matrix[t][i] for t in range(i, last)) - matrix[last][i] for i in range(last)]
    return float(np.mean(drops))


def confusion(targets: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts (K, K): row is the true label, column the predicted one."""
    pairs = targets.astype(np.int64) * num_classes + predictions.astype(np.int64)
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


@dataclass(frozen=True)
class Estimate:
    """Mean, sample standard deviation (None for a single run) and number of runs."""

    mean: float
    std: float | None
    n: int


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """The estimate over runs, or None where a value is not defined (one stage: nothing to forget)."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    std = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
    return Estimate(float(np.mean(numbers)), std, len(numbers))


@dataclass(frozen=True)
class Difference(Estimate):
    """An estimate over pairs of runs. higher: in how many of them the difference is above zero."""

    higher: int


def paired(ours: Mapping[_K, float | None], theirs: Mapping[_K, float | None]) -> Difference | None:
    """Ours less theirs, over the keys (class order and seed) at which both have a number; None where none has."""
    both = [(value, theirs.get(key)) for key, value in ours.items()]
    differences = [one - other for one, other in both if one is not None and other is not None]
    found = estimate(differences)
    if found is None:
        return None
    return Difference(found.mean, found.std, found.n, higher=sum(value > 0 for value in differences))
