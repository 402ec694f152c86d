"""Balanced and plain accuracy of several classes, and whether a loss is larger than chance explains.

Balanced accuracy is the mean over classes: each class counts the same. Plain accuracy is of all images: each image
counts the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

HARMED = 5.0  # points of accuracy that a lesson may cost other classes without a warning
STANDARD_ERRORS = 2.0  # that a loss must exceed as well: with few held-out images accuracy varies by chance
UNCOUNTED = 20.0  # points, if the number of held-out images is not known

ByPredictor = dict[str, float]


def balanced_accuracy(accuracy: Mapping[Any, ByPredictor], labels: Iterable[Any]) -> ByPredictor:
    """Return the mean accuracy of those classes that have held-out images, by predictor."""
    wanted = [accuracy[label] for label in labels if accuracy[label]]
    return {by: float(np.mean([shares[by] for shares in wanted])) for by in _common(wanted)}


def plain_accuracy(
    accuracy: Mapping[Any, ByPredictor], images: Mapping[Any, int], labels: Iterable[Any]
) -> ByPredictor:
    """Return the accuracy on all held-out images of these classes, by predictor. images: their number by class."""
    wanted = [label for label in labels if accuracy[label] and images.get(label)]
    counts = [images[label] for label in wanted]
    shares = [accuracy[label] for label in wanted]
    return {by: float(np.average([each[by] for each in shares], weights=counts)) for by in _common(shares)}


def _common(shares: list[ByPredictor]) -> list[str]:
    return sorted(set.intersection(*map(set, shares))) if shares else []


def is_harmed(before: float, after: float, images: int) -> bool:
    """Return whether accuracy in percent fell by more than HARMED and more than chance explains.

    images: number of held-out images that both were measured on; 0 if an early version did not record it.
    """
    if not images:
        return before - after > UNCOUNTED
    variance = sum(share / 100 * (1 - share / 100) for share in (before, after)) / images
    return before - after > max(HARMED, 100 * STANDARD_ERRORS * math.sqrt(variance))
