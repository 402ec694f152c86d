"""Views: an image as it is, mirrored, or moved by some pixels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """How an image is looked at. down, right: pixels by which it is moved; its edge is reflected."""

    mirror: bool = False
    down: int = 0
    right: int = 0


PLAIN = View()
MIRRORED = (PLAIN, View(mirror=True))
# One pixel in each direction, mirrored and not.
SHIFTED = tuple(
    View(mirror, down, right) for down, right in ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)) for mirror in (False, True)
)


def seen_as(images: Tensor, view: View) -> Tensor:
    """The images (N, 3, H, W) in that view."""
    if view == PLAIN:
        return images
    height, width = images.shape[2:]
    rows, columns = _reflected(height, view.down), _reflected(width, view.right)
    if view.mirror:
        columns = columns[::-1]
    return images.index_select(2, torch.tensor(rows, device=images.device)).index_select(
        3, torch.tensor(columns, device=images.device)
    )


def _reflected(length: int, shift: int) -> list[int]:
    """The places along a side that a shifted image shows; beyond its ends it is reflected."""
    last = max(1, length - 1)
    places = (abs(place - shift) % (2 * last) for place in range(length))
    return [min(place, 2 * last - place, length - 1) for place in places]
