"""Distance between two feature maps by their sums over rows and over columns: one kernel forward, one backward.

Legend: B batch, C channels, H x W pixels, V = (H + W) C sums of a map.
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

ELEMENTS = 16384  # elements of a map that a program loads at once, and largest number of sums


def fits(maps: Sequence[Tensor]) -> bool:
    """Return whether the kernels support maps (B, C, H, W) of these shapes."""
    return all(_sums(each) <= ELEMENTS and _width(each) <= ELEMENTS for each in maps)


@triton.jit
def pool(
    maps,
    sums,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the sums of one image's squared map (H, W, C) over rows (H, C), followed by those over columns (W, C)."""
    w = tl.arange(0, BLOCK_W)
    c = tl.arange(0, BLOCK_C)
    columns = tl.zeros((BLOCK_W, BLOCK_C), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        here = (h[:, None, None] * W + w[None, :, None]) * C + c[None, None, :]
        inside = (h < H)[:, None, None] & (w < W)[None, :, None] & (c < C)[None, None, :]
        value = tl.load(maps + here, mask=inside, other=0.0).to(tl.float32)
        value = value * value
        to = sums + h[:, None] * C + c[None, :]
        tl.store(to, tl.sum(value, axis=1), mask=(h < H)[:, None] & (c < C)[None, :])
        columns += tl.sum(value, axis=0)
    to = sums + (H + w)[:, None] * C + c[None, :]
    tl.store(to, columns, mask=(w < W)[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["B"])
def engram_pod_forward(
    ours,  # (B, H, W, C)
    theirs,  # (B, H, W, C)
    sums,  # (2, B, V)
    slope,  # (B, V): gradient of the distance at our sums
    distance,  # (B,)
    smallest,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the distance between one image's sums, each normalised to length 1."""
    V: tl.constexpr = (H + W) * C
    image = tl.program_id(0)
    our_sums = sums + image * V
    their_sums = sums + (B + image) * V
    pool(ours + image * (H * W * C), our_sums, H, W, C, BLOCK_H, BLOCK_W, BLOCK_C)
    pool(theirs + image * (H * W * C), their_sums, H, W, C, BLOCK_H, BLOCK_W, BLOCK_C)
    tl.debug_barrier()  # load what other threads of the program have stored
    v = tl.arange(0, BLOCK_V)
    a = tl.load(our_sums + v, mask=v < V, other=0.0)
    b = tl.load(their_sums + v, mask=v < V, other=0.0)
    a_length = tl.maximum(tl.sqrt(tl.sum(a * a, axis=0)), smallest)
    a = a / a_length
    apart = a - b / tl.maximum(tl.sqrt(tl.sum(b * b, axis=0)), smallest)
    length = tl.sqrt(tl.sum(apart * apart, axis=0))
    along = tl.where(a_length > smallest, tl.sum(a * apart, axis=0), 0.0)  # a clamped length is constant
    # A distance of zero has no gradient; zero is used.
    per_length = tl.where(length > 0, 1 / (a_length * tl.where(length > 0, length, 1.0)), 0.0)
    tl.store(slope + image * V + v, (apart - a * along) * per_length, mask=v < V)
    tl.store(distance + image, length)


@triton.jit
def engram_pod_backward(
    ours,  # (B, H, W, C)
    slope,  # (B, V)
    gradient,  # (B,): gradient at the distance
    out,  # (B, H, W, C): gradient at ours
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient at ours."""
    image = tl.program_id(0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < H * W * C
    c = e % C
    row = e // (W * C)
    column = (e // C) % W
    here = image * (H * W * C) + e
    of_image = slope + image * ((H + W) * C) + c
    total = tl.load(of_image + row * C, mask=inside, other=0.0)
    total += tl.load(of_image + (H + column) * C, mask=inside, other=0.0)
    value = tl.load(ours + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, (2 * value * total * tl.load(gradient + image)).to(out.dtype.element_ty), mask=inside)


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *maps: Tensor) -> Tensor:
        count = len(maps) // 2
        plain = [each.detach().permute(0, 2, 3, 1).contiguous() for each in maps]
        distances = torch.empty(count, len(maps[0]), device=maps[0].device)
        slopes: list[Tensor] = []
        for ours, theirs, distance in zip(plain[:count], plain[count:], distances, strict=True):
            batch, height, width, channels = ours.shape
            sums = torch.empty(2, batch, (height + width) * channels, device=ours.device)
            slopes.append(torch.empty_like(sums[0]))
            tile = [power_of_two(size) for size in (height, width, channels)]
            tile[0] = max(1, min(tile[0], ELEMENTS // (tile[1] * tile[2])))
            engram_pod_forward[(batch,)](
                *(ours, theirs, sums, slopes[-1], distance, SMALLEST, batch),
                **_shape(ours),
                **dict(zip(("BLOCK_H", "BLOCK_W", "BLOCK_C"), tile, strict=True)),
                BLOCK_V=power_of_two(sums.shape[2]),
                num_warps=8,
                **EXACT,
            )
        ctx.save_for_backward(*plain[:count], *slopes)
        return distances

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, gradient = ctx.saved_tensors, gradient.contiguous()
        count, block = len(saved) // 2, 2048
        found: list[Tensor | None] = []
        for ours, slope, at_distance in zip(saved[:count], saved[count:], gradient, strict=True):
            out = torch.empty_like(ours)
            grid = (len(ours), blocks_of(ours[0].numel(), block))
            engram_pod_backward[grid](ours, slope, at_distance, out, **_shape(ours), BLOCK=block, num_warps=4)
            found.append(out.permute(0, 3, 1, 2))
        return (*found, *(count * [None]))


def pod_distances(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Return the distances (maps, B) of maps (B, C, H, W) by the sums of their squares over rows and over columns.

    All sums of a sample together are normalised to length 1. Only the student's maps get gradients.
    """
    return _Distances.apply(*student, *teacher)


def _shape(maps: Tensor) -> dict[str, int]:
    return dict(zip(("H", "W", "C"), maps.shape[1:], strict=True))


def _sums(maps: Tensor) -> int:
    _, channels, height, width = maps.shape
    return channels * (height + width)


def _width(maps: Tensor) -> int:
    """Return the number of elements of a row of the map, as a program loads it."""
    _, channels, _, width = maps.shape
    return power_of_two(width) * power_of_two(channels)
