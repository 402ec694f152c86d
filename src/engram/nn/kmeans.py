"""k-means on a device, to initialise the proxies of a new class."""

from __future__ import annotations

import torch
from torch import Tensor

STARTS, ROUNDS = 10, 100


def kmeans(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return the centres (k, D) of points (N, D) with the smallest squared distance over several k-means++ starts.

    All starts run in parallel. With fewer points than k, the points are repeated.
    """
    if len(points) <= k:
        return points[torch.arange(k, device=points.device) % len(points)].clone()
    centres = _plus_plus(points, k, generator, STARTS)  # (R, k, D)
    assigned = None
    for _ in range(ROUNDS):
        distance = _distances(points, centres)
        nearest = distance.argmin(dim=2)  # (R, N)
        if assigned is not None and torch.equal(nearest, assigned):
            break
        assigned = nearest
        member = torch.nn.functional.one_hot(nearest, k).to(points.dtype)  # (R, N, k)
        count = member.sum(dim=1)  # (R, k)
        means = member.transpose(1, 2) @ points / count.clamp(min=1).unsqueeze(2)
        # An empty cluster (rare after k-means++) gets the point farthest from its centre.
        farthest = distance.amin(dim=2).argmax(dim=1)
        means = torch.where((count == 0).unsqueeze(2), points[farthest].unsqueeze(1), means)
        centres = means
    inertia = _distances(points, centres).amin(dim=2).sum(dim=1)
    return centres[inertia.argmin()]


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    """Return the squared distances (R, N, k)."""
    cross = points @ centres.transpose(1, 2)
    return (points.square().sum(dim=1)[:, None] - 2 * cross + centres.square().sum(dim=2)[:, None, :]).clamp_(min=0)


def _plus_plus(points: Tensor, k: int, generator: torch.Generator, restarts: int) -> Tensor:
    """Return k-means++ starts (R, k, D): each centre is a point drawn in proportion to its squared distance."""
    first = torch.randint(len(points), (restarts, 1), generator=generator).to(points.device)
    centres = points[first]  # (R, 1, D)
    for _ in range(1, k):
        nearest = _distances(points, centres).amin(dim=2)
        cumulative = nearest.cumsum(dim=1)
        draw = torch.rand((restarts, 1), generator=generator).to(points) * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, draw).clamp_(max=len(points) - 1)
        centres = torch.cat([centres, points[chosen]], dim=1)
    return centres
