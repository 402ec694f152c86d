"""Residual backbones by engram's kernels: each group of blocks is one differentiable operation of few kernels.

The maps between groups are ordinary tensors: a loss may use them and compute gradients at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.engine.capture import Branch
from engram.kernels.launch import (
    EPSILON,
    Arithmetic,
    Conv,
    Norm,
    NormGradient,
    Scratch,
    conv_data_gradient,
    conv_folded,
    conv_forward,
    conv_weight_gradient,
    norm_apply,
    norm_backward,
    norm_gradient,
    statistics_floats,
    sum_splits,
    weight_splits,
)
from engram.nn.backbone import Backbone, both_means
from engram.nn.resnet import Block, ResNet

WIDTHS = (16, 32, 64)


def as_resnet(backbone: Backbone) -> ResNet:
    """The backbone as the type that these kernels can run."""
    assert isinstance(backbone, ResNet)
    return backbone


def unsupported(backbone: Backbone, size: tuple[int, int]) -> str | None:
    """Why these kernels cannot run the backbone on images of that size; None if they can."""
    foreign = "they are written for engram's residual backbones"
    if not isinstance(backbone, ResNet) or type(backbone).forward is not ResNet.forward:
        return foreign
    if any(type(block) is not Block for group in backbone.groups for block in group.children()):
        return foreign
    if any(width not in WIDTHS for width in backbone.widths):
        return f"they are written for {', '.join(map(str, WIDTHS))} channels"
    strides = 1
    for number, group in enumerate(backbone.groups):
        for block in group.children():
            assert isinstance(block, Block)
            if block.projection is not None or block.rectified or any(backbone.pooled):
                return "they are written for backbones without 1x1 convolutions, ReLUs after a sum, and pooling"
            if block.stride not in (1, 2 if number else 1):
                return "they are written for strides of 1 and 2, and 1 in the first group"
            strides *= block.stride
    if size[0] % strides or size[1] % strides:
        return f"they need images whose sides divide by {strides}"
    return None


@dataclass(frozen=True, eq=False)
class FusedGroup:
    """The convolutions of a group in order (the stem comes first in the first group), and its slices of the buffers."""

    stem: Conv | None
    blocks: tuple[tuple[Conv, Conv], ...]
    norms: tuple[torch.nn.BatchNorm2d, ...]

    @property
    def convs(self) -> list[Conv]:
        """All convolutions of the group."""
        return [*([] if self.stem is None else [self.stem]), *(conv for block in self.blocks for conv in block)]

    @property
    def weights(self) -> slice:
        """The slice of the group's weights in the weights of the backbone."""
        convs = self.convs
        return slice(convs[0].weight, convs[-1].weight + convs[-1].weights)

    @property
    def norm_values(self) -> slice:
        """The slice of the group's gammas and betas in those of the backbone."""
        convs = self.convs
        return slice(convs[0].norm, convs[-1].norm + 2 * convs[-1].channels_out)


def layout(backbone: Backbone, size: tuple[int, int], arithmetic: Arithmetic) -> list[FusedGroup]:
    """The backbone's groups, with the offsets of their weights and norm values, each in the order of the modules."""
    resnet = as_resnet(backbone)
    height, width = size
    weight = norm = 0
    groups: list[FusedGroup] = []

    def place(module: torch.nn.Conv2d) -> Conv:
        nonlocal height, width, weight, norm
        stride = module.stride[0]
        height, width = height // stride, width // stride
        conv = Conv(arithmetic, module.in_channels, module.out_channels, stride, height, width, weight, norm)
        weight, norm = weight + conv.weights, norm + 2 * conv.channels_out
        return conv

    stem: Conv | None = place(resnet.conv)
    norms = [resnet.bn]
    for group in resnet.groups:
        blocks: list[tuple[Conv, Conv]] = []
        for block in group.children():
            assert isinstance(block, Block)
            blocks.append((place(block.conv1), place(block.conv2)))
            norms += [block.bn1, block.bn2]
        groups.append(FusedGroup(stem, tuple(blocks), tuple(norms)))
        stem, norms = None, []
    return groups


def turned_order(groups: list[FusedGroup], device: torch.device) -> Tensor:
    """For every weight in (3, 3, C_in, C_out) order, layer by layer, its index in (C_out, 3, 3, C_in) order."""
    places = [
        torch.arange(conv.weight, conv.weight + conv.weights, device=device).view(conv.channels_out, -1)
        for group in groups
        for conv in group.convs
    ]
    return torch.cat([each.T.reshape(-1) for each in places])


class FusedBackbone:
    """A backbone in training, on flat buffers: values and gradients in float32, and weights as the kernels read them.

    values and gradients begin with all weights in (C_out, 3, 3, C_in) order, then the gamma and beta of all norms. The
    backward pass overwrites the gradients and does not add to them, so a step may have only one. It also writes them
    when only gradients at the maps are needed.
    """

    def __init__(
        self,
        backbone: Backbone,
        size: tuple[int, int],
        values: Tensor,
        gradients: Tensor,
        batch: int,
        arithmetic: Arithmetic,
    ) -> None:
        self.groups = layout(backbone, size, arithmetic)
        self.batch = batch
        convs = [conv for group in self.groups for conv in group.convs]
        weights = sum(conv.weights for conv in convs)
        norms = sum(2 * conv.channels_out for conv in convs)
        self.weights, self.norms = values[:weights], values[weights : weights + norms]
        self.shadow = self.weights.to(arithmetic.stored)  # with float32, the weights themselves
        self._turned = turned_order(self.groups, values.device) if arithmetic.turned else None
        self.forward_weights = self.shadow if self._turned is None else torch.empty_like(self.shadow)
        self.scratch = Scratch.on(values.device, statistics_floats(convs, batch))
        self.partial = torch.empty(max(_partial_size(group, batch) for group in self.groups), device=values.device)
        self.d_weights, self.d_norms = gradients[:weights], gradients[weights : weights + norms]

    def __call__(self, images: Tensor) -> tuple[Tensor, ...]:
        """The maps (N, C, H, W) of images (N, H, W, 4), with batch statistics."""
        assert len(images) <= self.batch, (len(images), self.batch)
        if self._turned is not None:
            torch.index_select(self.shadow, 0, self._turned, out=self.forward_weights)
        x, maps = images, []
        for number, group in enumerate(self.groups):
            weights = self.weights[group.weights].detach().requires_grad_()  # or autograd would not call backward
            norms = self.norms[group.norm_values].detach()
            maps.append(_Group.apply(x, weights, norms, self, number).permute(0, 3, 1, 2))
            x = maps[-1].permute(0, 2, 3, 1)  # a view of the map: its gradient then includes the later groups'
        return tuple(maps)

    def refresh(self) -> None:
        """Read weights that something other than the update has changed."""
        self.shadow.copy_(self.weights)


def _partial_size(group: FusedGroup, batch: int) -> int:
    """The number of floats for the partial sums of the group's weight gradients."""
    return weight_splits(group.convs[0], batch) * (group.weights.stop - group.weights.start)


class _Group(torch.autograd.Function):
    """Forward and backward of one group: (N, H, W, C) to (N, H', W', C')."""

    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, norms: Tensor, backbone: FusedBackbone, number: int) -> Tensor:
        group = backbone.groups[number]
        norm_modules = iter(group.norms)
        kept: list[Tensor] = []

        def conv(layer: Conv, x: Tensor) -> tuple[Tensor, Tensor]:
            module = next(norm_modules)
            gamma = layer.norm - group.norm_values.start
            beta = gamma + layer.channels_out
            assert module.running_mean is not None
            assert module.running_var is not None
            norm = Norm(norms[gamma:beta], norms[beta:], module.running_mean, module.running_var)
            weight = backbone.forward_weights[layer.weight : layer.weight + layer.weights]
            y, state = conv_forward(layer, x, weight, norm, backbone.scratch)
            kept.extend((x, y, state))
            return y, state

        if group.stem is not None:
            x = norm_apply(*conv(group.stem, x), None)
        for first, second in group.blocks:
            inner = norm_apply(*conv(first, x), None)
            x = norm_apply(*conv(second, inner), x)
        ctx.save_for_backward(norms, *kept)
        ctx.backbone, ctx.number = backbone, number
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        norms, *kept = ctx.saved_tensors
        want_input, want_values = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        backward = _Backward(ctx.backbone, ctx.backbone.groups[ctx.number], norms, kept, want_input, want_values)
        return backward.run(g.contiguous()), None, None, None, None


class _Backward:
    """The backward pass of one group."""

    def __init__(
        self,
        backbone: FusedBackbone,
        group: FusedGroup,
        norms: Tensor,
        kept: Sequence[Tensor],
        want_input: bool,
        want_values: bool,
    ) -> None:
        self.backbone, self.group, self.want_input, self.want_values = backbone, group, want_input, want_values
        weights = group.weights.stop - group.weights.start
        d_norms = backbone.d_norms[group.norm_values]
        self.inputs = list(kept[0::3])
        self.norms: list[NormGradient] = []
        for number, (conv, y, state) in enumerate(zip(group.convs, kept[1::3], kept[2::3], strict=True)):
            gamma = conv.norm - group.norm_values.start
            beta = gamma + conv.channels_out
            after_relu = number % 2 == 0 if group.stem is None else number % 2 == 1 or number == 0
            d_gamma, d_beta = d_norms[gamma:beta], d_norms[beta : beta + conv.channels_out]
            coefficients = torch.empty(3, conv.channels_out, device=norms.device)
            self.norms.append(NormGradient(y, state, norms[gamma:beta], d_gamma, d_beta, coefficients, after_relu))
        self.side = Branch()
        self.used: list[Tensor] = []  # by the branch, kept until it has joined
        if want_values:
            splits = weight_splits(group.convs[0], len(kept[0]))
            self.partial = backbone.partial[: splits * weights].view(splits, weights)

    def run(self, g: Tensor) -> Tensor | None:
        """Return the gradient at the group's input, given that at its output; write the gradients of its values."""
        scratch, convs = self.backbone.scratch, self.group.convs
        norm_gradient(g, self.norms[-1], scratch)
        for second in range(len(convs) - 1, 0, -2):
            first = second - 1
            d = norm_backward(g, self.norms[second])
            self._weights(second, d)
            inner = conv_data_gradient(convs[second], d, self._weight(second), None, self.norms[first], scratch)
            d = norm_backward(inner, self.norms[first])
            self._weights(first, d)
            if first == 0 and not self.want_input:
                break
            below = self.norms[first - 1] if first > 0 else None
            g = conv_data_gradient(convs[first], d, self._weight(first), g, below, scratch)
        if self.group.stem is not None:
            self._weights(0, norm_backward(g, self.norms[0]))
        if self.want_values:
            with self.side.launching():
                sum_splits(self.partial, self.backbone.d_weights[self.group.weights])
            self.side.join()
        return g if self.want_input else None

    def _weight(self, number: int) -> Tensor:
        conv = self.group.convs[number]
        return self.backbone.shadow[conv.weight : conv.weight + conv.weights]

    def _weights(self, number: int, d: Tensor) -> None:
        if not self.want_values:
            return
        conv = self.group.convs[number]
        assert weight_splits(conv, len(d)) == len(self.partial)
        self.used.append(d)
        with self.side.launching():
            conv_weight_gradient(conv, self.inputs[number], d, self.partial, conv.weight - self.group.weights.start)


class FoldedBackbone:
    """A backbone that is not trained, with its norms folded into its weights: a teacher, or a model to evaluate."""

    def __init__(self, backbone: Backbone, size: tuple[int, int], arithmetic: Arithmetic) -> None:
        self.groups = layout(backbone, size, arithmetic)
        device = as_resnet(backbone).conv.weight.device
        convs = [conv for group in self.groups for conv in group.convs]
        elements = [9 * conv.channels_in for conv in convs for _ in range(conv.channels_out)]
        self.weights = torch.empty(sum(elements), dtype=arithmetic.stored, device=device)
        self.biases = torch.empty(len(elements), device=device)
        counts = torch.tensor(elements, device=device)  # weights per output channel
        self._channel = torch.arange(len(elements), device=device).repeat_interleave(
            counts, output_size=len(self.weights)
        )
        self._turned = turned_order(self.groups, device) if arithmetic.turned else None
        self.load(backbone)

    @torch.no_grad()
    def load(self, backbone: Backbone) -> None:
        """Copy the backbone's values, in place."""
        resnet = as_resnet(backbone)
        convs, norms = [resnet.conv], [resnet.bn]
        for block in _blocks(resnet):
            convs += [block.conv1, block.conv2]
            norms += [block.bn1, block.bn2]
        gamma, beta, mean, variance = (
            torch.cat([getattr(norm, name) for norm in norms])
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gamma * (variance + EPSILON).rsqrt()
        weights = torch.cat([conv.weight.permute(0, 2, 3, 1).reshape(-1) for conv in convs])
        weights = weights * scale[self._channel]
        self.weights.copy_(weights if self._turned is None else weights[self._turned])
        self.biases.copy_(beta - mean * scale)

    def __call__(self, images: Tensor) -> tuple[Tensor, ...]:
        """The maps (N, C, H, W) of images (N, H, W, 4), with running statistics."""

        def conv(layer: Conv, x: Tensor, shortcut: Tensor | None) -> Tensor:
            weight = self.weights[layer.weight : layer.weight + layer.weights]
            first = layer.norm // 2  # layer.norm counts both gammas and betas
            return conv_folded(layer, x, weight, self.biases[first : first + layer.channels_out], shortcut)

        x, maps = images, []
        for group in self.groups:
            if group.stem is not None:
                x = conv(group.stem, x, None)
            for first, second in group.blocks:
                x = conv(second, conv(first, x, None), x)
            maps.append(x.permute(0, 3, 1, 2))
        return tuple(maps)


def _blocks(backbone: ResNet) -> list[Block]:
    return [block for group in backbone.groups for block in group.children() if isinstance(block, Block)]


class FoldedBranches:
    """The frozen branches of a backbone (`Backbone.branches`) by our kernels, their norms folded into the weights."""

    def __init__(self, backbone: Backbone, size: tuple[int, int], arithmetic: Arithmetic) -> None:
        self._folded = [FoldedBackbone(each, size, arithmetic) for each in backbone.branches]

    def load(self, backbone: Backbone) -> None:
        """Copy the values of the branches, in place."""
        for folded, each in zip(self._folded, backbone.branches, strict=True):
            folded.load(each)

    def __call__(self, images: Tensor) -> Tensor | None:
        """The branches' embeddings (2, B, N D) of images (B, H, W, 4), as `Backbone.branch_embeddings`; or None."""
        if not self._folded:
            return None
        with torch.no_grad():
            return torch.cat([both_means(folded(images)[-1]) for folded in self._folded], dim=2)
