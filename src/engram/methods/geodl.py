"""GeoDL: geodesic-flow distillation (Simon, Koniusz, Harandi, CVPR 2021).

UCIR without its ranking, and with another idea of how far the features of a batch have moved: the old and the new
model's features span two subspaces, and the distance is taken through all the subspaces on the shortest way between
them instead of in one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import Learner, Passes, Phase, RecipeHints, Stage, Step, Terms, both_imagenets, register, setting
from engram.methods.blocks.cosine import (
    IMAGENET_TRAINING,
    CosineMethod,
    CosineSettings,
    cosine_phases,
    cross_entropy,
    old_weight,
)

Centre = Literal["batch", "sample"]  # the mean that is taken from features before their span is
# Rows whose singular value is below 1.5^-ROUNDS of the whole count less, as in the truncation of the public code.
ROUNDS = 30
DEGREE = 12


def _chebyshev() -> list[tuple[float, float]]:
    """The Chebyshev coefficients of a and b as functions of the cosine in [0, 1], exact to about 1e-9."""
    places = np.polynomial.chebyshev.chebpts1(DEGREE + 1)
    theta = np.arccos((places + 1) / 2)
    sine, cosine = np.sin(theta), np.cos(theta)
    squares = (0.5 - sine * cosine / (2 * theta)) / sine**2
    products = (sine / theta - cosine) / (2 * sine**2)
    fit = np.polynomial.chebyshev.chebfit(places, np.stack([squares, products], axis=1), DEGREE)
    return [(float(square), float(product)) for square, product in fit]


COEFFICIENTS = _chebyshev()


def features(maps: Tensor) -> Tensor:
    """Unit features (B, 4 C) of maps (B, C, H, W): the means of their four quarters."""
    return F.normalize(F.adaptive_avg_pool2d(maps.float(), 2).flatten(1), dim=1)


def orthonormal(matrix: Tensor) -> Tensor:
    """The polar factor (N, M) of a matrix (N, M): its singular values brought to 1, those that are 0 left there."""
    value = matrix / torch.linalg.matrix_norm(matrix).clamp(min=1e-30)
    for _ in range(ROUNDS):
        value = 1.5 * value - 0.5 * (value @ value.T) @ value
    return value


def _directions(rows: Tensor, centre: Centre) -> Tensor:
    """Orthonormal rows (B, D) that span what the rows (B, D) differ in from their mean, or each from its own."""
    if centre == "sample":
        return orthonormal(rows - rows.mean(dim=1, keepdim=True))
    value = orthonormal(rows - rows.mean(dim=0))
    return value - value.mean(dim=0)  # rounding must not grow into a direction of its own


@torch.no_grad()
def flow(theirs: Tensor, ours: Tensor, centre: Centre = "batch") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P and R (B, D), a(C) and b(C) (B, B) of two batches of features (B, D), in float64."""
    start, end = _directions(theirs.double(), centre), _directions(ours.double(), centre)
    end = orthonormal(start @ end.T) @ end
    cosine = start @ end.T
    shifted = (cosine + cosine.T) - torch.eye(len(cosine), dtype=cosine.dtype, device=cosine.device)  # to [-1, 1]
    before, now = torch.eye(len(cosine), dtype=cosine.dtype, device=cosine.device), shifted
    squares, products = (COEFFICIENTS[0][i] * before + COEFFICIENTS[1][i] * now for i in range(2))
    for square, product in COEFFICIENTS[2:]:
        before, now = now, 2 * shifted @ now - before
        squares, products = squares + square * now, products + product * now
    return start, end, squares, products


def _through(one: Tensor, other: Tensor, parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """u' Q v of each pair of rows u, v (B, D) of two batches, (B,)."""
    start, end, squares, products = parts
    a, b, c, d = one @ start.T, one @ end.T, other @ start.T, other @ end.T
    return ((a @ squares + b @ products) * c + (b @ squares + a @ products) * d).sum(dim=1)


def geodesic_distance(ours: Tensor, theirs: Tensor, centre: Centre = "batch") -> Tensor:
    """The mean over the batch of (u - v)' Q (u - v), for unit features (B, D); only ours gets a gradient.

    Q is a number here, as in the public code: its gradient is not followed.
    """
    difference = ours.double() - theirs.detach().double()
    return _through(difference, difference, flow(theirs, ours, centre)).mean()


def geodesic_similarity(ours: Tensor, theirs: Tensor, centre: Centre = "batch") -> Tensor:
    """1 minus the mean over the batch of u' Q v / sqrt(u' Q u * v' Q v); only ours gets a gradient."""
    parts = flow(theirs, ours, centre)
    one, other = ours.double(), theirs.detach().double()
    # A sample that lies in neither subspace has no length there, and the cosine 0.
    length = _through(one, one, parts).clamp(min=1e-12) * _through(other, other, parts).clamp(min=1e-12)
    return 1 - (_through(one, other, parts) / length.sqrt()).mean()


Reading = Literal["released", "paper"]


@dataclass(frozen=True)
class GeoDLSettings(CosineSettings):
    """GeoDL's settings beside the host's; the defaults are UCIR's on CIFAR-100, as none were published for it.

    lambda_geodesic: weight of the distance, before sqrt(n_old / m). distance: the quadratic form that the released code
    uses, or the paper's 1 - cosine. centre: which mean is taken from the features before their span is, that of the
    batch over its samples or, as in the released code, that of each sample over its dimensions.
    """

    lambda_geodesic: float = setting(5.0, at_least=0, after_base=True)
    distance: Reading = setting("released", after_base=True)
    centre: Centre = setting("batch", after_base=True)


@final
@register(
    "geodl",
    settings=GeoDLSettings,
    title="Geodesic-flow distillation",
    paper="Simon et al., CVPR 2021",
    brightened=False,
    shares_base=True,
    recipes=RecipeHints(imagenet=both_imagenets({"lambda_geodesic": 10.0, **IMAGENET_TRAINING})),
)
class GeoDL(CosineMethod[GeoDLSettings]):
    """Keeps the features of a batch near to what they were, along the geodesic between their subspaces."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = {"geodesic": old_weight(self.settings.lambda_geodesic, stage)}
        return cosine_phases(self.settings, stage, self.loss, weights)

    def loss(self, step: Step) -> Terms:
        """Cross-entropy and the distance of the last map's features through the geodesic flow."""
        assert step.teacher is not None
        ours, theirs = features(step.student.maps[-1]), features(step.teacher.maps[-1])
        measure = geodesic_distance if self.settings.distance == "released" else geodesic_similarity
        return {
            "classification": cross_entropy(step),
            "geodesic": step.weights["geodesic"] * measure(ours, theirs, self.settings.centre).float(),
        }
