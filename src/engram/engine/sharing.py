"""Sharing of a batch among processes: outputs of the whole batch from those of its parts, and synchronised norms.

Legend: B images of the whole batch, b of this process's part, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engram.core.errors import EngramError
from engram.core.processes import Processes, Share
from engram.nn.network import Output


class UnreadMaps(tuple[Tensor, ...]):
    """Stands for maps that are not collected, because the method does not say that it reads them."""

    __slots__ = ()

    def _refuse(self, *_: object) -> Any:
        raise EngramError(
            "the loss reads feature maps, which several processes only collect for a method that says so; write "
            "needs_maps = True in the method"
        )

    __getitem__ = __iter__ = __len__ = _refuse


def collect_output(processes: Processes, share: Share, output: Output, maps: bool) -> Output:
    """The output for the whole batch, in every process, from the outputs for its parts.

    Every process computes the same loss of it, so each gets the gradient of its own images; these are summed later.
    maps: also collect the feature maps, which are large.
    """

    def images(part: Tensor) -> Tensor:
        return _Collect.apply(part, processes, share)

    def either(name: str, value: Tensor) -> Tensor:
        """Of images, or of no image: every process has its whole gradient, so each counts a part of it."""
        if value.ndim == 0 or isinstance(value, nn.Parameter):
            return _ShareGradient.apply(value, processes.count)
        if len(value) != share.count:
            raise EngramError(
                f"the output {name!r} of the head has {len(value)} rows for {share.count} images; several processes "
                "need a row for each image, or a parameter itself"
            )
        return images(value)

    return Output(
        tuple(images(each) for each in output.maps) if maps else UnreadMaps(),
        images(output.embedding),
        images(output.scores),
        images(output.logits),
        either("scale", output.scale),
        None if output.features is None else images(output.features),
        {name: either(name, value) for name, value in output.extras.items()},
    )


class Pass(Protocol):
    """A pass of a network over images."""

    def __call__(self, images: Tensor) -> Output: ...


def collected_pass(processes: Processes, forward: Pass) -> Pass:
    """The pass, over a batch that every process has, with the work divided; without gradient and maps."""
    if processes.count == 1:
        return forward

    def divided(images: Tensor) -> Output:
        share = processes.share(len(images))
        if not share.is_split:
            return forward(images)
        with torch.no_grad():
            return collect_output(processes, share, forward(images[share.own]), maps=False)

    return divided


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, processes: Processes, share: Share) -> Tensor:
        ctx.own = share.own
        return processes.collect(part.detach(), share)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own], None, None


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int) -> Tensor:
        ctx.count = count
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.count, None


class SynchronisedNorms(TorchFunctionMode):
    """Inside this context, every batch norm in training uses the statistics of the whole batch.

    It replaces `torch.nn.functional.batch_norm`, which modules and heads call, so the network itself does not change.
    """

    def __init__(self, processes: Processes, share: Share) -> None:
        super().__init__()
        self._processes, self._share = processes, share

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        images: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(images, running_mean, running_var, weight, bias, False, momentum, eps)
        processes, share = self._processes, self._share
        assert len(images) == share.count, "a batch norm must see one row per image"
        with torch.no_grad():
            mean, variance = _statistics(images, processes, share)
            if running_mean is not None and running_var is not None:
                values = share.size * images[0, 0].numel()
                running_mean.lerp_(mean.to(running_mean), momentum)
                running_var.lerp_((variance * (values / (values - 1))).to(running_var), momentum)
        return _Normalise.apply(images, weight, bias, mean, (variance + eps).rsqrt(), processes, share)


def _statistics(images: Tensor, processes: Processes, share: Share) -> tuple[Tensor, Tensor]:
    """Mean and variance (C,) of each channel over the whole batch; the same bits in every process."""
    own_variance, own_mean = torch.var_mean(images.float(), dim=_all_but_channels(images), correction=0)
    table = own_mean.new_zeros(processes.count, 2, len(own_mean))
    table[processes.rank, 0], table[processes.rank, 1] = own_mean, own_variance
    processes.sum(table)
    mean, variance = torch.zeros_like(own_mean), torch.zeros_like(own_mean)
    for row, count in zip(table, share.counts, strict=True):
        mean += row[0] * (count / share.size)
    for row, count in zip(table, share.counts, strict=True):
        variance += (row[1] + (row[0] - mean).square()) * (count / share.size)
    return mean, variance


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias, where mean and deviation depend on the x of every process."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        processes: Processes,
        share: Share,
    ) -> Tensor:
        ctx.save_for_backward(images, weight, mean, inverse)
        ctx.processes, ctx.share = processes, share
        normalised = _standardised(images, mean, inverse)
        if weight is not None:
            normalised = normalised * _per_channel(weight, images)
        if bias is not None:
            normalised = normalised + _per_channel(bias, images)
        return normalised.to(images.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mean, inverse = ctx.saved_tensors
        processes, share, gradient = ctx.processes, ctx.share, gradients[0].float()
        normalised = _standardised(images, mean, inverse)
        others = _all_but_channels(images)
        sums = torch.stack([gradient.sum(dim=others), (gradient * normalised).sum(dim=others)])
        own = sums.clone()  # of weight and bias each process has its own images' gradient, as of all parameters
        of_images = None
        if ctx.needs_input_grad[0]:
            processes.sum(sums)
            means = sums / (share.size * images[0, 0].numel())
            centred = gradient - _per_channel(means[0], images) - normalised * _per_channel(means[1], images)
            scale = inverse if weight is None else inverse * weight
            of_images = (centred * _per_channel(scale, images)).to(images.dtype)
        of_weight = own[1].to(weight) if weight is not None and ctx.needs_input_grad[1] else None
        of_bias = own[0].to(mean) if ctx.needs_input_grad[2] else None
        return of_images, of_weight, of_bias, None, None, None, None


def _all_but_channels(images: Tensor) -> list[int]:
    return [dim for dim in range(images.ndim) if dim != 1]


def _per_channel(values: Tensor, images: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (images.ndim - 2))


def _standardised(images: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return (images.float() - _per_channel(mean, images)) * _per_channel(inverse, images)
