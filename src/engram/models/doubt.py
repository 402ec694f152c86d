"""Doubt: tell images of known classes from strangers, by held-out images.

With a method that keeps the means of its classes' features, an image is familiar if its highest score is far above the
second, and its features point to the mean of a class (`DoubtByMeans`). With other methods, the scores of held-out
images say where each class lies in the space of scores, and how far its images scatter: an image is familiar if it is
close to a class, and much closer to it than to any other (`DoubtByScores`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.predictors import ImageOutputs
from engram.core.errors import EngramError, option

FEWEST = 20  # held-out images
MOST_CLASSES = 2000  # the statistics grow with the square of their number
SHRINKAGE = 0.3  # weight of equal variances in the covariance, of which there are few images to estimate it from
FOLDS = 5
# Weight of the direction of the features beside the lead of the highest score, both in standard deviations of held-out
# images. Of 0.5, 1 and 2 the best on held-out training images of groceries and two sets of Tiny-ImageNet.
DIRECTION = 0.5
_CLOSE = 1e-9  # smallest squared distance


class Doubt(ABC):
    """Statistics that tell images of unknown classes from those of known ones.

    familiarity: (N,), of held-out images, smallest first; each was measured without the image itself.
    """

    familiarity: Tensor

    @abstractmethod
    def familiarity_of(self, scores: Tensor, outputs: ImageOutputs) -> Tensor:
        """Return how familiar images are (N,): the higher, the more like a known class.

        scores: (N, K), logits of the probabilities. outputs: of the network.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors by name."""

    def threshold(self, rate: float) -> float:
        """Return the familiarity below which an image is called unknown, so that this share of known images is."""
        check_rate(rate)
        count = len(self.familiarity)
        if count * rate < 1:
            raise EngramError(
                f"{option('unknown', f'{rate:g}')} needs at least {math.ceil(1 / rate)} held-out images, and this "
                f"model has {count} that can be used; give a higher rate, or hold out more images"
            )
        return float(np.quantile(self.familiarity.numpy(), rate))


@dataclass(frozen=True, eq=False)
class DoubtByMeans(Doubt):
    """Statistics of known images, for a method that keeps the means of its classes.

    centres: (K, D), unit vectors towards the means of the classes' features. typical: (2, 2), of held-out images: mean
    and deviation of the lead of the highest score, and of the cosine to the nearest centre.
    """

    centres: Tensor
    typical: Tensor
    familiarity: Tensor

    @classmethod
    def fit(cls, scores: Tensor, features: Tensor, before: Tensor, means: Tensor) -> Self | None:
        """Estimate the statistics from scores (N, K) and features (N, D) of held-out images; None if these are too few.

        before, means: (K, D), means of the classes' features without the held-out images, and with them.
        """
        enough = len(scores) >= FEWEST and 2 <= scores.shape[1] <= MOST_CLASSES
        if not enough or not bool(scores.isfinite().all()):
            return None
        parts = torch.stack(_lead_and_direction(scores, features, F.normalize(before.double(), dim=1)))
        typical = torch.stack([parts.mean(dim=1), parts.std(dim=1).clamp(min=_CLOSE)], dim=1).cpu()
        familiarity = _in_deviations(parts.cpu(), typical)
        return cls(F.normalize(means.double(), dim=1).cpu(), typical, familiarity.sort().values)

    def familiarity_of(self, scores: Tensor, outputs: ImageOutputs) -> Tensor:
        parts = _lead_and_direction(scores, outputs.features, self.centres.to(scores.device))
        return _in_deviations(torch.stack(parts), self.typical.to(scores.device))

    def state(self) -> dict[str, Tensor]:
        return {"centres": self.centres, "typical": self.typical, "familiarity": self.familiarity}


@dataclass(frozen=True, eq=False)
class DoubtByScores(Doubt):
    """Statistics of the scores of known images.

    means: (K, K), mean scores of each class. whitening: (K, K), turns scores into coordinates of variance 1.
    """

    means: Tensor
    whitening: Tensor
    familiarity: Tensor

    @classmethod
    def fit(cls, scores: Tensor, labels: Tensor, others: dict[int, Tensor]) -> Self | None:
        """Estimate the statistics from scores (N, K) of held-out images; None if these are too few.

        others: scores of other images of the classes that have no held-out image.
        """
        classes = scores.shape[1]
        covered = {*labels.tolist(), *(label for label, own in others.items() if len(own))}
        enough = len(scores) >= FEWEST and 2 <= classes <= MOST_CLASSES and len(covered) == classes
        if not enough or not bool(scores.isfinite().all()):
            return None
        scores = scores.double().cpu()
        fold = _folds(labels)
        means, whitening = _statistics(scores, labels, others, classes)
        familiarity = torch.empty(len(scores), dtype=torch.float64)
        measured = torch.ones(len(scores), dtype=torch.bool)
        for number in range(FOLDS):
            left_out = fold == number
            kept = ~left_out
            # An only image of its class cannot be compared with others of the class.
            alone = left_out & ~torch.isin(labels, labels[kept])
            measured &= ~alone
            known = others | {label: scores[labels == label] for label in set(labels[alone].tolist())}
            part = _statistics(scores[kept], labels[kept], known, classes)
            familiarity[left_out] = _familiarity(scores[left_out], *part)
        return cls(means, whitening, familiarity[measured].sort().values)

    def familiarity_of(self, scores: Tensor, outputs: ImageOutputs | None = None) -> Tensor:
        device = scores.device
        return _familiarity(scores.double(), self.means.to(device), self.whitening.to(device))

    def state(self) -> dict[str, Tensor]:
        return {"means": self.means, "whitening": self.whitening, "familiarity": self.familiarity}


def doubt_from_state(state: dict[str, Tensor], classes: int, features: int) -> Doubt:
    """Return the statistics from tensors that were saved; refuse those of another shape. features: of the head."""
    shapes = {name: value.shape for name, value in state.items()}
    numbers = shapes.get("familiarity", ())
    by_means = {"centres": (classes, features), "typical": (2, 2), "familiarity": numbers}
    by_scores = {"means": (classes, classes), "whitening": (classes, classes), "familiarity": numbers}
    if shapes not in (by_means, by_scores) or len(numbers) != 1:
        raise EngramError(f"the statistics of known images do not fit {classes} classes; the model is damaged")
    if not all(value.dtype == torch.float64 and bool(value.isfinite().all()) for value in state.values()):
        raise EngramError("the statistics of known images are not finite numbers; the model is damaged")
    if shapes == by_scores:
        return DoubtByScores(**state)
    if not bool((state["typical"][:, 1] > 0).all()):
        raise EngramError("the statistics of known images have no deviation; the model is damaged")
    return DoubtByMeans(**state)


def check_rate(rate: float) -> None:
    """Refuse a rate that is not between 0 and 1."""
    if not 0 < rate < 1:
        raise EngramError(f"{option('unknown')} must be a share above 0 and below 1, such as 0.05, got {rate:g}")


def area_under_curve(known: Sequence[float] | np.ndarray, strangers: Sequence[float] | np.ndarray) -> float:
    """Return the share of pairs in which the known image is more familiar than the stranger (AUROC); ties are half."""
    ordered = np.sort(np.asarray(strangers, dtype=np.float64))
    below = np.searchsorted(ordered, known, side="left") + np.searchsorted(ordered, known, side="right")
    return float(below.mean() / 2 / len(ordered))


def _folds(labels: Tensor) -> Tensor:
    """Return a fold for each image, such that the images of a class are in different ones."""
    fold = torch.empty_like(labels)
    start = 0
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().flatten()
        fold[rows] = (torch.arange(len(rows)) + start) % FOLDS
        start += len(rows)
    return fold


def _statistics(scores: Tensor, labels: Tensor, others: dict[int, Tensor], classes: int) -> tuple[Tensor, Tensor]:
    means = torch.zeros(classes, classes, dtype=torch.float64)
    residuals: list[Tensor] = []
    for label in range(classes):
        own = scores[labels == label]
        if len(own) > 1:  # the residuals of few images are too small
            residuals.append((own - own.mean(dim=0)) * math.sqrt(len(own) / (len(own) - 1)))
        means[label] = (own if len(own) else others[label].double().cpu()).mean(dim=0)
    rest = torch.cat(residuals) if residuals else torch.zeros(1, classes, dtype=torch.float64)
    covariance = rest.T @ rest / len(rest)
    variance = max(float(covariance.diagonal().mean()), 1e-6)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * variance * torch.eye(classes, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(covariance)
    return means, vectors / values.sqrt()


def _familiarity(scores: Tensor, means: Tensor, whitening: Tensor) -> Tensor:
    """Return log(d2) - 2 log(d1) for the squared distances to the nearest class and to the second nearest."""
    here, there = scores @ whitening, means @ whitening
    squares = (here**2).sum(dim=1, keepdim=True) - 2 * here @ there.T + (there**2).sum(dim=1)
    nearest = squares.clamp(min=_CLOSE).topk(2, dim=1, largest=False).values.log()
    return nearest[:, 1] - 2 * nearest[:, 0]


def _lead_and_direction(scores: Tensor, features: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far the highest score is above the second, and the cosine to the nearest centre, both (N,)."""
    highest = scores.double().topk(2, dim=1).values
    cosines = F.normalize(features.double(), dim=1) @ centres.T
    return highest[:, 0] - highest[:, 1], cosines.amax(dim=1)


def _in_deviations(parts: Tensor, typical: Tensor) -> Tensor:
    """Return the familiarity (N,) from lead and direction (2, N)."""
    lead, direction = (parts - typical[:, :1]) / typical[:, 1:]
    return lead + DIRECTION * direction
