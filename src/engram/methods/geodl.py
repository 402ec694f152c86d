"""GeoDL: geodesic-flow distillation (Simon, Koniusz, Harandi, CVPR 2021).

UCIR without its ranking term, and with another distance between old and new features: the features of a batch under the
old and under the new model span two subspaces, and the distance is integrated over all subspaces on the geodesic
between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import RecipeHints, Stage, Step, Terms, both_imagenets, register, setting
from engram.methods.blocks.cosine import IMAGENET_TRAINING, CosineMethod, cross_entropy, old_weight
from engram.methods.blocks.linear import SteppedSettings

Centre = Literal["batch", "sample"]  # the mean that is subtracted from the features first
# Directions with a singular value below 1.5^-ROUNDS of the total count less, like the truncation in the released code.
ROUNDS = 30
DEGREE = 12


def _chebyshev() -> list[tuple[float, float]]:
    """Chebyshev coefficients of a and b as functions of the cosine in [0, 1], accurate to about 1e-9."""
    places = np.polynomial.chebyshev.chebpts1(DEGREE + 1)
    theta = np.arccos((places + 1) / 2)
    sine, cosine = np.sin(theta), np.cos(theta)
    squares = (0.5 - sine * cosine / (2 * theta)) / sine**2
    products = (sine / theta - cosine) / (2 * sine**2)
    fit = np.polynomial.chebyshev.chebfit(places, np.stack([squares, products], axis=1), DEGREE)
    return [(float(square), float(product)) for square, product in fit]


COEFFICIENTS = _chebyshev()


def pool_quarters(maps: Tensor) -> Tensor:
    """Unit features (B, 4 C) of maps (B, C, H, W): the means of their four quarters."""
    return F.normalize(F.adaptive_avg_pool2d(maps.float(), 2).flatten(1), dim=1)


def polar_factor(matrix: Tensor) -> Tensor:
    """The polar factor (N, M) of a matrix (N, M): its singular values become 1; zeros stay 0."""
    value = matrix / torch.linalg.matrix_norm(matrix).clamp(min=1e-30)
    for _ in range(ROUNDS):
        value = 1.5 * value - 0.5 * (value @ value.T) @ value
    return value


def _directions(rows: Tensor, centre: Centre) -> Tensor:
    """Orthonormal rows (B, D) that span the rows (B, D) minus their mean (of the batch, or of each sample)."""
    if centre == "sample":
        return polar_factor(rows - rows.mean(dim=1, keepdim=True))
    value = polar_factor(rows - rows.mean(dim=0))
    return value - value.mean(dim=0)  # rounding errors must not become a direction


@torch.no_grad()
def geodesic_flow(theirs: Tensor, ours: Tensor, centre: Centre = "batch") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P and R (B, D), and a(C) and b(C) (B, B), of two batches of features (B, D), in float64."""
    start, end = _directions(theirs.double(), centre), _directions(ours.double(), centre)
    end = polar_factor(start @ end.T) @ end
    cosine = start @ end.T
    shifted = (cosine + cosine.T) - torch.eye(len(cosine), dtype=cosine.dtype, device=cosine.device)  # to [-1, 1]
    before, now = torch.eye(len(cosine), dtype=cosine.dtype, device=cosine.device), shifted
    squares, products = (COEFFICIENTS[0][i] * before + COEFFICIENTS[1][i] * now for i in range(2))
    for square, product in COEFFICIENTS[2:]:
        before, now = now, 2 * shifted @ now - before
        squares, products = squares + square * now, products + product * now
    return start, end, squares, products


def _quadratic_form(one: Tensor, other: Tensor, flow: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """u' Q v (B,) for each pair of rows u, v of two batches (B, D)."""
    start, end, squares, products = flow
    a, b, c, d = one @ start.T, one @ end.T, other @ start.T, other @ end.T
    return ((a @ squares + b @ products) * c + (b @ squares + a @ products) * d).sum(dim=1)


def geodesic_distance(ours: Tensor, theirs: Tensor, centre: Centre = "batch") -> Tensor:
    """The mean over the batch of (u - v)' Q (u - v), for unit features (B, D). Only `ours` gets a gradient.

    Q is a constant, as in the released code: no gradient goes through it.
    """
    difference = ours.double() - theirs.detach().double()
    return _quadratic_form(difference, difference, geodesic_flow(theirs, ours, centre)).mean()


def geodesic_similarity(ours: Tensor, theirs: Tensor, centre: Centre = "batch") -> Tensor:
    """1 - the mean over the batch of u' Q v / sqrt(u' Q u * v' Q v). Only `ours` gets a gradient."""
    flow = geodesic_flow(theirs, ours, centre)
    one, other = ours.double(), theirs.detach().double()
    # A sample that lies in neither subspace has length 0 there, and cosine 0.
    length = _quadratic_form(one, one, flow).clamp(min=1e-12) * _quadratic_form(other, other, flow).clamp(min=1e-12)
    return 1 - (_quadratic_form(one, other, flow) / length.sqrt()).mean()


Reading = Literal["released", "paper"]


@dataclass(frozen=True)
class GeoDLSettings(SteppedSettings):
    """GeoDL's settings, in addition to those of the family. Defaults: UCIR's on CIFAR-100, as none were published.

    lambda_geodesic: weight of the distance, before sqrt(n_old / m). distance: the quadratic form of the released code,
    or the paper's 1 - cosine. centre: the mean that is subtracted from the features first: that of the batch, or, as in
    the released code, that of each sample over its dimensions.
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
    """Distils the features of a batch along the geodesic between old and new subspaces."""

    needs_maps = True

    def weights(self, stage: Stage) -> dict[str, float]:
        return {"geodesic": old_weight(self.settings.lambda_geodesic, stage)}

    def loss(self, step: Step) -> Terms:
        """Cross-entropy and the geodesic-flow distance of the last map's features."""
        assert step.teacher is not None
        ours, theirs = pool_quarters(step.student.maps[-1]), pool_quarters(step.teacher.maps[-1])
        measure = geodesic_distance if self.settings.distance == "released" else geodesic_similarity
        return {
            "classification": cross_entropy(step),
            "geodesic": step.weights["geodesic"] * measure(ours, theirs, self.settings.centre).float(),
        }
