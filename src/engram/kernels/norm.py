"""Kernels next to the convolutions: batch normalisation, augmentation, sum over splits, update.

The convolutions compute partial sums per tile for the norms, and the last tile combines them.

The state of a norm is (4, C): scale and shift of the equivalent affine transform, mean, and inverse standard deviation.
Its gradient is affine, too: at its input it is a * g + b * y + c, with coefficients (3, C).
"""

# A type checker does not know what a Triton function returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last_program(counter):
    """Return whether this is the last program of the launch to get here; then it sees what the others wrote before."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1)
    last = arrived == tl.num_programs(0) - 1
    if last:
        tl.store(counter, 0)  # ready for the next launch
    return last


@triton.jit
def sum_tiles(partial, C: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the two sums (C,) of partial (2, tiles, C) over the tiles, in order; each program has one tile."""
    tiles = tl.num_programs(0)
    c = tl.arange(0, C)
    t = tl.arange(0, BLOCK_T)
    first = tl.zeros((BLOCK_T, C), dtype=tl.float32)
    second = tl.zeros((BLOCK_T, C), dtype=tl.float32)
    start = 0
    while start < tiles:
        there = (start + t < tiles)[:, None]
        here = (start + t)[:, None] * C + c[None, :]
        first += tl.load(partial + here, mask=there, other=0.0, cache_modifier=".cg")
        second += tl.load(partial + tiles * C + here, mask=there, other=0.0, cache_modifier=".cg")
        start += BLOCK_T
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def finish_statistics(
    partial,
    gamma,
    beta,
    running_mean,
    running_var,
    state,
    M,
    momentum,
    epsilon,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute the state of a norm from the sums of values and squares of each tile, relative to the running mean."""
    c = tl.arange(0, C)
    old_mean = tl.load(running_mean + c)
    old_var = tl.load(running_var + c)
    weight = tl.load(gamma + c)
    offset = tl.load(beta + c)
    values, squares = sum_tiles(partial, C, BLOCK_T)
    away = values / M
    mean = old_mean + away
    variance = tl.maximum(squares / M - away * away, 0.0)
    inverse = tl.rsqrt(variance + epsilon)
    scale = weight * inverse
    tl.store(state + c, scale)
    tl.store(state + C + c, offset - mean * scale)
    tl.store(state + 2 * C + c, mean)
    tl.store(state + 3 * C + c, inverse)
    tl.store(running_mean + c, old_mean + momentum * away)
    tl.store(running_var + c, old_var + momentum * (variance * M / tl.maximum(M - 1, 1) - old_var))


@triton.jit
def finish_gradient(
    partial,
    gamma,
    state,
    coefficients,
    d_gamma,
    d_beta,
    M,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute a norm's parameter gradients and the coefficients of its input gradient from the sums of each tile."""
    c = tl.arange(0, C)
    mean = tl.load(state + 2 * C + c)
    inverse = tl.load(state + 3 * C + c)
    factor = tl.load(gamma + c) * inverse
    of_beta, of_gamma = sum_tiles(partial, C, BLOCK_T)
    tl.store(d_beta + c, of_beta)
    tl.store(d_gamma + c, of_gamma)
    tl.store(coefficients + c, factor)
    tl.store(coefficients + C + c, -factor * inverse * of_gamma / M)
    tl.store(coefficients + 2 * C + c, factor * (inverse * mean * of_gamma - of_beta) / M)


@triton.jit(do_not_specialize=["M"])
def engram_norm_gradient(
    g,
    y,
    state,
    gamma,
    coefficients,
    d_gamma,
    d_beta,
    partial,
    counter,
    M,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute a norm's parameter gradients and coefficients from the gradient g (M, C) at its output; y: its input."""
    program = tl.program_id(0)
    pixel = program * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, C)
    here = pixel[:, None] * C + c[None, :]
    inside = (pixel < M)[:, None]
    gradient = tl.load(g + here, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + here, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(state + 2 * C + c)[None, :]
    inverse = tl.load(state + 3 * C + c)[None, :]
    tl.store(partial + program * C + c, tl.sum(gradient, axis=0))
    tl.store(partial + (tl.num_programs(0) + program) * C + c, tl.sum(gradient * (value - mean) * inverse, axis=0))
    if is_last_program(counter):
        finish_gradient(partial, gamma, state, coefficients, d_gamma, d_beta, M, C, BLOCK_T)


@triton.jit(do_not_specialize=["M"])
def engram_norm_apply(
    y,
    state,
    shortcut,
    out,
    M,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    CS: tl.constexpr,
    SHORTCUT_STRIDE: tl.constexpr,
    SHORTCUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the norm of y (N, H, W, C) plus the shortcut (N, H * stride, W * stride, CS), or else its ReLU."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < M * C  # as a product, Triton knows a multiple of C: a thread loads several elements at once
    c = e % C
    value = tl.load(y + e, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(state + c) + tl.load(state + C + c)
    if SHORTCUT:
        if SHORTCUT_STRIDE == 1 and CS == C:
            value += tl.load(shortcut + e, mask=inside, other=0.0).to(tl.float32)
        else:
            pixel = e // C
            image = pixel // (H * W)
            row = ((pixel // W) % H) * SHORTCUT_STRIDE
            column = (pixel % W) * SHORTCUT_STRIDE
            from_ = ((image * (H * SHORTCUT_STRIDE) + row) * (W * SHORTCUT_STRIDE) + column) * CS + c
            value += tl.load(shortcut + from_, mask=inside & (c < CS), other=0.0).to(tl.float32)
    else:
        value = tl.maximum(value, 0.0)
    tl.store(out + e, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def engram_norm_backward(g, y, coefficients, d, M, C: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient at the norm's input: a * g + b * y + c, with coefficients (3, C)."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < M * C
    c = e % C
    value = tl.load(g + e, mask=inside, other=0.0).to(tl.float32) * tl.load(coefficients + c)
    value += tl.load(y + e, mask=inside, other=0.0).to(tl.float32) * tl.load(coefficients + C + c)
    value += tl.load(coefficients + 2 * C + c)
    tl.store(d + e, value.to(d.dtype.element_ty), mask=inside)


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
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Crop, mirror, brighten and normalise the batch of a step; the fourth channel is zero.

    LEVELS: do not normalise; write rounded levels, uint8 (images, H, W, 3).
    """
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
    if LEVELS:
        tl.store(out + (b * (H * W) + pixel) * 3 + c, (value * 255 + 0.5).to(tl.int32).to(tl.uint8), mask=colour)
    else:
        value = (value - tl.load(mean + c, mask=colour, other=0.0)) / tl.load(std + c, mask=colour, other=1.0)
        tl.store(out + b * (H * W * 4) + e, tl.where(colour, value, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def engram_pack(images, mean, std, out, n, BLOCK: tl.constexpr):
    """Normalise uint8 images (n pixels, 3) to (n pixels, 4); the fourth channel is zero."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < n * 4
    c = e % 4
    colour = inside & (c < 3)
    value = tl.load(images + e // 4 * 3 + c, mask=colour, other=0).to(tl.float32) / 255
    value = (value - tl.load(mean + c, mask=colour, other=0.0)) / tl.load(std + c, mask=colour, other=1.0)
    tl.store(out + e, tl.where(colour, value, 0.0).to(out.dtype.element_ty), mask=inside)


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
