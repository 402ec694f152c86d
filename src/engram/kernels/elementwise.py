"""Element-wise kernels of a training step: augmentation, sum over splits, update."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["B"])
def engram_augment(
    padded,  # uint8 (P, HP, WP, 3)
    rows,  # int64 (S, B)
    top,
    left,
    mirror,
    factor,  # each (S, B)
    counter,  # int64 (1,): step
    mean,
    std,  # float32 (3,)
    out,  # (images, H, W, 4)
    B,
    HP: tl.constexpr,
    WP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Crop, mirror, brighten and normalise the batch of a step; the fourth channel is zero."""
    b = tl.program_id(0)
    at = tl.load(counter) * B + b
    row = tl.load(rows + at)
    down = tl.load(top + at)
    across = tl.load(left + at)
    mirrored = tl.load(mirror + at)
    bright = tl.load(factor + at) / 255
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < H * W * 4
    c = e % 4
    pixel = e // 4
    j = pixel % W
    j = tl.where(mirrored != 0, W - 1 - j, j)
    i = pixel // W
    colour = inside & (c < 3)
    from_ = ((row * HP + down + i) * WP + across + j) * 3 + c
    value = tl.load(padded + from_, mask=colour, other=0).to(tl.float32)
    value = tl.minimum(value * bright, 1.0)
    value = (value - tl.load(mean + c, mask=colour, other=0.0)) / tl.load(std + c, mask=colour, other=1.0)
    tl.store(out + b * (H * W * 4) + e, tl.where(colour, value, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def engram_sum_splits(partial, out, splits, row, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    """Write the sum of partial (splits, row) over the splits, in order, to out (row,)."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, BLOCK_S)
    total = tl.zeros((BLOCK_S, BLOCK), dtype=tl.float32)
    start = 0
    while start < splits:
        mask = (start + s < splits)[:, None] & (e < row)[None, :]
        total += tl.load(partial + (start + s)[:, None].to(tl.int64) * row + e[None, :], mask=mask, other=0.0)
        start += BLOCK_S
    tl.store(out + e, tl.sum(total, axis=0), mask=e < row)


@triton.jit(do_not_specialize=["n", "shadowed"])
def engram_update(
    values,
    gradients,
    velocity,
    mask,
    shadow,
    lr,  # float32 (1,)
    n,
    shadowed,
    momentum,
    decay,
    clip,
    BLOCK: tl.constexpr,
):
    """Update flat buffers by SGD with momentum, and copy the first `shadowed` values to the shadow."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < n
    value = tl.load(values + e, mask=inside)
    gradient = tl.load(gradients + e, mask=inside)
    # Comparisons instead of minimum and maximum, which would drop NaN.
    gradient = tl.where(gradient > clip, clip, gradient)
    gradient = tl.where(gradient < -clip, -clip, gradient)
    moved = momentum * tl.load(velocity + e, mask=inside) + gradient + decay * value
    tl.store(velocity + e, moved, mask=inside)
    value -= tl.load(lr) * moved * tl.load(mask + e, mask=inside)
    tl.store(values + e, value, mask=inside)
    tl.store(shadow + e, value.to(shadow.dtype.element_ty), mask=inside & (e < shadowed))
