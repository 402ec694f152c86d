"""Launch of the kernels of residual backbones, with grids and block sizes.

Block sizes depend only on shapes and are not tuned at run time: another block size sums in another order, and results
would depend on how busy the GPU is. They were chosen on an H200.
"""

# Triton adds launch options such as num_warps to the parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engram.kernels.availability import blocks_of
from engram.kernels.conv import engram_conv_data_gradient, engram_conv_forward, engram_conv_weight_gradient
from engram.kernels.norm import (
    engram_augment,
    engram_norm_apply,
    engram_norm_backward,
    engram_norm_gradient,
    engram_pack,
    engram_sum_splits,
    engram_update,
)

MOMENTUM, EPSILON = 0.1, 1e-5
IMAGE_CHANNELS = 4  # red, green, blue and zero
PARTIAL_SUMS = 2048  # partial sums of tiles added at once; more would need too many registers in every tile
# (pixels per tile, warps, pipeline stages) by dtype and number of channels of the result.
TILES = {
    torch.bfloat16: {16: (256, 4, 3), 32: (256, 4, 3), 64: (64, 4, 3)},
    torch.float32: {16: (256, 4, 1), 32: (128, 4, 3), 64: (64, 8, 3)},
}
# (pixels per block, blocks per split, warps, pipeline stages) by dtype and number of output channels.
WEIGHT_GRADIENT = {
    torch.bfloat16: {16: (128, 4, 1, 2), 32: (64, 4, 2, 2), 64: (64, 4, 4, 3)},
    torch.float32: {16: (32, 8, 1, 2), 32: (64, 4, 4, 2), 64: (16, 16, 4, 2)},
}
NORM_TILE = {16: 256, 32: 128, 64: 64}


@dataclass(frozen=True)
class Arithmetic:
    """Number formats. Sums are always in float32.

    stored: dtype of feature maps and weights. products: how `tl.dot` multiplies two float32 numbers.
    """

    stored: torch.dtype
    products: Literal["ieee", "tf32"] = "ieee"

    @property
    def turned(self) -> bool:
        """Whether a forward convolution takes its weight as (3, 3, C_in, C_out), not (C_out, 3, 3, C_in).

        Without tensor cores, neighbouring threads compute neighbouring output channels; with the other order, they
        would wait for the same bank of the shared memory.
        """
        return self.stored is torch.float32 and self.products == "ieee"


# By the name of the precision in `RunConfig`.
ARITHMETIC = {
    "bf16": Arithmetic(torch.bfloat16),
    "tf32": Arithmetic(torch.float32, "tf32"),
    "float32": Arithmetic(torch.float32),
}


@dataclass(frozen=True)
class Conv:
    """A convolution and the batch norm after it: shapes, and positions in the flat buffers.

    height, width: of the output. weight: position of its first element among all weights. norm: position of gamma,
    followed by beta, among the values of all norms.
    """

    arithmetic: Arithmetic

    channels_in: int
    channels_out: int
    stride: int
    height: int
    width: int
    weight: int
    norm: int

    @property
    def memory_in(self) -> int:
        """Number of channels of the input in memory."""
        return IMAGE_CHANNELS if self.channels_in == 3 else self.channels_in

    @property
    def weights(self) -> int:
        """Number of elements of the weight."""
        return 9 * self.channels_in * self.channels_out


@dataclass(frozen=True, eq=False)
class Norm:
    """The tensors of a batch norm, each (C,)."""

    gamma: Tensor
    beta: Tensor
    running_mean: Tensor
    running_var: Tensor


@dataclass(frozen=True, eq=False)
class Scratch:
    """Buffers shared by launches on one stream: partial sums, and a counter that is zero after every launch."""

    partial: Tensor
    counter: Tensor

    @classmethod
    def on(cls, device: torch.device, floats: int) -> Scratch:
        """Allocate buffers for this many partial sums."""
        return cls(torch.empty(floats, device=device), torch.zeros(1, dtype=torch.int32, device=device))


def statistics_floats(convs: list[Conv], batch: int) -> int:
    """Return the number of partial sums that the largest of these layers needs at this batch size."""
    return max(2 * conv.channels_out * (4 + blocks_of(batch * conv.height * conv.width, 64)) for conv in convs)


def conv_forward(conv: Conv, x: Tensor, weight: Tensor, norm: Norm, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Return the convolution of x, and the state (4, C) of its norm. weight: flat, in the order of the arithmetic."""
    state = torch.empty(4, conv.channels_out, device=x.device)
    norms = (norm.gamma, norm.beta, norm.running_mean, norm.running_var, state)
    return _convolve(conv, x, weight, state, None, (scratch.partial, scratch.counter), norms, mode=0), state


def conv_folded(conv: Conv, x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """Return the convolution with its norm folded in, plus the shortcut; without a shortcut, the ReLU of it."""
    unused = (bias, bias, bias, bias, bias)
    return _convolve(conv, x, weight, bias, shortcut, (bias, bias), unused, mode=1 if shortcut is None else 2)


def _convolve(
    conv: Conv,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    scratch: tuple[Tensor, Tensor],
    norms: tuple[Tensor, ...],
    mode: int,
) -> Tensor:
    pixels = len(x) * conv.height * conv.width
    y = x.new_empty(len(x), conv.height, conv.width, conv.channels_out)
    block, warps, stages = TILES[conv.arithmetic.stored][conv.channels_out]
    engram_conv_forward[(blocks_of(pixels, block),)](
        *(x, weight, bias, x if shortcut is None else shortcut, y, *scratch, *norms, pixels, MOMENTUM, EPSILON),
        **_shapes(conv),
        CS=1 if shortcut is None else shortcut.shape[3],
        SHORTCUT_STRIDE=1 if shortcut is None else shortcut.shape[1] // conv.height,
        MODE=mode,
        **_weight_strides(conv),
        BLOCK_M=block,
        BLOCK_T=PARTIAL_SUMS // conv.channels_out,
        STAGES=stages,
        PRODUCTS=conv.arithmetic.products,
        num_warps=warps,
    )
    return y


def norm_apply(y: Tensor, state: Tensor, shortcut: Tensor | None) -> Tensor:
    """Return the norm of y plus the shortcut; without a shortcut, the ReLU of the norm."""
    out = torch.empty_like(y)
    _, height, width, channels = y.shape
    block = 2048
    engram_norm_apply[(blocks_of(y.numel(), block),)](
        *(y, state, y if shortcut is None else shortcut, out, y.numel() // channels),
        H=height,
        W=width,
        C=channels,
        CS=channels if shortcut is None else shortcut.shape[3],
        SHORTCUT_STRIDE=1 if shortcut is None else shortcut.shape[1] // height,
        SHORTCUT=shortcut is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


@dataclass(frozen=True, eq=False)
class NormGradient:
    """A batch norm in the backward pass.

    y: input of the norm (N, H, W, C).
    state: (4, C).
    d_gamma, d_beta: gradients of its parameters (C,), to be written.
    coefficients: of the gradient at its input (3, C), to be written by the launch that completes the gradient at the
        norm's output.
    """

    y: Tensor
    state: Tensor
    gamma: Tensor
    d_gamma: Tensor
    d_beta: Tensor
    coefficients: Tensor
    after_relu: bool


def norm_gradient(g: Tensor, norm: NormGradient, scratch: Scratch) -> None:
    """Compute the gradients of a norm's parameters and its coefficients from the gradient g at its output."""
    channels = g.shape[3]
    pixels = g.numel() // channels
    block = NORM_TILE[channels]
    engram_norm_gradient[(blocks_of(pixels, block),)](
        *(g, norm.y, norm.state, norm.gamma, norm.coefficients, norm.d_gamma, norm.d_beta),
        *(scratch.partial, scratch.counter, pixels),
        C=channels,
        BLOCK_M=block,
        BLOCK_T=PARTIAL_SUMS // channels,
        num_warps=4,
    )


def norm_backward(g: Tensor, norm: NormGradient) -> Tensor:
    """Return the gradient at the norm's input. g: gradient at its output, before a ReLU that may follow."""
    d = torch.empty_like(g)
    block = 2048
    engram_norm_backward[(blocks_of(g.numel(), block),)](
        *(g, norm.y, norm.coefficients, d, g.numel() // g.shape[3]), C=g.shape[3], BLOCK=block, num_warps=4
    )
    return d


def conv_data_gradient(
    conv: Conv, d: Tensor, weight: Tensor, shortcut: Tensor | None, below: NormGradient | None, scratch: Scratch
) -> Tensor:
    """Return the gradient at the convolution's input, and complete the gradient of the norm below, if given.

    d: gradient at the convolution's output. shortcut: gradient that the block's output passes directly to its input.
    """
    images = len(d)
    height, width = conv.height * conv.stride, conv.width * conv.stride
    pixels = images * height * width
    out = d.new_empty(images, height, width, conv.channels_in)
    nothing = scratch.partial
    under = NormGradient(d, *(5 * (nothing,)), after_relu=False) if below is None else below
    block, warps, stages = TILES[conv.arithmetic.stored][conv.channels_in]
    parts = conv.stride**2  # distance between the pixels of a tile, so that all of them use the same taps
    engram_conv_data_gradient[(parts * blocks_of(pixels // parts, block),)](
        *(d, weight, d if shortcut is None else shortcut),
        *(under.y, under.state, under.gamma, under.coefficients, under.d_gamma, under.d_beta),
        *(out, scratch.partial, scratch.counter, pixels),
        H=height,
        W=width,
        CI=conv.channels_in,
        CO=conv.channels_out,
        STRIDE=conv.stride,
        SHORTCUT=shortcut is not None,
        NORM=0 if below is None else 2 if below.after_relu else 1,
        BLOCK_M=block,
        BLOCK_T=PARTIAL_SUMS // conv.channels_in,
        STAGES=stages,
        PRODUCTS=conv.arithmetic.products,
        num_warps=warps,
    )
    return out


def weight_splits(conv: Conv, images: int) -> int:
    """Return the number of splits that the gradient of the weight is summed from."""
    block, blocks, *_ = WEIGHT_GRADIENT[conv.arithmetic.stored][conv.channels_out]
    return blocks_of(images * conv.height * conv.width, block * blocks)


def conv_weight_gradient(conv: Conv, x: Tensor, d: Tensor, partial: Tensor, offset: int) -> None:
    """Write each split's share of the gradient of the weight to partial (splits, row), from column `offset`."""
    images = len(d)
    block, blocks, warps, stages = WEIGHT_GRADIENT[conv.arithmetic.stored][conv.channels_out]
    engram_conv_weight_gradient[(weight_splits(conv, images), 3)](
        *(x, d, partial[:, offset:], images * conv.height * conv.width, partial.shape[1]),
        **_shapes(conv),
        BLOCK_P=block,
        BLOCKS=blocks,
        STAGES=stages,
        PRODUCTS=conv.arithmetic.products,
        num_warps=warps,
    )


def sum_splits(partial: Tensor, out: Tensor) -> None:
    """Write the sum of partial (splits, row) over the splits to out (row,)."""
    splits, row = partial.shape
    block = 64
    engram_sum_splits[(blocks_of(row, block),)](partial, out, splits, row, BLOCK=block, BLOCK_S=32, num_warps=4)


def augment(
    padded: Tensor,
    plan: tuple[Tensor, ...],
    counter: Tensor,
    images: int,
    size: tuple[int, int],
    mean: Tensor,
    std: Tensor,
    arithmetic: Arithmetic,
) -> Tensor:
    """Return the augmented and normalised batch (images, H, W, 4) of the step in `counter`.

    padded: uint8 (P, H + border, W + border, 3). plan: rows, top, left, mirror and factor, each (S, B).
    """
    out = torch.empty(images, *size, IMAGE_CHANNELS, dtype=arithmetic.stored, device=padded.device)
    return _augment(padded, plan, counter, (mean, std), out, levels=False)


def crop(padded: Tensor, plan: tuple[Tensor, ...], counter: Tensor, images: int, size: tuple[int, int]) -> Tensor:
    """Return the same batch before it is normalised, as levels: uint8 (images, H, W, 3)."""
    out = torch.empty(images, *size, 3, dtype=torch.uint8, device=padded.device)
    return _augment(padded, plan, counter, (padded, padded), out, levels=True)


def _augment(
    padded: Tensor, plan: tuple[Tensor, ...], counter: Tensor, norm: tuple[Tensor, Tensor], out: Tensor, levels: bool
) -> Tensor:
    rows, top, left, mirror, factor = plan
    images, height, width, _ = out.shape
    block = 1024
    engram_augment[(images, blocks_of(height * width * IMAGE_CHANNELS, block))](
        *(padded, rows, top, left, mirror, factor, counter, *norm, out, rows.shape[1]),
        HP=padded.shape[1],
        WP=padded.shape[2],
        H=height,
        W=width,
        LEVELS=levels,
        BLOCK=block,
        num_warps=4,
    )
    return out


def pack(images: Tensor, mean: Tensor, std: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return uint8 images (B, H, W, 3) normalised, (B, H, W, 4); the fourth channel is zero."""
    out = torch.empty(*images.shape[:3], IMAGE_CHANNELS, dtype=arithmetic.stored, device=images.device)
    block, pixels = 1024, images.numel() // 3
    engram_pack[(blocks_of(pixels * IMAGE_CHANNELS, block),)](images, mean, std, out, pixels, BLOCK=block, num_warps=4)
    return out


def update(
    values: Tensor,
    gradients: Tensor,
    velocity: Tensor,
    mask: Tensor,
    shadow: Tensor,
    lr: Tensor,
    momentum: float,
    decay: float,
    clip: float | None,
) -> None:
    """Update flat buffers (n,) by SGD with momentum. shadow: copy of the first values in the dtype of the network."""
    block = 1024
    engram_update[(blocks_of(len(values), block),)](
        *(values, gradients, velocity, mask, shadow, lr, len(values), len(shadow)),
        *(momentum, decay, math.inf if clip is None else clip),
        BLOCK=block,
        num_warps=4,
    )


def _weight_strides(conv: Conv) -> dict[str, int]:
    """Return the strides of the weight of a forward convolution."""
    if conv.arithmetic.turned:
        return {"BY_K": 1, "BY_C": conv.channels_out}
    return {"BY_K": 9 * conv.channels_in, "BY_C": 1}


def _shapes(conv: Conv) -> dict[str, int]:
    return {
        "H": conv.height,
        "W": conv.width,
        "HI": conv.height * conv.stride,
        "WI": conv.width * conv.stride,
        "CX": conv.memory_in,
        "CI": max(16, conv.channels_in),
        "CW": conv.channels_in,
        "CO": conv.channels_out,
        "STRIDE": conv.stride,
    }
