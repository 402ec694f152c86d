"""Augmentation of whole batches on their device: crop or random resized crop, mirror, brightness, then a policy.

Legend: N images in the pool, B images in a batch, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.core.errors import EngramError, option
from engram.core.fields import check_fields, limits
from engram.core.serialize import ADDED
from engram.data.operations import cut_out
from engram.data.photographs import AREA, RATIO, TRIES
from engram.data.policies import NO_POLICY, POLICIES, Policy

# Random resized crops of stored squares; if none of TRIES draws fits, the whole image is used.
GRID = 2**15  # resolution of sizes and positions along a side
CENTRE = 0  # the draw for the central crop, not resized


def draw_crops(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one random crop per image; return the draws along the rows and along the columns, int64 of this shape.

    A draw is GRID times the length of the crop, plus its position in the space that is left. Both are in units of 1 /
    GRID. Area and log of the ratio are uniform, and drawn again if the crop does not fit into the image.
    """
    low, high = AREA
    # In float64, so that the last bit of a root, which differs between processors, does not change the draw.
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


def crop_pixels(drawn: Tensor, side: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the first pixel and the number of pixels (B,) of each crop along a side of the image.

    size: number of pixels that a crop is resized to; a central crop has this many.
    """
    span, place = drawn // GRID, drawn % GRID
    length = ((span * side + GRID // 2) // GRID).clamp(min=1)
    first = place * (side - length + 1) // GRID
    is_drawn = drawn != CENTRE
    return torch.where(is_drawn, first, (side - size) // 2), torch.where(is_drawn, length, size)


def _weights(drawn: Tensor, side: int, size: int) -> Tensor:
    """Return the weight (B, size, side) of each pixel along a side of the image in each pixel of the resized crop."""
    first, length = (pixels[:, None, None] for pixels in crop_pixels(drawn, side, size))
    scale = length / size
    into = torch.arange(size, device=drawn.device)[:, None]
    pixels = torch.arange(side, device=drawn.device)
    # Distance from the centre of the new pixel: in pixels of the image, or in new pixels if the crop is reduced.
    away = ((pixels - first + 0.5) - (into + 0.5) * scale) / scale.clamp(min=1)
    weights = (1 - away.abs()).clamp(min=0) * ((pixels >= first) & (pixels < first + length))
    return weights / weights.sum(dim=2, keepdim=True)


def resize_crops(
    images: Tensor, rows: Tensor, crops: tuple[Tensor, Tensor], mirror: Tensor, size: tuple[int, int]
) -> Tensor:
    """Resize the drawn crop of each image and mirror some of them: floats in 0..255, (B, 3, height, width).

    images: uint8 (N, H, W, 3).
    rows: (B,), positions in `images`.
    crops: draws along rows and columns, from `draw_crops`.
    mirror: bool (B,).
    size: height and width of the result.
    """
    batch, (height, width) = len(rows), size
    side_y, side_x = images.shape[1], images.shape[2]
    down, across = _weights(crops[0], side_y, height), _weights(crops[1], side_x, width)
    across = torch.where(mirror[:, None, None], across.flip(1), across)
    picked = images[rows].float().reshape(batch, side_y, side_x * 3)
    lines = (down @ picked).view(batch, height, side_x, 3).permute(0, 3, 1, 2).reshape(batch, 3 * height, side_x)
    return (lines @ across.mT).view(batch, 3, height, width)


@dataclass(frozen=True)
class Augmentation:
    """Settings of the augmentation: zero-pad, crop at random, mirror half of the images, change the brightness.

    After that come the operations of a policy, and cutout.

    pad: width of the border in pixels.
    brightness: largest relative change.
    view: share of the image's height and width that the network sees, as for ImageNet. Then, instead of padding and
        cropping, a random crop is resized to this size; without augmentation, the network sees the central crop.
        None: it sees the whole image.
    policy: "trivial" (TrivialAugment), "rand" (RandAugment), "auto" (AutoAugment for CIFAR-10), one of your own
        (`register_augmentation`), or "none".
    cutout: side in pixels of a grey box at a random place in each image; 0: no box.
    """

    pad: int = field(default=4, metadata=limits(at_least=0))
    flip: bool = True
    brightness: float = field(default=63 / 255, metadata=limits(at_least=0, below=1))
    view: float | None = field(default=None, metadata=limits(above=0, at_most=1))
    policy: str = field(default=NO_POLICY, metadata={ADDED: True})
    cutout: int = field(default=0, metadata=limits(at_least=0) | {ADDED: True})

    def __post_init__(self) -> None:
        check_fields(self)
        if self.policy != NO_POLICY:
            POLICIES.find(self.policy)
        if self.view is not None and self.pad:
            raise EngramError(
                f"images are either padded and cropped or resized: with view={self.view:g} set pad to 0, "
                f"got pad={self.pad}"
            )

    @property
    def numbers(self) -> int:
        """How many random numbers each image needs for the policy and for cutout."""
        return (self._policy.numbers if self._policy else 0) + (2 if self.cutout else 0)

    @property
    def _policy(self) -> Policy | None:
        return None if self.policy == NO_POLICY else POLICIES.find(self.policy)

    def draw_numbers(self, shape: tuple[int, ...], size: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Draw the numbers (*shape, numbers) for images that the network sees at this height and width."""
        drawn = [self._policy.draw(shape, generator, size)] if self._policy else []
        drawn += [torch.rand(*shape, 2, generator=generator)] if self.cutout else []
        return torch.cat(drawn, dim=-1) if drawn else torch.zeros(*shape, 0)

    def strengthen(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Apply the policy and cutout to uint8 images (B, H, W, 3) with their numbers (B, numbers)."""
        if self._policy:
            images = self._policy.apply(images, numbers[:, : self._policy.numbers])
        return cut_out(images, numbers[:, -2:], self.cutout) if self.cutout else images

    def view_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width that a network sees of images of this height and width."""
        if self.view is None:
            return size
        return max(1, round(self.view * size[0])), max(1, round(self.view * size[1]))

    def check_cutout(self, size: tuple[int, int]) -> None:
        """Refuse a box for cutout that is larger than the images of this height and width as the network sees them."""
        height, width = self.view_size(size)
        if self.cutout > max(height, width):
            raise EngramError(
                f"{option('cutout', self.cutout)} hides images of {width}x{height} pixels; give a smaller box, such as "
                f"{option('cutout', max(height, width) // 4)}"
            )


@dataclass(frozen=True, eq=False)
class Draws:
    """Random choices for a batch (B,), or for all batches of an epoch (steps, B).

    top, left: int64, corner of the crop; for resized crops, the draws of `draw_crops`.
    mirror: bool.
    factor: float32, brightness.
    numbers: float32 (..., N), of the policy and of cutout; None for neither.
    """

    top: Tensor
    left: Tensor
    mirror: Tensor
    factor: Tensor
    numbers: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        basic = (self.top, self.left, self.mirror, self.factor)
        return basic if self.numbers is None else (*basic, self.numbers)

    @classmethod
    def joined(cls, draws: Sequence[Draws], dim: int) -> Draws:
        """Several draws as one, concatenated along a dimension."""
        return cls(*(torch.cat(parts, dim) for parts in zip(*(each.tensors() for each in draws), strict=True)))


def draw(
    augmentation: Augmentation, shape: tuple[int, ...], generator: torch.Generator, size: tuple[int, int] | None = None
) -> Draws:
    """Draw the random choices for a batch of this shape. size: of the images as the network sees them, for a policy."""
    if augmentation.view is None:
        shifts = 2 * augmentation.pad + 1
        top = torch.randint(shifts, shape, generator=generator)
        left = torch.randint(shifts, shape, generator=generator)
    else:
        top, left = draw_crops(shape, generator)
    mirror = torch.rand(shape, generator=generator) < (0.5 if augmentation.flip else 0.0)
    factor = 1 + augmentation.brightness * (2 * torch.rand(shape, generator=generator) - 1)
    if not augmentation.numbers:
        return Draws(top, left, mirror, factor)
    assert size is not None
    return Draws(top, left, mirror, factor, augmentation.draw_numbers(shape, size, generator))


def identity_draws(augmentation: Augmentation, shape: tuple[int, ...]) -> Draws:
    """Return draws that do not change the images (with a `view`: that show their centres).

    The numbers of a policy are zeros, which `apply` does not use if `strong` is False.
    """
    corner = torch.full(shape, augmentation.pad if augmentation.view is None else CENTRE)
    numbers = torch.zeros(*shape, augmentation.numbers) if augmentation.numbers else None
    return Draws(corner, corner.clone(), torch.zeros(shape, dtype=torch.bool), torch.ones(shape), numbers)


def pad_images(images: Tensor, pad: int) -> Tensor:
    """Add a black border of `pad` pixels to uint8 images (N, H, W, 3)."""
    return F.pad(images, (0, 0, pad, pad, pad, pad)) if pad else images


def augment(padded: Tensor, rows: Tensor, draws: Draws, size: tuple[int, int]) -> Tensor:
    """Crop, mirror and brighten a batch: floats in [0, 1], (B, 3, H, W) in channels-last memory.

    padded: uint8 (N, H + 2 pad, W + 2 pad, 3). rows: (B,), positions in it. size: (H, W) of the crop.
    """
    height, width = size
    ys = draws.top[:, None] + torch.arange(height, device=rows.device)
    across = torch.arange(width, device=rows.device)
    xs = draws.left[:, None] + torch.where(draws.mirror[:, None], width - 1 - across, across)
    # One gather: (B, H, W) positions of pixels of 3 bytes each.
    stride_y, stride_n = padded.shape[2], padded.shape[1] * padded.shape[2]
    pixels = (rows * stride_n)[:, None, None] + (ys * stride_y)[:, :, None] + xs[:, None, :]
    batch = padded.view(-1, 3)[pixels]
    bright = batch.float() * (draws.factor / 255)[:, None, None, None]
    return bright.clamp_(max=1).permute(0, 3, 1, 2)


def resize_augment(images: Tensor, rows: Tensor, draws: Draws, size: tuple[int, int]) -> Tensor:
    """Do the same as `augment` with resized crops. images: uint8 (N, H, W, 3), without a border."""
    batch = resize_crops(images, rows, (draws.top, draws.left), draws.mirror, size)
    return batch.mul_((draws.factor / 255)[:, None, None, None]).clamp_(max=1)


def apply(
    augmentation: Augmentation,
    padded: Tensor,
    rows: Tensor,
    draws: Draws,
    size: tuple[int, int],
    strong: bool = True,
) -> Tensor:
    """Augment a batch as the settings say: floats in [0, 1], (B, 3, H, W). strong: with policy and cutout."""
    batch = (augment if augmentation.view is None else resize_augment)(padded, rows, draws, size)
    if draws.numbers is None or not strong:
        return batch
    levels = (batch * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return to_unit(augmentation.strengthen(levels, draws.numbers))


def centre(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the central crop of images (N, H, W, 3), at most of this height and width."""
    top, left = max(0, images.shape[1] - size[0]) // 2, max(0, images.shape[2] - size[1]) // 2
    return images[:, top : top + size[0], left : left + size[1]]


def to_unit(images: Tensor, mirror: bool = False) -> Tensor:
    """Convert uint8 images (N, H, W, 3) to floats in [0, 1], (N, 3, H, W); mirror them left to right if asked."""
    unit = images.float().div_(255).permute(0, 3, 1, 2)
    return unit.flip(3) if mirror else unit
