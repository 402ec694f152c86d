"""GeoDL's similarity of two batches of features, made of matrix products alone, so that a recorded step can hold it.

The rows of the old and the new features of a batch span two subspaces. The geodesic between them on the Grassmann
manifold passes through subspaces on the way; Q is the mean of their projections, and distances are taken through it.

With orthonormal rows P and R of the two, turned so that C = P R' is symmetric (its eigenvalues are the cosines of the
principal angles), the subspace at t has the rows sin((1-t) theta)/sin(theta) P + sin(t theta)/sin(theta) R, and so

    Q = P' a(C) P + P' b(C) R + R' b(C) P + R' a(C) R

with a and b the integrals over t of the squares and of the products, which are smooth functions of the cosine. This is
the Q of the paper's closed form in E, N and the three diagonal matrices, without its singular value decompositions.

Legend: B batch, D feature.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
