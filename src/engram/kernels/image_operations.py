"""Kernels for the operations of an augmentation policy: one table of levels per image and channel, then the pixels.

The operations and their codes are those of `engram.data.operations`. Sums are of whole numbers, so their order does not
matter.
"""

# Triton adds launch options such as num_warps to the parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.kernels.availability import EXACT, blocks_of

BLOCK = 1024
OUTSIDE = tl.constexpr(128)  # level of pixels from outside the image
# Codes of the operations that a kernel treats in a special way.
SHEAR_X = tl.constexpr(1)
SHEAR_Y = tl.constexpr(2)
TRANSLATE_X = tl.constexpr(3)
TRANSLATE_Y = tl.constexpr(4)
ROTATE = tl.constexpr(5)
BRIGHTNESS = tl.constexpr(6)
COLOUR = tl.constexpr(7)
CONTRAST = tl.constexpr(8)
SHARPNESS = tl.constexpr(9)
POSTERIZE = tl.constexpr(10)
SOLARIZE = tl.constexpr(11)
AUTOCONTRAST = tl.constexpr(12)
EQUALIZE = tl.constexpr(13)
INVERT = tl.constexpr(14)


@triton.jit
def grey_level(red, green, blue):
    """Return the grey level of a colour, as Pillow computes it."""
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


@triton.jit
def blend_levels(start, level, amount):
    """Return start + (1 + amount) (level - start), cut off at 0 and 255, without its fraction."""
    start = start.to(tl.float32)
    mixed = start + (1 + amount) * (level.to(tl.float32) - start)
    return tl.minimum(tl.maximum(mixed, 0.0), 255.0).to(tl.int32)


@triton.jit
def engram_level_tables(
    images,  # uint8 (B, N, 3)
    codes,  # int64 (B,)
    amounts,  # float32 (B,)
    tables,  # uint8 (B, 3, 256)
    N,  # pixels of an image
    BLOCK: tl.constexpr,
):
    """Write the level that each level of a channel becomes."""
    b = tl.program_id(0)
    c = tl.program_id(1)
    code = tl.load(codes + b)
    amount = tl.load(amounts + b)
    own = images + b.to(tl.int64) * N * 3
    level = tl.arange(0, 256)
    table = level
    if code == BRIGHTNESS:
        table = blend_levels(tl.zeros_like(level), level, amount)
    if code == POSTERIZE:
        table = level & (256 - (1 << (8 - amount.to(tl.int32))))
    if code == SOLARIZE:
        table = tl.where(level.to(tl.float32) < amount, level, 255 - level)
    if code == INVERT:
        table = 255 - level
    if code == CONTRAST:
        total = tl.zeros((1,), dtype=tl.int64)
        start = 0
        while start < N:
            e = start + tl.arange(0, BLOCK)
            red = tl.load(own + e * 3, mask=e < N, other=0).to(tl.int32)
            green = tl.load(own + e * 3 + 1, mask=e < N, other=0).to(tl.int32)
            blue = tl.load(own + e * 3 + 2, mask=e < N, other=0).to(tl.int32)
            total += tl.sum(tl.where(e < N, grey_level(red, green, blue), 0), axis=0)
            start += BLOCK
        mean = ((2 * total + N) // (2 * N)).to(tl.int32)
        table = blend_levels(tl.zeros_like(level) + mean, level, amount)
    if (code == AUTOCONTRAST) | (code == EQUALIZE):
        counts = tl.zeros((256,), dtype=tl.int32)
        start = 0
        while start < N:
            e = start + tl.arange(0, BLOCK)
            value = tl.load(own + e * 3 + c, mask=e < N, other=0).to(tl.int32)
            beyond = tl.sum((e >= N).to(tl.int32), axis=0)  # counted as level 0
            counts += tl.histogram(value, 256) - tl.where(level == 0, beyond, 0)
            start += BLOCK
        highest = tl.max(tl.where(counts > 0, level, 0), axis=0)
        if code == AUTOCONTRAST:
            lowest = tl.min(tl.where(counts > 0, level, 255), axis=0)
            apart = tl.maximum(highest - lowest, 1).to(tl.float32)
            scale = tl.div_rn(tl.zeros_like(apart) + 255.0, apart)
            stretched = level.to(tl.float32) * scale + -lowest.to(tl.float32) * scale
            stretched = tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32)
            table = tl.where(highest > lowest, stretched, level)
        else:
            last = tl.sum(tl.where(level == highest, counts, 0), axis=0)
            step = (N - last) // 255
            before = tl.cumsum(counts, axis=0) - counts
            equal = tl.minimum((step // 2 + before) // tl.maximum(step, 1), 255)
            table = tl.where(step > 0, equal, level)
    tl.store(tables + (b * 3 + c) * 256 + level, table.to(tl.uint8))


@triton.jit
def engram_operate(
    images,  # uint8 (B, H, W, 3)
    codes,  # int64 (B,)
    amounts,  # float32 (B,)
    tables,  # uint8 (B, 3, 256)
    out,  # uint8 (B, H, W, 3)
    H,
    W,
    BLOCK: tl.constexpr,
):
    """Move pixels or change their levels."""
    b = tl.program_id(0)
    code = tl.load(codes + b)
    amount = tl.load(amounts + b)
    own = images + b.to(tl.int64) * H * W * 3
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < H * W
    row = e // W
    column = e % W
    from_row = row
    from_column = column
    if (code >= SHEAR_X) & (code <= ROTATE):
        x = column.to(tl.float32) + 0.5
        y = row.to(tl.float32) + 0.5
        at_x = x
        at_y = y
        if code == SHEAR_X:
            at_x = x + amount * y
        if code == SHEAR_Y:
            at_y = y + amount * x
        if code == TRANSLATE_X:
            at_x = x - amount
        if code == TRANSLATE_Y:
            at_y = y - amount
        if code == ROTATE:
            angle = amount * 0.017453292519943295
            cosine = tl.cos(angle)
            sine = tl.sin(angle)
            half_x = W * 0.5
            half_y = H * 0.5
            at_x = cosine * (x - half_x) - sine * (y - half_y) + half_x
            at_y = sine * (x - half_x) + cosine * (y - half_y) + half_y
        from_column = tl.floor(at_x).to(tl.int32)
        from_row = tl.floor(at_y).to(tl.int32)
    found = inside & (from_row >= 0) & (from_row < H) & (from_column >= 0) & (from_column < W)
    source = (from_row * W + from_column) * 3
    red = tl.load(own + source, mask=found, other=OUTSIDE).to(tl.int32)
    green = tl.load(own + source + 1, mask=found, other=OUTSIDE).to(tl.int32)
    blue = tl.load(own + source + 2, mask=found, other=OUTSIDE).to(tl.int32)
    if code == COLOUR:
        grey = grey_level(red, green, blue)
        red = blend_levels(grey, red, amount)
        green = blend_levels(grey, green, amount)
        blue = blend_levels(grey, blue, amount)
    elif code == SHARPNESS:
        middle = (row > 0) & (row < H - 1) & (column > 0) & (column < W - 1) & inside
        red = blend_levels(smooth_level(own, e, W, red, middle), red, amount)
        green = blend_levels(smooth_level(own + 1, e, W, green, middle), green, amount)
        blue = blend_levels(smooth_level(own + 2, e, W, blue, middle), blue, amount)
    elif code >= BRIGHTNESS:
        table = tables + b * 3 * 256
        red = tl.load(table + red).to(tl.int32)
        green = tl.load(table + 256 + green).to(tl.int32)
        blue = tl.load(table + 512 + blue).to(tl.int32)
    to = out + (b.to(tl.int64) * H * W + e) * 3
    tl.store(to, red.to(tl.uint8), mask=inside)
    tl.store(to + 1, green.to(tl.uint8), mask=inside)
    tl.store(to + 2, blue.to(tl.uint8), mask=inside)


@triton.jit
def smooth_level(own, e, W, level, middle):
    """Return the level of a channel smoothed over 3x3 pixels, with weights 1 and, in the middle, 5."""
    around = tl.zeros_like(level)
    for tap in range(9):
        beside = e + (tap // 3 - 1) * W + tap % 3 - 1
        around += tl.load(own + beside * 3, mask=middle, other=0).to(tl.int32)
    return tl.where(middle, (2 * (around + 4 * level) + 13) // 26, level)


def operate_on_gpu(images: Tensor, codes: Tensor, amounts: Tensor) -> Tensor:
    """Apply to each uint8 image (B, H, W, 3) the operation with its code and its amount, both (B,)."""
    images, codes, amounts = images.contiguous(), codes.contiguous(), amounts.contiguous()
    batch, height, width, _ = images.shape
    tables = torch.empty(batch, 3, 256, dtype=torch.uint8, device=images.device)
    out = torch.empty_like(images)
    engram_level_tables[(batch, 3)](images, codes, amounts, tables, height * width, BLOCK=BLOCK, num_warps=4, **EXACT)
    engram_operate[(batch, blocks_of(height * width, BLOCK))](
        images, codes, amounts, tables, out, height, width, BLOCK=BLOCK, num_warps=4, **EXACT
    )
    return out
