"""Augmentation of a whole batch on its device: crop or random resized crop, mirror, brightness."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.core.errors import EngramError

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


@dataclass(frozen=True)
class Augmentation:
    """Zero-pad, crop back at random, mirror half of the images, change the brightness.

    view: instead of padding and cropping, resize a random part of the image to this share of its sides, as for
    ImageNet; an image that is not augmented shows its centre of that size. None: it is seen whole.
    """

    pad: int = 4
    flip: bool = True
    brightness: float = 63 / 255
    view: float | None = None

    def __post_init__(self) -> None:
        if self.view is not None and not 0 < self.view <= 1:
            raise EngramError(f"the view must be a share of the image above 0 and at most 1, or none, got {self.view}")
        if self.view is not None and self.pad:
            raise EngramError(
                f"images are padded and cropped or resized, not both: with view={self.view:g} set pad to 0, "
                f"got pad={self.pad}"
            )
        if self.pad < 0:
            raise EngramError(f"the crop padding must be 0 or more pixels, got {self.pad}")
        if not 0 <= self.brightness < 1:
            raise EngramError(f"the brightness change must be in [0, 1), got {self.brightness}")

    def seen(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width that a network sees of images of that size."""
        if self.view is None:
            return size
        return max(1, round(self.view * size[0])), max(1, round(self.view * size[1]))


@dataclass(frozen=True, eq=False)
class Draws:
    """What is random about a batch (or, one dimension up, about each batch of an epoch).

    top, left: int64, the crop's corner; where parts are resized, which part, as `draw_parts` has it. mirror: bool.
    factor: float32, the brightness.
    """

    top: Tensor
    left: Tensor
    mirror: Tensor
    factor: Tensor


def draw(augmentation: Augmentation, shape: tuple[int, ...], generator: torch.Generator) -> Draws:
    """The random part of augmenting images laid out as `shape`."""
    if augmentation.view is None:
        shifts = 2 * augmentation.pad + 1
        top = torch.randint(shifts, shape, generator=generator)
        left = torch.randint(shifts, shape, generator=generator)
    else:
        top, left = draw_parts(shape, generator)
    mirror = torch.rand(shape, generator=generator) < (0.5 if augmentation.flip else 0.0)
    factor = 1 + augmentation.brightness * (2 * torch.rand(shape, generator=generator) - 1)
    return Draws(top, left, mirror, factor)


def as_they_are(augmentation: Augmentation, shape: tuple[int, ...]) -> Draws:
    """Draws that leave the images of a padded pool as they are, or their centres where they are not seen whole."""
    corner = torch.full(shape, augmentation.pad if augmentation.view is None else AS_IT_IS)
    return Draws(corner, corner.clone(), torch.zeros(shape, dtype=torch.bool), torch.ones(shape))


def pad_images(images: Tensor, pad: int) -> Tensor:
    """uint8 (N, H, W, 3) with a black border of `pad` pixels."""
    return F.pad(images, (0, 0, pad, pad, pad, pad)) if pad else images


def augment(padded: Tensor, rows: Tensor, draws: Draws, size: tuple[int, int]) -> Tensor:
    """The batch as floats in [0, 1], (B, 3, H, W) in channels-last memory.

    padded: uint8 (N, H + 2 pad, W + 2 pad, 3); rows: (B,) of it; size: (H, W) of the crop.
    """
    height, width = size
    ys = draws.top[:, None] + torch.arange(height, device=rows.device)
    across = torch.arange(width, device=rows.device)
    xs = draws.left[:, None] + torch.where(draws.mirror[:, None], width - 1 - across, across)
    # One gather in flat pixels: (B, H, W) positions of 3 bytes each.
    stride_y, stride_n = padded.shape[2], padded.shape[1] * padded.shape[2]
    pixels = (rows * stride_n)[:, None, None] + (ys * stride_y)[:, :, None] + xs[:, None, :]
    batch = padded.view(-1, 3)[pixels]
    bright = batch.float() * (draws.factor / 255)[:, None, None, None]
    return bright.clamp_(max=1).permute(0, 3, 1, 2)


def resized(images: Tensor, rows: Tensor, draws: Draws, size: tuple[int, int]) -> Tensor:
    """As `augment`, with draws of parts to be resized. images: uint8 (N, H, W, 3), without a border."""
    batch = resize_parts(images, rows, (draws.top, draws.left), draws.mirror, size)
    return batch.mul_((draws.factor / 255)[:, None, None, None]).clamp_(max=1)


def apply(augmentation: Augmentation, padded: Tensor, rows: Tensor, draws: Draws, size: tuple[int, int]) -> Tensor:
    """The batch augmented as these draws of the augmentation say: `augment` or `resized`."""
    return (augment if augmentation.view is None else resized)(padded, rows, draws, size)


def centre(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The central part of images (N, H, W, 3) that is no larger than the size."""
    top, left = max(0, images.shape[1] - size[0]) // 2, max(0, images.shape[2] - size[1]) // 2
    return images[:, top : top + size[0], left : left + size[1]]


def to_unit(images: Tensor, mirror: bool = False) -> Tensor:
    """uint8 (N, H, W, 3) as floats in [0, 1], (N, 3, H, W), mirrored left to right if asked."""
    unit = images.float().div_(255).permute(0, 3, 1, 2)
    return unit.flip(3) if mirror else unit
