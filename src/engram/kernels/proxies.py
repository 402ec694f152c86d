"""Scores of the local similarity classifier: one kernel forward, two backward.

The score of a class is the mean of its proxies' similarities to the embedding, weighted by their softmax. A similarity
is factor * (cosine - shift).

Legend: B batch, D embedding, K classes, P proxies per class.
"""

# Triton adds launch options such as num_warps to the parameters of a kernel, and its functions have no types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.kernels.availability import SMALLEST, blocks_of, power_of_two

TILE = 4096  # elements of the proxies that a program loads at once
MOST_FEATURES, MOST_ELEMENTS = 128, 2048  # limits per class: more proxies do not fit into the registers of a program


def fits(proxies: int, features: int) -> bool:
    """Return whether the kernels support this number of proxies per class and of features."""
    elements = max(16, power_of_two(proxies)) * power_of_two(features)
    return features <= MOST_FEATURES and elements <= MOST_ELEMENTS


@triton.jit
def load_unit(values, rows, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, smallest):
    """Load rows of values (R, D), normalised to length 1, and their lengths, at least `smallest`."""
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < D)[None, :]
    loaded = tl.load(values + rows[:, None] * D + d[None, :], mask=mask, other=0.0)
    length = tl.maximum(tl.sqrt(tl.sum(loaded * loaded, axis=1)), smallest)
    return loaded / length[:, None], length


@triton.jit
def at_length(unit, length, gradient, smallest):
    """Return the gradient at the values from that at the normalised values. A clamped length is constant."""
    along = tl.where(length > smallest, tl.sum(unit * gradient, axis=1), 0.0)
    return (gradient - unit * along[:, None]) / length[:, None]


@triton.jit
def compare(unit, proxies, is_proxy, factor, shift):
    """Return similarities (B, P) of unit embeddings to a class's unit proxies, their softmax, and the scores (B,)."""
    cosine = tl.dot(unit, tl.trans(proxies), input_precision="ieee")
    similarity = tl.where(is_proxy[None, :], factor * (cosine - shift), -float("inf"))
    power = tl.exp(similarity - tl.max(similarity, axis=1)[:, None])
    share = power / tl.sum(power, axis=1)[:, None]
    similarity = tl.where(is_proxy[None, :], similarity, 0.0)
    return similarity, share, tl.sum(share * similarity, axis=1)


@triton.jit(do_not_specialize=["B"])
def engram_proxies_forward(
    embedding,  # (B, D)
    weight,  # (K, P, D)
    scores,  # (B, K)
    factor,
    shift,
    smallest,
    B,
    K: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the scores of a block of embeddings for one class."""
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    k = tl.program_id(1)
    p = tl.arange(0, BLOCK_P)
    unit, _ = load_unit(embedding, b, b < B, D, BLOCK_D, smallest)
    proxies, _ = load_unit(weight, k * P + p, p < P, D, BLOCK_D, smallest)
    _, _, score = compare(unit, proxies, p < P, factor, shift)
    tl.store(scores + b * K + k, score, mask=b < B)


@triton.jit(do_not_specialize=["B"])
def engram_proxies_weight_gradient(
    embedding,  # (B, D)
    weight,  # (K, P, D)
    gradient,  # (B, K): gradient at the scores
    d_cosine,  # (B, K, P)
    d_weight,  # (K, P, D)
    factor,
    shift,
    smallest,
    B,
    K: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the gradients at the cosines of one class with all embeddings, and at its proxies."""
    k = tl.program_id(0)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    proxies, length = load_unit(weight, k * P + p, p < P, D, BLOCK_D, smallest)
    total = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    start = 0
    while start < B:
        b = start + tl.arange(0, BLOCK_B)
        unit, _ = load_unit(embedding, b, b < B, D, BLOCK_D, smallest)
        similarity, share, score = compare(unit, proxies, p < P, factor, shift)
        upstream = factor * tl.load(gradient + b * K + k, mask=b < B, other=0.0)
        at_cosine = upstream[:, None] * share * (1 + similarity - score[:, None])
        here = (b * K + k)[:, None] * P + p[None, :]
        tl.store(d_cosine + here, at_cosine, mask=(b < B)[:, None] & (p < P)[None, :])
        total = tl.dot(tl.trans(at_cosine), unit, total, input_precision="ieee")
        start += BLOCK_B
    result = at_length(proxies, length, total, smallest)
    mask = (p < P)[:, None] & (d < D)[None, :]
    tl.store(d_weight + (k * P + p)[:, None] * D + d[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["B"])
def engram_proxies_embedding_gradient(
    embedding,  # (B, D)
    weight,  # (N, D): the proxies of all classes
    d_cosine,  # (B, N)
    d_embedding,  # (B, D)
    smallest,
    B,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the gradient at a block of embeddings."""
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_B, BLOCK_D), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        proxies, _ = load_unit(weight, n, n < N, D, BLOCK_D, smallest)
        mask = (b < B)[:, None] & (n < N)[None, :]
        at_cosine = tl.load(d_cosine + b[:, None] * N + n[None, :], mask=mask, other=0.0)
        total = tl.dot(at_cosine, proxies, total, input_precision="ieee")
    unit, length = load_unit(embedding, b, b < B, D, BLOCK_D, smallest)
    result = at_length(unit, length, total, smallest)
    tl.store(d_embedding + b[:, None] * D + d[None, :], result, mask=(b < B)[:, None] & (d < D)[None, :])


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, embedding: Tensor, weight: Tensor, factor: float, shift: float) -> Tensor:
        embedding, weight = embedding.contiguous(), weight.contiguous()
        batch, (classes, proxies, features) = len(embedding), weight.shape
        scores = torch.empty(batch, classes, device=embedding.device)
        shapes = {"K": classes, "P": proxies, "D": features, **_blocks(proxies, features)}
        grid = (blocks_of(batch, shapes["BLOCK_B"]), classes)
        engram_proxies_forward[grid](embedding, weight, scores, factor, shift, SMALLEST, batch, **shapes)
        ctx.save_for_backward(embedding, weight)
        ctx.factor, ctx.shift, ctx.shapes = factor, shift, shapes
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        embedding, weight = ctx.saved_tensors
        batch, (classes, proxies, features) = len(embedding), weight.shape
        d_cosine = torch.empty(batch, classes, proxies, device=embedding.device)
        d_weight, d_embedding = torch.empty_like(weight), None
        places = (embedding, weight, gradient.contiguous(), d_cosine, d_weight)
        engram_proxies_weight_gradient[(classes,)](*places, ctx.factor, ctx.shift, SMALLEST, batch, **ctx.shapes)
        if ctx.needs_input_grad[0]:
            d_embedding = torch.empty_like(embedding)
            block = ctx.shapes["BLOCK_D"]
            engram_proxies_embedding_gradient[(blocks_of(batch, 16),)](
                *(embedding, weight, d_cosine, d_embedding, SMALLEST, batch),
                N=classes * proxies,
                D=features,
                BLOCK_B=16,
                BLOCK_N=max(16, TILE // block),
                BLOCK_D=block,
                num_warps=8,
            )
        return d_embedding, d_weight, None, None


def proxy_scores(embedding: Tensor, weight: Tensor, factor: float, shift: float) -> Tensor:
    """Return the scores (B, K) of embeddings (B, D) for the proxies (K, P, D), all in float32."""
    return _Scores.apply(embedding, weight, factor, shift)


def _blocks(proxies: int, features: int) -> dict[str, int]:
    block = max(16, power_of_two(features))
    return {"BLOCK_B": 32, "BLOCK_P": max(16, power_of_two(proxies)), "BLOCK_D": block, "num_warps": 4}
