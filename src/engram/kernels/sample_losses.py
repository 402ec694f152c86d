"""Losses with one program per sample: one kernel forward, one backward.

Legend: B batch, D embedding, K classes (minus infinity for classes not seen yet).
"""

# Triton adds launch options such as num_warps to the parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.kernels.availability import SMALLEST, power_of_two


@triton.jit
def load_nca(logits, labels, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return a sample's logits minus their maximum, their exponentials without its own class, and its mask."""
    b = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    value = tl.load(logits + b * K + k, mask=k < K, other=-float("inf"))
    shifted = value - tl.max(value, axis=0)
    own = k == tl.load(labels + b)
    return shifted, tl.where(own, 0.0, tl.exp(shifted)), own


@triton.jit
def engram_nca_forward(logits, labels, loss, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute log(sum of exp(others) + 1) - own from logits (B, K) minus their maximum; loss: (B,)."""
    shifted, others, own = load_nca(logits, labels, K, BLOCK_K)
    value = tl.log(tl.sum(others, axis=0) + 1) - tl.sum(tl.where(own, shifted, 0.0), axis=0)
    tl.store(loss + tl.program_id(0), value)


@triton.jit
def engram_nca_backward(logits, labels, gradient, out, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute the gradient (B, K) at the logits; equal maxima share the gradient of the maximum."""
    shifted, others, own = load_nca(logits, labels, K, BLOCK_K)
    b = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    total = tl.sum(others, axis=0) + 1
    highest = (shifted == 0).to(tl.float32)
    value = others / total - own.to(tl.float32) + highest / (total * tl.sum(highest, axis=0))
    tl.store(out + b * K + k, value * tl.load(gradient + b), mask=k < K)


@triton.jit
def load_pair(ours, theirs, smallest, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a sample's two embeddings normalised to length 1, and the length of ours, at least `smallest`."""
    d = tl.arange(0, BLOCK_D)
    at = tl.program_id(0) * D + d
    a = tl.load(ours + at, mask=d < D, other=0.0)
    b = tl.load(theirs + at, mask=d < D, other=0.0)
    a_length = tl.maximum(tl.sqrt(tl.sum(a * a, axis=0)), smallest)
    b_length = tl.maximum(tl.sqrt(tl.sum(b * b, axis=0)), smallest)
    return a / a_length, b / b_length, a_length


@triton.jit
def engram_cosine_forward(ours, theirs, cosine, smallest, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute the cosine (B,) of embeddings (B, D)."""
    a, b, _ = load_pair(ours, theirs, smallest, D, BLOCK_D)
    tl.store(cosine + tl.program_id(0), tl.sum(a * b, axis=0))


@triton.jit
def engram_cosine_backward(ours, theirs, gradient, out, smallest, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute the gradient (B, D) at ours from that at the cosine (B,)."""
    a, b, length = load_pair(ours, theirs, smallest, D, BLOCK_D)
    along = tl.where(length > smallest, tl.sum(a * b, axis=0), 0.0)  # a clamped length is constant
    value = tl.load(gradient + tl.program_id(0)) * (b - a * along) / length
    d = tl.arange(0, BLOCK_D)
    tl.store(out + tl.program_id(0) * D + d, value, mask=d < D)


class _PerSample(torch.autograd.Function):
    """A value per row of two tensors, and its gradient at the first: one program for each row, in either direction."""

    @staticmethod
    def forward(ctx, first: Tensor, second: Tensor, kernels: tuple[Any, Any], options: dict[str, Any]) -> Tensor:
        first, second = first.contiguous(), second.contiguous()
        value = torch.empty(len(first), device=first.device)
        kernels[0][(len(first),)](first, second, value, **options)
        ctx.save_for_backward(first, second)
        ctx.kernel, ctx.options = kernels[1], options
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        first, second = ctx.saved_tensors
        out = torch.empty_like(first)
        ctx.kernel[(len(first),)](first, second, gradient.contiguous(), out, **ctx.options)
        return out, None, None, None


def nca(logits: Tensor, labels: Tensor) -> Tensor:
    """`engram.methods.blocks.losses.nca_released` of logits (B, K) in float32, one value per sample (B,)."""
    return _PerSample.apply(logits, labels, (engram_nca_forward, engram_nca_backward), _columns("K", logits))


def cosine(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the cosine (B,) of embeddings (B, D) in float32; only ours gets a gradient."""
    options = {"smallest": SMALLEST, **_columns("D", ours)}
    return _PerSample.apply(ours, theirs.detach(), (engram_cosine_forward, engram_cosine_backward), options)


def _columns(name: str, values: Tensor) -> dict[str, Any]:
    columns = values.shape[1]
    return {name: columns, f"BLOCK_{name}": power_of_two(columns), "num_warps": 1 if columns <= 256 else 4}
