"""Find near-duplicates: the same scene saved again, brightened or shifted a little, such as the frames of a burst.

Two pictures are compared by their details in grey: what is left when the mean of the neighbourhood is subtracted. The
similarity is the largest correlation over shifts of up to a tenth of the side, so brightness, contrast and new JPEG
compression hardly change it.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SIMILAR = 0.6  # least similarity of near-duplicates
SMALLEST = 48  # pixels; at 32, pictures of different roads were taken for one another
_SIDE, _SHIFT = 30, 3  # of the compared pictures, and the largest shift
_RADIUS = 3  # of the neighbourhood
_COARSE, _MAYBE = 4, 0.6  # side of the pictures that are compared first, and least similarity to compare in detail
_BLOCK = 1024  # pictures at a time


class DisjointSets:
    """Numbers 0 to count - 1 in groups: each alone at first, and joined in pairs."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def join(self, one: int, other: int) -> None:
        """Make one group of the groups of two numbers."""
        first, second = sorted((self.find(one), self.find(other)))
        self._parents[second] = first

    def find(self, number: int) -> int:
        """Return the smallest number of the group of a number."""
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number


class Details:
    """Details of uint8 images (N, H, W, 3), to compare them; None of them is similar if they are too small."""

    def __init__(self, images: np.ndarray) -> None:
        parts = [images[start : start + _BLOCK] for start in range(0, len(images), _BLOCK)]
        if min(images.shape[1:3]) < SMALLEST:
            parts = []
        grey = [_grey(part, _SIDE) for part in parts]
        self._coarse = torch.cat([_unit(_grey(part, _COARSE)) for part in parts] or [torch.empty(0, _COARSE**2)])
        self._details = torch.cat([_without_neighbourhood(part) for part in grey] or [torch.empty(0, 1, _SIDE, _SIDE)])
        side = _SIDE - 2 * _SHIFT
        centre = self._details[:, :, _SHIFT : _SHIFT + side, _SHIFT : _SHIFT + side]
        self._centres = _unit(centre)
        # Length of each window without its mean: the denominator of a correlation.
        squares = F.avg_pool2d(self._details**2, side, 1) - F.avg_pool2d(self._details, side, 1) ** 2
        self._lengths = _above_zero((squares.clamp(min=0) * side**2).sqrt()).flatten(1)

    def pairs(self) -> dict[tuple[int, int], float]:
        """Return the similarity of near-duplicates by their positions, the smaller one first, in order."""
        found: dict[tuple[int, int], float] = {}
        for start in range(0, len(self._coarse), _BLOCK):
            block = self._coarse[start : start + _BLOCK] @ self._coarse.T
            for number, row in enumerate(block > _MAYBE, start):
                row[number] = False
                others = row.nonzero().flatten()
                similar = self._similarities(number, others)
                for place in (similar > SIMILAR).nonzero().flatten().tolist():
                    one, other = sorted((number, int(others[place])))
                    found[one, other] = max(found.get((one, other), 0.0), float(similar[place]))
        return dict(sorted(found.items()))

    def _similarities(self, number: int, others: Tensor) -> Tensor:
        """Return the largest correlation of the centres of other pictures with the windows of this one."""
        side = _SIDE - 2 * _SHIFT
        windows = self._details[number, 0].unfold(0, side, 1).unfold(1, side, 1).reshape(-1, side**2)
        return (windows @ self._centres[others].T / self._lengths[number][:, None]).amax(dim=0)


def _grey(images: np.ndarray, side: int) -> Tensor:
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float()
    return F.interpolate(pixels, size=(side, side), mode="area").mean(dim=1, keepdim=True)


def _without_neighbourhood(grey: Tensor) -> Tensor:
    around = F.pad(grey, (_RADIUS,) * 4, mode="reflect")
    return grey - F.avg_pool2d(around, 2 * _RADIUS + 1, 1)


def _unit(pictures: Tensor) -> Tensor:
    """Return each picture as a vector of length 1 without its mean; 0 if all its pixels are equal."""
    flat = pictures.flatten(1)
    flat = flat - flat.mean(dim=1, keepdim=True)
    return flat / _above_zero(flat.norm(dim=1, keepdim=True))


def _above_zero(lengths: Tensor) -> Tensor:
    return lengths.clamp(min=1e-3)
