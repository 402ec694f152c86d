"""Weighted distance between feature maps, channel by channel: one kernel per map for forward and for backward.

Legend: B batch, C channels, P pixels of a map. A program computes BLOCK_C channels of one image.
"""

# Triton adds launch options such as num_warps to the parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.kernels.availability import EXACT, SMALLEST, blocks_of, power_of_two

ELEMENTS = 16384  # elements of a map that a program loads at once
BLOCK_C = 16


@triton.jit
def signal(values, SQUARE: tl.constexpr):
    """Return the values to compare: the maps or their squares."""
    values = values.to(tl.float32)
    if SQUARE:
        values = values * values
    return values


@triton.jit(do_not_specialize=["B"])
def engram_distance_forward(
    ours,  # (B, P, C)
    theirs,  # (B, P, C)
    weight,  # (C,)
    norms,  # (2, B, C): lengths of the channels of ours and theirs
    distance,  # (B, C)
    shares,  # (blocks of channels, B)
    factor,
    smallest,
    B,
    P: tl.constexpr,
    C: tl.constexpr,
    SQUARE: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the distance of each channel, normalised to length 1, and the share of this block in the weighted sum."""
    image = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    a_sum = tl.zeros((BLOCK_C,), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        here = (image * P + p)[:, None] * C + c[None, :]
        inside = (p < P)[:, None] & (c < C)[None, :]
        a = signal(tl.load(ours + here, mask=inside, other=0.0), SQUARE)
        b = signal(tl.load(theirs + here, mask=inside, other=0.0), SQUARE)
        a_sum += tl.sum(a * a, axis=0)
        b_sum += tl.sum(b * b, axis=0)
    a_norm = tl.maximum(tl.sqrt(a_sum), smallest)
    b_norm = tl.maximum(tl.sqrt(b_sum), smallest)
    apart = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        here = (image * P + p)[:, None] * C + c[None, :]
        inside = (p < P)[:, None] & (c < C)[None, :]
        a = signal(tl.load(ours + here, mask=inside, other=0.0), SQUARE) / a_norm[None, :]
        b = signal(tl.load(theirs + here, mask=inside, other=0.0), SQUARE) / b_norm[None, :]
        apart += tl.sum((a - b) * (a - b), axis=0)
    at = image * C + c
    tl.store(norms + at, a_norm, mask=c < C)
    tl.store(norms + B * C + at, b_norm, mask=c < C)
    tl.store(distance + at, tl.sqrt(apart), mask=c < C)
    share = factor * tl.load(weight + c, mask=c < C, other=0.0) * (tl.sqrt(apart) if POWER == 1 else apart)
    tl.store(shares + tl.program_id(1) * B + image, tl.sum(share, axis=0))


@triton.jit(do_not_specialize=["B"])
def engram_distance_backward(
    ours,
    theirs,
    weight,
    norms,
    distance,
    gradient,  # (B,): gradient at the sum
    out,  # (B, P, C): gradient at ours
    factor,
    smallest,
    B,
    P: tl.constexpr,
    C: tl.constexpr,
    SQUARE: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the gradient at ours."""
    image = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = image * C + c
    there = c < C
    a_norm = tl.load(norms + at, mask=there, other=1.0)
    b_norm = tl.load(norms + B * C + at, mask=there, other=1.0)
    apart = tl.load(distance + at, mask=there, other=1.0)
    upstream = factor * tl.load(weight + c, mask=there, other=0.0) * tl.load(gradient + image)
    if POWER == 2:
        upstream = 2 * apart * upstream
    # A distance of zero has no gradient; zero is used.
    upstream = tl.where(apart > 0, upstream / tl.where(apart > 0, apart, 1.0), 0.0)
    along = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        here = (image * P + p)[:, None] * C + c[None, :]
        inside = (p < P)[:, None] & there[None, :]
        a = signal(tl.load(ours + here, mask=inside, other=0.0), SQUARE) / a_norm[None, :]
        b = signal(tl.load(theirs + here, mask=inside, other=0.0), SQUARE) / b_norm[None, :]
        along += tl.sum(a * (a - b), axis=0)
    along = tl.where(a_norm > smallest, along, 0.0)  # a clamped length is constant
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        here = (image * P + p)[:, None] * C + c[None, :]
        inside = (p < P)[:, None] & there[None, :]
        value = tl.load(ours + here, mask=inside, other=0.0).to(tl.float32)
        a = signal(value, SQUARE) / a_norm[None, :]
        b = signal(tl.load(theirs + here, mask=inside, other=0.0), SQUARE) / b_norm[None, :]
        result = (a - b - a * along[None, :]) * (upstream / a_norm)[None, :]
        if SQUARE:
            result = 2 * value * result
        tl.store(out + here, result.to(out.dtype.element_ty), mask=inside)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, square: bool, power: int, factors: Sequence[float], *tensors: Tensor) -> Tensor:
        count = len(tensors) // 3
        plain = [maps.detach().permute(0, 2, 3, 1).contiguous() for maps in tensors[: 2 * count]]
        weights = [  # a single number applies to all channels
            weight.detach().expand(maps.shape[3]).contiguous()
            for weight, maps in zip(tensors[2 * count :], plain[:count], strict=True)
        ]
        batch, device = len(plain[0]), plain[0].device
        blocks = [blocks_of(maps.shape[3], BLOCK_C) for maps in plain[:count]]
        shares = torch.empty(sum(blocks), batch, device=device)
        kept: list[Tensor] = []
        for ours, theirs, weight, factor, share in zip(
            *(plain[:count], plain[count:], weights, factors, shares.split(blocks)), strict=True
        ):
            norms = torch.empty(2, batch, ours.shape[3], device=device)
            distance = torch.empty_like(norms[0])
            grid, shapes = _shapes(ours, square, power)
            places = (ours, theirs, weight, norms, distance, share)
            engram_distance_forward[grid](*places, factor, SMALLEST, batch, **shapes)
            kept.extend((ours, theirs, weight, norms, distance))
        ctx.save_for_backward(*kept)
        ctx.square, ctx.power, ctx.factors = square, power, factors
        return shares.sum(dim=0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, gradient = ctx.saved_tensors, gradient.contiguous()
        found: list[Tensor | None] = []
        for number, factor in enumerate(ctx.factors):
            ours, theirs, weight, norms, distance = saved[5 * number : 5 * number + 5]
            out = torch.empty_like(ours)
            grid, shapes = _shapes(ours, ctx.square, ctx.power)
            places = (ours, theirs, weight, norms, distance, gradient, out)
            engram_distance_backward[grid](*places, factor, SMALLEST, len(ours), **shapes)
            found.append(out.permute(0, 3, 1, 2))
        return (None, None, None, *found, *(2 * len(found) * [None]))


def weighted_distance(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    weights: Sequence[Tensor],
    factors: Sequence[float],
    *,
    square: bool,
    power: int,
) -> Tensor:
    """Return for each sample (B,) the sum over maps and channels of factor * weight * distance^power.

    The distance is between the channels of two maps (B, C, H, W), normalised to length 1 over the pixels. Only the
    student's maps get gradients.

    weights: (C,) or () per map.
    factors: one per map.
    square: compare the squares of the maps.
    power: 1 or 2.
    """
    return _Weighted.apply(square, power, tuple(factors), *student, *teacher, *weights)


def _shapes(maps: Tensor, square: bool, power: int) -> tuple[tuple[int, int], dict[str, int]]:
    batch, height, width, channels = maps.shape
    block = min(power_of_two(height * width), ELEMENTS // BLOCK_C)
    shapes = {"P": height * width, "C": channels, "SQUARE": square, "POWER": power}
    blocks = {"BLOCK_P": block, "BLOCK_C": BLOCK_C, "num_warps": 8 if block >= 512 else 4}
    return (batch, blocks_of(channels, BLOCK_C)), {**shapes, **blocks, **EXACT}
