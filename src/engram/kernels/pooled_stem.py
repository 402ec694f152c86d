"""A stem of convolution, batch norm, ReLU and max pooling, whose large map is never stored.

The map before the pooling is by far the largest of a ResNet on photographs, and computing a convolution of three
channels takes less time than reading its result. So every kernel computes what it needs of it again from the images:

- Mean and variance of the map follow from the moments of the 3x3 patches of the images: with p a patch followed by 1,
  and M the mean of p p', the mean of a channel w is M[1] w and its mean square w' M w.
- The forward pass keeps, for each pooled value, which of the nine places it came from.
- The gradient at the map is zero except at these places, plus two terms of the norm that are linear in the map. So the
  gradient of the weight is the sum of gradient times patch over these places, plus products with M.

Legend: B images of H x W pixels and 3 channels, C channels of the map, pooled to HP x WP.
"""

# Triton adds launch options such as num_warps to the parameters of a kernel, and a type checker does not know what a
# Triton function returns.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from engram.kernels.availability import blocks_of
from engram.kernels.conv import multiply

PATCH = 32  # numbers of a patch in memory: 27 of the image, 4 zeros, and a one
ONE = PATCH - 1
BLOCK = 64  # pixels of a tile
TILES = 32  # tiles of a program that sums
CHANNELS = (16, 32, 64)  # that a map may have


@triton.jit
def patches_at(x, image, row, column, inside, H, W, PATCH: tl.constexpr):
    """Return the patches (BLOCK, PATCH) around these pixels, with zeros outside the image and a one at the end."""
    k = tl.arange(0, PATCH)
    r = row[:, None] + (k // 9 - 1)[None, :]
    c = column[:, None] + (k % 9 // 3 - 1)[None, :]
    valid = inside[:, None] & (k < 27)[None, :] & (r >= 0) & (r < H) & (c >= 0) & (c < W)
    value = tl.load(x + ((image[:, None] * H + r) * W + c) * 3 + (k % 3)[None, :], mask=valid, other=0.0)
    value = value.to(tl.float32)
    one = inside[:, None] & (k == PATCH - 1)[None, :]
    return tl.where(one, 1.0, value).to(x.dtype.element_ty)


@triton.jit(do_not_specialize=["pixels"])
def engram_stem_moments(x, partial, pixels, H, W, PATCH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Write the sum of p p' over the program's pixels to its part of `partial` (programs, PATCH, PATCH)."""
    total = tl.zeros((PATCH, PATCH), dtype=tl.float32)
    start = tl.program_id(0) * (BLOCK * TILES)
    for tile in range(TILES):
        e = start + tile * BLOCK + tl.arange(0, BLOCK)
        p = patches_at(x, e // (H * W), e // W % H, e % W, e < pixels, H, W, PATCH)
        total = multiply(tl.trans(p), p, total, "ieee")
    k = tl.arange(0, PATCH)
    to = partial + tl.program_id(0) * (PATCH * PATCH) + k[:, None] * PATCH + k[None, :]
    tl.store(to, total)


@triton.jit(do_not_specialize=["pooled"])
def engram_stem_forward(
    x,  # (B, H, W, 3)
    weight,  # (PATCH, C)
    scale,  # float32 (C,)
    shift,  # float32 (C,)
    out,  # (B, HP, WP, C)
    places,  # uint8, as out
    pooled,
    H,
    W,
    HP,
    WP,
    C: tl.constexpr,
    KEEP: tl.constexpr,
    PATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the pooled map, and with KEEP the place of each value in its window: 0 to 8, or 9 if it is zero."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < pooled
    image, i, j = e // (HP * WP), e // WP % HP, e % WP
    c = tl.arange(0, C)
    w = tl.load(weight + tl.arange(0, PATCH)[:, None] * C + c[None, :])
    factor, offset = tl.load(scale + c)[None, :], tl.load(shift + c)[None, :]
    best = tl.full((BLOCK, C), float("-inf"), dtype=tl.float32)
    place = tl.full((BLOCK, C), 9, dtype=tl.int32)
    for t in tl.static_range(9):
        row, column = 2 * i + (t // 3 - 1), 2 * j + (t % 3 - 1)
        here = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        p = patches_at(x, image, row, column, here, H, W, PATCH)
        value = multiply(p, w, tl.zeros((BLOCK, C), dtype=tl.float32), "ieee") * factor + offset
        better = here[:, None] & ((value > best) | (value != value))  # NaN stays NaN
        best = tl.where(better, value, best)
        place = tl.where(better, t, place)
    to = e[:, None] * C + c[None, :]
    zero = best <= 0
    tl.store(out + to, tl.where(zero, 0.0, best).to(out.dtype.element_ty), mask=inside[:, None])
    if KEEP:
        tl.store(places + to, tl.where(zero, 9, place).to(tl.uint8), mask=inside[:, None])


@triton.jit(do_not_specialize=["pooled"])
def engram_stem_gradient(
    x,  # (B, H, W, 3)
    gradient,  # (B, HP, WP, C)
    places,  # uint8, as gradient
    partial,  # float32 (programs, C, PATCH)
    pooled,
    H,
    W,
    HP,
    WP,
    C: tl.constexpr,
    PATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write the sum of gradient times patch, over the places that the program's pooled values came from."""
    total = tl.zeros((C, PATCH), dtype=tl.float32)
    c = tl.arange(0, C)
    start = tl.program_id(0) * (BLOCK * TILES)
    for tile in range(TILES):
        e = start + tile * BLOCK + tl.arange(0, BLOCK)
        inside = e < pooled
        image, i, j = e // (HP * WP), e // WP % HP, e % WP
        at = e[:, None] * C + c[None, :]
        g = tl.load(gradient + at, mask=inside[:, None], other=0.0).to(tl.float32)
        place = tl.load(places + at, mask=inside[:, None], other=9).to(tl.int32)
        for t in tl.static_range(9):
            p = patches_at(x, image, 2 * i + (t // 3 - 1), 2 * j + (t % 3 - 1), inside, H, W, PATCH)
            chosen = tl.where(place == t, g, 0.0).to(x.dtype.element_ty)
            total = multiply(tl.trans(chosen), p, total, "ieee")
    k = tl.arange(0, PATCH)
    to = partial + tl.program_id(0) * (C * PATCH) + c[:, None] * PATCH + k[None, :]
    tl.store(to, total)


def as_matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (C, 3, 3, 3) as (PATCH, C), in the order of a patch."""
    rows = weight.detach().permute(2, 3, 1, 0).reshape(27, -1)
    return F.pad(rows, (0, 0, 0, PATCH - 27)).to(dtype).contiguous()


def moments(x: Tensor) -> Tensor:
    """The mean of p p' over all patches p of images (B, H, W, 3): float64 (PATCH, PATCH)."""
    batch, height, width, _ = x.shape
    pixels = batch * height * width
    programs = blocks_of(pixels, BLOCK * TILES)
    partial = torch.empty(programs, PATCH, PATCH, device=x.device)
    engram_stem_moments[(programs,)](
        x, partial, pixels, height, width, PATCH=PATCH, BLOCK=BLOCK, TILES=TILES, num_warps=4
    )
    return partial.sum(dim=0, dtype=torch.float64) / pixels


def pooled_map(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """The pooled map (B, HP, WP, C) of images (B, H, W, 3), and, with `keep`, the places of its values."""
    batch, height, width, _ = x.shape
    hp, wp, channels = (height + 1) // 2, (width + 1) // 2, weight.shape[1]
    out = torch.empty(batch, hp, wp, channels, dtype=x.dtype, device=x.device)
    places = torch.empty(out.shape if keep else 1, dtype=torch.uint8, device=x.device)
    pooled = batch * hp * wp
    engram_stem_forward[(blocks_of(pooled, BLOCK),)](
        *(x, weight, scale, shift, out, places, pooled, height, width, hp, wp),
        C=channels,
        KEEP=keep,
        PATCH=PATCH,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out, places


def gradient_sums(x: Tensor, gradient: Tensor, places: Tensor) -> Tensor:
    """The sum of gradient times patch over the places that pooled values came from: float64 (PATCH, C)."""
    _, height, width, _ = x.shape
    batch, hp, wp, channels = gradient.shape
    pooled = batch * hp * wp
    programs = blocks_of(pooled, BLOCK * TILES)
    partial = torch.empty(programs, channels, PATCH, device=x.device)
    engram_stem_gradient[(programs,)](
        *(x, gradient, places, partial, pooled, height, width, hp, wp),
        C=channels,
        PATCH=PATCH,
        BLOCK=BLOCK,
        TILES=TILES,
        num_warps=4,
    )
    return partial.sum(dim=0, dtype=torch.float64).T


class _PooledStem(torch.autograd.Function):
    """The stem in train mode; updates the running statistics of the norm."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, norm: nn.BatchNorm2d, keep: bool
    ) -> Tensor:
        matrix = as_matrix(weight, x.dtype)
        w, about = matrix.double(), moments(x)
        mean = _times(about[ONE], w)
        variance = ((w * _times(about, w)).sum(dim=0) - mean.square()).clamp_min(0)
        inverse = (variance + norm.eps).rsqrt()
        scale = gamma * inverse
        pixels = x.numel() // 3
        _follow(norm, mean, variance * (pixels / max(1, pixels - 1)))
        out, places = pooled_map(x, matrix, scale.float(), (beta - mean * scale).float(), keep)
        if keep:
            ctx.save_for_backward(x, places, w, about, mean, inverse, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, places, w, about, mean, inverse, scale = ctx.saved_tensors
        sums = gradient_sums(x, g.to(x.dtype).contiguous(), places)
        d_beta = sums[ONE]
        d_gamma = inverse * ((w * sums).sum(dim=0) - mean * d_beta)
        patch = about[ONE][:, None]  # the mean patch
        centred = inverse * (_times(about, w) - mean * patch)  # the mean of the normalised map times the patch
        d_weight = (scale * (sums - d_beta * patch - d_gamma * centred))[:27]
        d_weight = d_weight.view(3, 3, 3, -1).permute(3, 2, 0, 1)
        return None, d_weight.float(), d_gamma.float(), d_beta.float(), None, None


def _times(rows: Tensor, w: Tensor) -> Tensor:
    """`rows @ w` without a library, which would keep a workspace for it."""
    return (rows.unsqueeze(-1) * w).sum(dim=-2)


@torch.no_grad()
def _follow(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    """Move the norm's running statistics towards those of the batch."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.momentum is not None
    norm.running_mean.lerp_(mean.float(), norm.momentum)
    norm.running_var.lerp_(variance.float(), norm.momentum)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)


def pooled_stem(images: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    """Max pooling (3x3, stride 2) of ReLU of norm of convolution (3x3) of images (B, 3, H, W), in bf16.

    The images get no gradient. In eval mode, nothing has a gradient.
    """
    x = images.detach().to(torch.bfloat16).permute(0, 2, 3, 1).contiguous()
    if norm.training:
        parameters = (conv.weight, norm.weight, norm.bias)
        keep = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        out = _PooledStem.apply(x, *parameters, norm, keep)
    else:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        with torch.no_grad():
            scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
            shift = norm.bias - norm.running_mean * scale
            out, _ = pooled_map(x, as_matrix(conv.weight, x.dtype), scale, shift, keep=False)
    return out.permute(0, 3, 1, 2)
