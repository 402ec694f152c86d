"""How far apart two feature maps are, channel by channel: forward and backward, one kernel each.

Legend: B batch, C channels, P pixels of a map. A program takes BLOCK_C channels of one image.
"""

# Triton adds launch options such as num_warps to what a kernel takes.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST = 1e-12  # as in torch.nn.functional.normalize
ELEMENTS = 16384  # of a map that a program holds at once
BLOCK_C = 16


@triton.jit
def signal(values, SQUARE: tl.constexpr):
    """What is compared: the values or their squares."""
    values = values.to(tl.float32)
    if SQUARE:
        values = values * values
    return values


@triton.jit(do_not_specialize=["B"])
def engram_distance_forward(
    ours,  # (B, P, C)
    theirs,  # (B, P, C)
    norms,  # (2, B, C): the length of each channel of either
    distance,  # (B, C)
    smallest,
    B,
    P: tl.constexpr,
    C: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The distance of each channel of ours to theirs, both brought to length 1."""
    image = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    a_sum = tl.zeros((BLOCK_C,), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in tl.static_range(0, P, BLOCK_P):
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
    for start in tl.static_range(0, P, BLOCK_P):
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


@triton.jit(do_not_specialize=["B"])
def engram_distance_backward(
    ours,
    theirs,
    norms,
    distance,
    gradient,  # (B, C): at the distance
    out,  # (B, P, C): at ours
    smallest,
    B,
    P: tl.constexpr,
    C: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gradient at ours."""
    image = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = image * C + c
    there = c < C
    a_norm = tl.load(norms + at, mask=there, other=1.0)
    b_norm = tl.load(norms + B * C + at, mask=there, other=1.0)
    apart = tl.load(distance + at, mask=there, other=1.0)
    upstream = tl.load(gradient + at, mask=there, other=0.0)
    # The distance has no gradient where it is zero; it is taken to be zero there.
    factor = tl.where(apart > 0, upstream / tl.where(apart > 0, apart, 1.0), 0.0)
    along = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in tl.static_range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        here = (image * P + p)[:, None] * C + c[None, :]
        inside = (p < P)[:, None] & there[None, :]
        a = signal(tl.load(ours + here, mask=inside, other=0.0), SQUARE) / a_norm[None, :]
        b = signal(tl.load(theirs + here, mask=inside, other=0.0), SQUARE) / b_norm[None, :]
        along += tl.sum(a * (a - b), axis=0)
    along = tl.where(a_norm > smallest, along, 0.0)  # a length that was clamped does not change
    for start in tl.static_range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        here = (image * P + p)[:, None] * C + c[None, :]
        inside = (p < P)[:, None] & there[None, :]
        value = tl.load(ours + here, mask=inside, other=0.0).to(tl.float32)
        a = signal(value, SQUARE) / a_norm[None, :]
        b = signal(tl.load(theirs + here, mask=inside, other=0.0), SQUARE) / b_norm[None, :]
        result = (a - b - a * along[None, :]) * (factor / a_norm)[None, :]
        if SQUARE:
            result = 2 * value * result
        tl.store(out + here, result.to(tl.bfloat16), mask=inside)


class ChannelDistance(torch.autograd.Function):
    """See `channel_distance`."""

    @staticmethod
    def forward(ctx, ours: Tensor, theirs: Tensor, square: bool) -> Tensor:
        ours, theirs = (maps.detach().permute(0, 2, 3, 1).contiguous() for maps in (ours, theirs))
        batch, height, width, channels = ours.shape
        norms = torch.empty(2, batch, channels, device=ours.device)
        distance = torch.empty(batch, channels, device=ours.device)
        grid, shapes = _shapes(batch, height * width, channels, square)
        engram_distance_forward[grid](ours, theirs, norms, distance, SMALLEST, batch, **shapes)
        ctx.save_for_backward(ours, theirs, norms, distance)
        ctx.square = square
        return distance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ours, theirs, norms, distance = ctx.saved_tensors
        batch, height, width, channels = ours.shape
        out = torch.empty_like(ours)
        grid, shapes = _shapes(batch, height * width, channels, ctx.square)
        engram_distance_backward[grid](
            *(ours, theirs, norms, distance, gradient.contiguous(), out, SMALLEST, batch), **shapes
        )
        return out.permute(0, 3, 1, 2), None, None


def channel_distance(ours: Tensor, theirs: Tensor, square: bool) -> Tensor:
    """The distance (B, C) of the channels of two bf16 maps (B, C, H, W), each brought to length 1 over its pixels.

    square: of the maps' squares. Only ours gets a gradient.
    """
    return ChannelDistance.apply(ours, theirs, square)


def _shapes(batch: int, pixels: int, channels: int, square: bool) -> tuple[tuple[int, int], dict[str, int]]:
    block = min(1 << (pixels - 1).bit_length(), ELEMENTS // BLOCK_C)
    shapes = {"P": pixels, "C": channels, "SQUARE": square, "BLOCK_P": block, "BLOCK_C": BLOCK_C}
    return (batch, -(-channels // BLOCK_C)), {**shapes, "num_warps": 8 if block >= 512 else 4}
