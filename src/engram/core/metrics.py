"""Metrics: pure functions of the accuracy matrix, and estimates over several runs.

R[t][i] is the accuracy, in percent, of the model after stage t on the classes of stage i. Row t has t + 1 entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_K = TypeVar("_K")
Matrix = Sequence[Sequence[float]]
# Names in result.json. The last two are null in a run with one stage.
METRICS = ("average_incremental_accuracy", "final_accuracy", "forgetting", "backward_transfer")
# Names in result.json of the accuracies with the stage of each image known; runs of earlier versions do not have them.
TASK_METRICS = ("average_task_accuracy", "final_task_accuracy")


def accuracy(targets: np.ndarray, predictions: np.ndarray) -> float:
    """Return the percentage of correct predictions."""
    if len(targets) == 0:
        raise ValueError("accuracy needs at least one prediction")
    return 100.0 * float(np.mean(targets == predictions))


def accuracy_by_stage(targets: np.ndarray, predictions: np.ndarray, sizes: Sequence[int]) -> list[float]:
    """Return the accuracy on the classes of each stage; stage 0 has the first sizes[0] labels, and so on."""
    bounds = np.cumsum([0, *sizes])
    rows: list[float] = []
    for first, last in itertools.pairwise(bounds):
        chosen = (targets >= first) & (targets < last)
        rows.append(accuracy(targets[chosen], predictions[chosen]))
    return rows


def best_of_own_stage(scores: np.ndarray, targets: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return for each image the label with the highest score among the classes of its stage (task-incremental).

    scores: (N, K), one column per label. targets: (N,), whose stages are taken as known; sizes as above.
    """
    bounds = np.cumsum([0, *sizes])
    best = np.zeros(len(targets), dtype=np.int64)
    for first, last in itertools.pairwise(bounds):
        rows = np.flatnonzero((targets >= first) & (targets < last))
        best[rows] = first + scores[rows, first:last].argmax(axis=1)
    return best


def average_incremental_accuracy(per_stage: Sequence[float]) -> float:
    """Return the mean over all stages, including the base, of the accuracy on all classes seen so far."""
    if not per_stage:
        raise ValueError("average incremental accuracy needs at least one stage")
    return float(np.mean(per_stage))


def backward_transfer(matrix: Matrix, sizes: Sequence[int] | None = None) -> float | None:
    """Return the mean over stages i < T of R[T][i] - R[i][i], or None if there is only one stage.

    sizes: number of classes of each stage. With it, each old class has the same weight, not each stage.
    """
    last = len(matrix) - 1
    if last < 1:
        return None
    changes = [matrix[last][i] - matrix[i][i] for i in range(last)]
    return float(np.average(changes, weights=None if sizes is None else sizes[:last]))


def forgetting(matrix: Matrix) -> float | None:
    """Return the mean over stages i < T of max(R[t][i], t < T) - R[T][i], or None if there is only one stage."""
    last = len(matrix) - 1
    if last < 1:
        return None
    drops = [max(matrix[t][i] for t in range(i, last)) - matrix[last][i] for i in range(last)]
    return float(np.mean(drops))


def confusion(targets: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the confusion matrix (K, K): counts with one row per true label and one column per predicted label."""
    pairs = targets.astype(np.int64) * num_classes + predictions.astype(np.int64)
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


@dataclass(frozen=True)
class Estimate:
    """Mean, sample standard deviation (None for a single run) and number of runs."""

    mean: float
    std: float | None
    n: int


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Return the estimate over several runs, or None if there are none or one of them has no value."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    std = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
    return Estimate(float(np.mean(numbers)), std, len(numbers))


@dataclass(frozen=True)
class Difference(Estimate):
    """An estimate over pairs of runs. higher: number of pairs with a difference above zero."""

    higher: int


def paired(ours: Mapping[_K, float | None], theirs: Mapping[_K, float | None]) -> Difference | None:
    """Estimate the difference ours - theirs over the keys (class order and seed) for which both have a value."""
    pairs = [(value, theirs.get(key)) for key, value in ours.items()]
    differences = [one - other for one, other in pairs if one is not None and other is not None]
    found = estimate(differences)
    if found is None:
        return None
    return Difference(found.mean, found.std, found.n, higher=sum(value > 0 for value in differences))
