"""3x3 convolutions, with the sums for the batch norm after them (forward) or below them (backward).

Feature maps are in (N, H, W, C) order, weights in (C_out, 3, 3, C_in) order (forward in float32: (3, 3, C_in, C_out)),
both in bf16 or both in float32; sums are in float32. A tile has BLOCK_M pixels of the result and all its channels. For
each tap, the pixels are multiplied by its weights. Every sum has a fixed order: the same input gives the same bits.

Legend: M pixels of the result, CI input channels, CO output channels, T tiles. Images have CX = 4 channels in memory
and 3 in the weight (CW), in tiles of 16; elsewhere all three are CI.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from engram.kernels.norm import finish_gradient, finish_statistics, is_last_program

# Triton's interpreter, which the tests use without a GPU, treats the bits of bf16 as integers in a product.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def multiply(a, b, total, PRODUCTS: tl.constexpr):
    """Return total + a @ b in float32. PRODUCTS: how `tl.dot` multiplies float32 numbers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, input_precision=PRODUCTS)


@triton.jit(do_not_specialize=["M"])
def engram_conv_forward(
    x,  # (N, HI, WI, CX)
    weight,  # (CO, 3, 3, CW) or (3, 3, CW, CO), depending on BY_K and BY_C
    bias,  # (CO,), MODE 1 and 2
    shortcut,  # (N, H * SHORTCUT_STRIDE, W * SHORTCUT_STRIDE, CS), MODE 2
    y,  # (N, H, W, CO)
    partial,  # (2, T, CO), MODE 0
    counter,  # (1,), MODE 0
    gamma,
    beta,
    running_mean,
    running_var,  # each (CO,), MODE 0
    state,  # (4, CO), MODE 0
    M,
    momentum,
    epsilon,
    H: tl.constexpr,
    W: tl.constexpr,
    HI: tl.constexpr,
    WI: tl.constexpr,
    CX: tl.constexpr,
    CI: tl.constexpr,
    CW: tl.constexpr,
    CO: tl.constexpr,
    CS: tl.constexpr,
    STRIDE: tl.constexpr,
    SHORTCUT_STRIDE: tl.constexpr,
    MODE: tl.constexpr,  # 0: compute the state of the norm; 1: bias and ReLU; 2: bias and shortcut
    BY_K: tl.constexpr,  # stride of the output channel in the weight
    BY_C: tl.constexpr,  # stride of the input channel
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Compute the convolution of x and the state of the norm after it; or, with the norm folded in, what follows it."""
    program = tl.program_id(0)
    pixel = program * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pixel < M
    image = pixel // (H * W)
    row = (pixel // W) % H
    column = pixel % W
    c = tl.arange(0, CI)
    k = tl.arange(0, CO)
    total = tl.zeros((BLOCK_M, CO), dtype=tl.float32)
    for tap in tl.range(0, 9, num_stages=STAGES):
        i = row * STRIDE + tap // 3 - 1
        j = column * STRIDE + tap % 3 - 1
        valid = inside & (i >= 0) & (i < HI) & (j >= 0) & (j < WI)
        place = ((image * HI + i) * WI + j) * CX
        a = tl.load(x + place[:, None] + c[None, :], mask=valid[:, None] & (c < CX)[None, :], other=0.0)
        b = tl.load(weight + k[None, :] * BY_K + (tap * CW + c)[:, None] * BY_C, mask=(c < CW)[:, None], other=0.0)
        total = multiply(a, b, total, PRODUCTS)
    here = pixel[:, None] * CO + k[None, :]
    if MODE == 0:
        rounded = total.to(y.dtype.element_ty)
        tl.store(y + here, rounded, mask=inside[:, None])
        # Relative to the running mean: otherwise the squares would cancel and lose the variance.
        value = tl.where(inside[:, None], rounded.to(tl.float32) - tl.load(running_mean + k)[None, :], 0.0)
        tl.store(partial + program * CO + k, tl.sum(value, axis=0))
        tl.store(partial + (tl.num_programs(0) + program) * CO + k, tl.sum(value * value, axis=0))
        if is_last_program(counter):
            finish_statistics(partial, gamma, beta, running_mean, running_var, state, M, momentum, epsilon, CO, BLOCK_T)
    else:
        total += tl.load(bias + k)[None, :]
        if MODE == 1:
            total = tl.maximum(total, 0.0)
        else:
            from_ = (image * H + row) * SHORTCUT_STRIDE * (W * SHORTCUT_STRIDE) + column * SHORTCUT_STRIDE
            mask = inside[:, None] & (k < CS)[None, :]
            total += tl.load(shortcut + from_[:, None] * CS + k[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(y + here, total.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["M"])
def engram_conv_data_gradient(
    d,  # (N, H // STRIDE, W // STRIDE, CO): gradient at the convolution's output
    weight,  # (CO, 3, 3, CI)
    shortcut,  # (N, H // STRIDE, W // STRIDE, CO): gradient to add to the first CO channels, SHORTCUT
    below,  # (N, H, W, CI): input of the norm below, NORM
    below_state,  # (4, CI), NORM
    below_gamma,
    below_coefficients,  # (3, CI), NORM
    below_d_gamma,
    below_d_beta,
    out,  # (N, H, W, CI)
    partial,  # (2, T, CI), NORM
    counter,  # (1,), NORM
    M,
    H: tl.constexpr,
    W: tl.constexpr,
    CI: tl.constexpr,
    CO: tl.constexpr,
    STRIDE: tl.constexpr,
    SHORTCUT: tl.constexpr,
    NORM: tl.constexpr,  # 0: none; 1: a norm is below; 2: a ReLU and, below it, a norm
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Compute the gradient at the convolution's input, and from it the gradient of the norm below."""
    HO: tl.constexpr = H // STRIDE
    WO: tl.constexpr = W // STRIDE
    program = tl.program_id(0)
    if STRIDE == 1:
        pixel = program * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = pixel < M
        image = pixel // (H * W)
        row = (pixel // W) % H
        column = pixel % W
    else:  # a tile has every second row and column: the pixels between use other taps
        odd_row = program % 4 // 2
        odd_column = program % 2
        quarter = program // 4 * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = quarter < M // 4
        image = quarter // (HO * WO)
        row = (quarter // WO) % HO * 2 + odd_row
        column = quarter % WO * 2 + odd_column
        pixel = (image * H + row) * W + column
    c = tl.arange(0, CI)
    k = tl.arange(0, CO)
    total = tl.zeros((BLOCK_M, CI), dtype=tl.float32)
    for tap in tl.range(0, 9 if STRIDE == 1 else 4, num_stages=STAGES):
        if STRIDE == 1:
            ky = tap // 3
            kx = tap % 3
            valid = inside
        else:  # only the middle tap, or the two next to it
            ky = 1 + odd_row * (tap // 2 * 2 - 1)
            kx = 1 + odd_column * (tap % 2 * 2 - 1)
            valid = tl.where((odd_row >= tap // 2) & (odd_column >= tap % 2), inside, False)
        i = row + 1 - ky
        j = column + 1 - kx
        valid = valid & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        place = ((image * HO + i // STRIDE) * WO + j // STRIDE) * CO
        a = tl.load(d + place[:, None] + k[None, :], mask=valid[:, None], other=0.0)
        b = tl.load(weight + k[:, None] * (9 * CI) + (ky * 3 + kx) * CI + c[None, :])
        total = multiply(a, b, total, PRODUCTS)
    if SHORTCUT:
        mask = inside[:, None]
        if STRIDE == 2:
            mask = tl.where(odd_row + odd_column == 0, mask, False)
        if CI > CO:
            mask = mask & (c < CO)[None, :]
        from_ = ((image * HO + row // STRIDE) * WO + column // STRIDE) * CO
        total += tl.load(shortcut + from_[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    here = pixel[:, None] * CI + c[None, :]
    if NORM == 0:
        tl.store(out + here, total.to(out.dtype.element_ty), mask=inside[:, None])
    else:
        value = tl.load(below + here, mask=inside[:, None], other=0.0).to(tl.float32)
        if NORM == 2:
            scale = tl.load(below_state + c)[None, :]
            shift = tl.load(below_state + CI + c)[None, :]
            total = tl.where(value * scale + shift > 0, total, 0.0)
        rounded = tl.where(inside[:, None], total, 0.0).to(out.dtype.element_ty)
        tl.store(out + here, rounded, mask=inside[:, None])
        kept = rounded.to(tl.float32)
        mean = tl.load(below_state + 2 * CI + c)[None, :]
        inverse = tl.load(below_state + 3 * CI + c)[None, :]
        tl.store(partial + program * CI + c, tl.sum(kept, axis=0))
        tl.store(partial + (tl.num_programs(0) + program) * CI + c, tl.sum(kept * (value - mean) * inverse, axis=0))
        if is_last_program(counter):
            finish_gradient(
                partial, below_gamma, below_state, below_coefficients, below_d_gamma, below_d_beta, M, CI, BLOCK_T
            )


@triton.jit(do_not_specialize=["M"])
def engram_conv_weight_gradient(
    x,  # (N, HI, WI, CX)
    d,  # (N, H, W, CO): gradient at the convolution's output
    partial,  # (splits, ROW): share of each split in the gradient, to be summed
    M,
    ROW,
    H: tl.constexpr,
    W: tl.constexpr,
    HI: tl.constexpr,
    WI: tl.constexpr,
    CX: tl.constexpr,
    CI: tl.constexpr,
    CW: tl.constexpr,
    CO: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of pixels per split
    STAGES: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Compute the share of one split in the gradient of the weight, for one row of three taps."""
    split = tl.program_id(0)
    ky = tl.program_id(1)
    c = tl.arange(0, CI)
    k = tl.arange(0, CO)
    left = tl.zeros((CO, CI), dtype=tl.float32)
    middle = tl.zeros((CO, CI), dtype=tl.float32)
    right = tl.zeros((CO, CI), dtype=tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        pixel = (split * BLOCKS + block) * BLOCK_P + tl.arange(0, BLOCK_P)
        inside = pixel < M
        gradient = tl.load(d + pixel[:, None] * CO + k[None, :], mask=inside[:, None], other=0.0)
        gradient = tl.trans(gradient)
        i = ((pixel // W) % H) * STRIDE + ky - 1
        column = (pixel % W) * STRIDE
        base = ((pixel // (H * W)) * HI + i) * WI
        row_valid = inside & (i >= 0) & (i < HI)
        for kx in tl.static_range(3):
            j = column + (kx - 1)
            mask = (row_valid & (j >= 0) & (j < WI))[:, None] & (c < CX)[None, :]
            a = tl.load(x + ((base + j) * CX)[:, None] + c[None, :], mask=mask, other=0.0)
            if kx == 0:
                left = multiply(gradient, a, left, PRODUCTS)
            elif kx == 1:
                middle = multiply(gradient, a, middle, PRODUCTS)
            else:
                right = multiply(gradient, a, right, PRODUCTS)
    to = partial + split * ROW + k[:, None] * (9 * CW) + ky * (3 * CW) + c[None, :]
    mask = (k[:, None] >= 0) & (c < CW)[None, :]
    tl.store(to, left, mask=mask)
    tl.store(to + CW, middle, mask=mask)
    tl.store(to + 2 * CW, right, mask=mask)
