"""Views: an image as it is, mirrored, moved by some pixels, or its enlarged centre."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """How an image is looked at.

    down, right: pixels by which it is moved; its edge is reflected. part: of each side, in the middle of the image,
    that is seen, enlarged to the size of the image.
    """

    mirror: bool = False
    down: int = 0
    right: int = 0
    part: float = 1.0


PLAIN = View()
MIRRORED = (PLAIN, View(mirror=True))
CENTRE = View(part=0.75)
# One pixel in each direction, mirrored and not.
SHIFTED = tuple(
    View(mirror, down, right) for down, right in ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)) for mirror in (False, True)
)


def seen_as(images: Tensor, view: View) -> Tensor:
    """The images (N, 3, H, W) in that view."""
    if view == PLAIN:
        return images
    height, width = images.shape[2:]
    if view.part != 1:
        images = _enlarged(_enlarged(images, 2, view.part), 3, view.part)
    rows, columns = _reflected(height, view.down), _reflected(width, view.right)
    if view.mirror:
        columns = columns[::-1]
    return images.index_select(2, torch.tensor(rows, device=images.device)).index_select(
        3, torch.tensor(columns, device=images.device)
    )


def _enlarged(images: Tensor, dim: int, part: float) -> Tensor:
    """The middle part of a side, stretched over all of it; between two pixels lie their weighted means."""
    length = images.shape[dim]
    places = [max(0.0, (place + 0.5 - length / 2) * part + length / 2 - 0.5) for place in range(length)]
    lower = [int(place) for place in places]
    upper = [min(place + 1, length - 1) for place in lower]
    share = images.new_tensor([place - below for place, below in zip(places, lower, strict=True)])
    share = share.view(-1, *(3 - dim) * (1,))
    first, second = (images.index_select(dim, torch.tensor(at, device=images.device)) for at in (lower, upper))
    return first * (1 - share) + second * share


def _reflected(length: int, shift: int) -> list[int]:
    """The places along a side that a shifted image shows; beyond its ends it is reflected."""
    last = max(1, length - 1)
    places = (abs(place - shift) % (2 * last) for place in range(length))
    return [min(place, 2 * last - place, length - 1) for place in places]
