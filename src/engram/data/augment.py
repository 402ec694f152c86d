"""Augmentation of a whole batch on its device: crop and flip are one gather, brightness one product.

What is random is drawn beforehand, for an epoch at a time, from a generator of its own. The step that uses it
contains no random number, so it gives the same result eager, captured, or resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.errors import EngramError


@dataclass(frozen=True)
class Augmentation:
    """Zero-pad, crop back at random, mirror half of the images, change the brightness."""

    pad: int = 4
    flip: bool = True
    brightness: float = 63 / 255

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise EngramError(f"the crop padding must be 0 or more pixels, got {self.pad}")
        if not 0 <= self.brightness < 1:
            raise EngramError(f"the brightness change must be in [0, 1), got {self.brightness}")


@dataclass(frozen=True, eq=False)
class Draws:
    """What is random about a batch (or, one dimension up, about each batch of an epoch).

    top, left: int64, the crop's corner. mirror: bool. factor: float32, the brightness.
    """

    top: Tensor
    left: Tensor
    mirror: Tensor
    factor: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Draws:
        return Draws(self.top[rows], self.left[rows], self.mirror[rows], self.factor[rows])

    def to(self, device: torch.device) -> Draws:
        """The same draws on a device."""
        return Draws(self.top.to(device), self.left.to(device), self.mirror.to(device), self.factor.to(device))


def draw(augmentation: Augmentation, shape: tuple[int, ...], generator: torch.Generator) -> Draws:
    """The random part of augmenting images laid out as `shape`."""
    shifts = 2 * augmentation.pad + 1
    top = torch.randint(shifts, shape, generator=generator)
    left = torch.randint(shifts, shape, generator=generator)
    mirror = torch.rand(shape, generator=generator) < (0.5 if augmentation.flip else 0.0)
    factor = 1 + augmentation.brightness * (2 * torch.rand(shape, generator=generator) - 1)
    return Draws(top, left, mirror, factor)


def as_they_are(augmentation: Augmentation, shape: tuple[int, ...]) -> Draws:
    """Draws that leave the images of a padded pool as they are."""
    corner = torch.full(shape, augmentation.pad)
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


def to_unit(images: Tensor, mirror: bool = False) -> Tensor:
    """uint8 (N, H, W, 3) as floats in [0, 1], (N, 3, H, W), mirrored left to right if asked."""
    unit = images.float().div_(255).permute(0, 3, 1, 2)
    return unit.flip(3) if mirror else unit
