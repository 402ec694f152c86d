"""Parts of images, resized: the random crops of ImageNet, for a whole batch on its device.

A part is drawn as shares of the image's sides, in whole numbers, and becomes whole pixels where the image is: the same
draw is the same part on every device. Where a part begins and how far it goes are one number, so that the draws of
resized parts are as many tensors as those of shifted crops. Resizing is a product with a matrix of weights for each
side: bilinear, and where it shrinks, over as many pixels as it shrinks into one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

AREA = (0.08, 1.0)  # the share of the image's area that a part has
RATIO = 4 / 3  # of its sides, either way
TRIES = 10  # to draw one that fits; the whole image after them
GRID = 2**15  # of each side, in a draw
AS_IT_IS = 0  # a draw that means the central part, not resized


def draw_parts(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random parts of images laid out as `shape`: down the rows and across the columns, int64.

    Each is GRID times the share of the side that the part has, plus where it lies in what that leaves free. Area and
    ratio are uniform, the latter in its logarithm, and drawn again where the part would be larger than the image.
    """
    low, high = AREA
    # In float64: the last bit of a root, in which processors differ, does not reach the grid.
    area = low + (high - low) * torch.rand(*shape, TRIES, generator=generator, dtype=torch.float64)
    ratio = math.log(RATIO) * (2 * torch.rand(*shape, TRIES, generator=generator, dtype=torch.float64) - 1)
    height, width = (area * torch.exp(-ratio)).sqrt(), (area * torch.exp(ratio)).sqrt()
    fits = (height <= 1) & (width <= 1)
    first = fits.long().argmax(dim=-1, keepdim=True)
    spans: list[Tensor] = []
    for share in (height, width):
        drawn = torch.where(fits.any(dim=-1), share.gather(-1, first).squeeze(-1), 1.0)
        span = (drawn * GRID).round().long().clamp(1, GRID)
        spans.append(span * GRID + torch.randint(GRID, shape, generator=generator))
    return spans[0], spans[1]


def part_pixels(drawn: Tensor, side: int, size: int) -> tuple[Tensor, Tensor]:
    """The first pixel of each part along a side, and how many it has, (B,).

    size: those of a part that is taken as it is, and what a drawn one is resized to.
    """
    span, place = drawn // GRID, drawn % GRID
    length = ((span * side + GRID // 2) // GRID).clamp(min=1)
    first = place * (side - length + 1) // GRID
    is_drawn = drawn != AS_IT_IS
    return torch.where(is_drawn, first, (side - size) // 2), torch.where(is_drawn, length, size)


def _weights(drawn: Tensor, side: int, size: int) -> Tensor:
    """What each pixel of a side adds to each pixel of the resized part, (B, size, side)."""
    first, length = (pixels[:, None, None] for pixels in part_pixels(drawn, side, size))
    scale = length / size
    into = torch.arange(size, device=drawn.device)[:, None]
    pixels = torch.arange(side, device=drawn.device)
    # In pixels of the image from the middle of the pixel to be made, or of the part where it shrinks.
    away = ((pixels - first + 0.5) - (into + 0.5) * scale) / scale.clamp(min=1)
    weights = (1 - away.abs()).clamp(min=0) * ((pixels >= first) & (pixels < first + length))
    return weights / weights.sum(dim=2, keepdim=True)


def resize_parts(
    images: Tensor, rows: Tensor, parts: tuple[Tensor, Tensor], mirror: Tensor, size: tuple[int, int]
) -> Tensor:
    """The drawn part of each image, resized and, where asked, mirrored: floats in 0..255, (B, 3, height, width).

    images: uint8 (N, H, W, 3); rows: (B,) of them; parts: down and across, as drawn; mirror: bool (B,); size: height
    and width.
    """
    batch, (height, width) = len(rows), size
    side_y, side_x = images.shape[1], images.shape[2]
    down, across = _weights(parts[0], side_y, height), _weights(parts[1], side_x, width)
    across = torch.where(mirror[:, None, None], across.flip(1), across)
    picked = images[rows].float().reshape(batch, side_y, side_x * 3)
    lines = (down @ picked).view(batch, height, side_x, 3).permute(0, 3, 1, 2).reshape(batch, 3 * height, side_x)
    return (lines @ across.mT).view(batch, 3, height, width)
