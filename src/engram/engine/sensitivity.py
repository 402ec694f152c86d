"""Sensitivity: how much each parameter matters for the network's output for single images.

The squared gradient of a batch's mean is not the mean of the images' squared gradients, so each image needs a separate
gradient. In eval mode, an image's output depends only on that image. One ordinary backward pass of the sum over a batch
therefore gives each image's gradient at every layer's output. Together with the layer's input, one matrix product
gives the gradient of the layer's weights for each image.

Legend: B images, C channels, L pixels of a layer's output, K classes, P proxies per class, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from engram.contract.learner import Learner
from engram.contract.phase import Step
from engram.core.errors import EngramError, described
from engram.core.rng import generator
from engram.data.augment import centre, to_unit
from engram.data.image_rows import read_pixels
from engram.data.stage import Stage
from engram.engine.runtime import Runtime
from engram.nn.heads import CosineHead, LinearHead, LSCHead
from engram.nn.network import Network

PIXELS = {"cpu": 64 * 32 * 32, "cuda": 512 * 32 * 32}  # in a batch


def sensitivity(
    runtime: Runtime,
    learner: Learner,
    stage: Stage,
    rows: Tensor,
    objective: Callable[[Step, Tensor], Tensor],
    power: Literal[1, 2],
) -> dict[str, Tensor]:
    """See `Passes.sensitivity`. Uses torch's modules in float32 (TF32 if that is the engine's precision).

    Changes neither running statistics nor parameters.
    """
    assert len(rows) > 0, "sensitivity needs at least one image"
    network, device, pool = learner.network, runtime.device, stage.pool
    _check(network)
    arrival, index = runtime.buffers.arrival(stage, network.head.capacity), runtime.buffers.stage
    draws = torch.rand(len(rows), generator=generator(learner.seed, "sensitivity", stage.index))
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    scale = weights.get("head.scale")
    if scale is not None:
        scale.requires_grad_()
    height, width = (min(own, seen) for own, seen in zip(pool.images.shape[1:3], runtime.image_size, strict=True))
    size = max(1, PIXELS[device.type] // (height * width))
    share = runtime.processes.share(len(rows))
    own, drawn = rows[share.own], draws[share.own]
    assert not network.training
    with _watched(network, power, totals):
        for some, numbers in zip(own.split(size), drawn.split(size), strict=True):
            seen = centre(read_pixels(pool.images[some]), runtime.image_size)
            unit = to_unit(seen.to(device)).contiguous(memory_format=runtime.layout)
            labels, exemplar = pool.labels[some].to(device), pool.exemplar[some].to(device)
            with torch.enable_grad():
                # Only the images require a gradient: that of the weights over the whole batch is not needed.
                output = functional_call(network, weights, (unit.requires_grad_(),))
                step = Step(labels, exemplar, output, None, {}, learner.buffers, arrival=arrival, stage=index)
                values = objective(step, numbers.to(device))
                if not isinstance(values, Tensor) or values.shape != labels.shape:
                    raise EngramError(
                        f"the objective of sensitivity must return one value per image, a tensor of the shape "
                        f"({len(labels)},) here, but it returned {described(values)}; leave out the mean over images"
                    )
                if scale is not None:
                    totals["head.scale"] += _sum(_by_scale(values, scale), power)
                torch.autograd.grad(values.sum(), unit)
    if share.is_split:
        totals = {name: runtime.processes.sum(total) for name, total in totals.items()}
    return {name: total / len(rows) for name, total in totals.items()}


def _check(network: Network) -> None:
    """Refuse a network with layers that have no rule for gradients per image."""
    others = {type(m).__name__ for m in network.modules() if not _has_rule(m) and list(m.parameters(False))}
    others |= set(network.head.adjustments)
    if others:
        known = ", ".join(kind.__name__ for kind in MEASURES)
        raise EngramError(
            f"gradients of single images can be computed for {known}, but not for {', '.join(sorted(others))}; "
            "a method that uses sensitivity needs a network of only these layers"
        )


def _has_rule(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return False
    if isinstance(module, nn.BatchNorm2d) and module.running_mean is None:
        return False
    return type(module) in MEASURES


@torch.no_grad()
def check_layers(network: Network, size: tuple[int, int]) -> None:
    """Refuse a network of which `sensitivity` cannot be computed on images of that size, before it is trained.

    A layer that is called twice, or whose weights are used without a call, would get a wrong gradient.
    """
    _check(network)
    calls = {module: 0 for module in network.backbone.modules() if list(module.parameters(recurse=False))}

    def count(module: nn.Module, *_: object) -> None:
        calls[module] += 1

    handles = [module.register_forward_hook(count) for module in calls]
    assert not network.training
    try:
        network(torch.zeros(1, 3, *size, device=network.mean.device))
    finally:
        for handle in handles:
            handle.remove()
    wrong = next((name for name, module in network.named_modules() if calls.get(module, 1) != 1), None)
    if wrong is not None:
        raise EngramError(
            f"gradients of single images need a network that calls each layer once, but it calls {wrong} "
            f"{calls[network.get_submodule(wrong)]} times; choose another backbone, or a method that does not need them"
        )


@contextmanager
def _watched(network: Network, power: Literal[1, 2], totals: dict[str, Tensor]) -> Iterator[None]:
    """Inside this context, every backward pass adds the |gradient|^power of its images to the totals."""
    handles = []
    for prefix, module in network.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        measure = MEASURES[type(module)]

        def watch(
            module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, measure=measure, prefix: str = prefix
        ) -> None:
            def add(gradient: Tensor) -> None:
                for name, value in measure(module, inputs[0].detach(), gradient, partial(_sum, power=power)).items():
                    totals[f"{prefix}.{name}"] += value

            output.register_hook(add)  # now: the gradient is at the output before an in-place ReLU changes it

        handles.append(module.register_forward_hook(watch))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_scale(values: Tensor, scale: Tensor) -> Tensor:
    """The derivative (B,) of each value with respect to the scale, however the loss uses it.

    All images share this one parameter. The gradient of a weighted sum of the values is linear in the weights, and its
    derivative with respect to them is the result.
    """
    weights = torch.ones_like(values, requires_grad=True)
    (gradient,) = torch.autograd.grad((weights * values).sum(), scale, create_graph=True, allow_unused=True)
    return torch.zeros_like(values) if gradient is None else torch.autograd.grad(gradient, weights)[0]


def _sum(each: Tensor, power: Literal[1, 2]) -> Tensor:
    """The sum over the images (first dimension) of |values|^power."""
    return (each.square() if power == 2 else each.abs()).sum(dim=0)


Sum = Callable[[Tensor], Tensor]


def _of_convolution(conv: nn.Module, inputs: Tensor, gradient: Tensor, total: Sum) -> dict[str, Tensor]:
    assert isinstance(conv, nn.Conv2d)
    assert not isinstance(conv.padding, str)
    # The input of each weight of a filter at each pixel of the output: (B, C_in * taps, L).
    seen = F.unfold(inputs, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
    by_group = gradient.flatten(2).unflatten(1, (conv.groups, -1))
    each = by_group @ seen.unflatten(1, (conv.groups, -1)).transpose(2, 3)  # (B, groups, C_out, C_in * taps)
    return {"weight": total(each).view_as(conv.weight)} | _of_bias(conv.bias, gradient.sum(dim=(2, 3)), total)


def _of_bias(bias: Tensor | None, each: Tensor, total: Sum) -> dict[str, Tensor]:
    return {} if bias is None else {"bias": total(each)}


def _of_linear(linear: nn.Module, inputs: Tensor, gradient: Tensor, total: Sum) -> dict[str, Tensor]:
    assert isinstance(linear, nn.Linear)
    # The dimensions between the image and its values are tokens, say: (B, T, ...).
    gradient, inputs = (each.flatten(1, -2) if each.ndim > 2 else each[:, None] for each in (gradient, inputs))
    each = gradient.transpose(1, 2) @ inputs
    return {"weight": total(each)} | _of_bias(linear.bias, gradient.sum(dim=1), total)


def _of_layer_norm(norm: nn.Module, inputs: Tensor, gradient: Tensor, total: Sum) -> dict[str, Tensor]:
    assert isinstance(norm, nn.LayerNorm)
    normed = F.layer_norm(inputs, norm.normalized_shape, eps=norm.eps)
    between = tuple(range(1, inputs.ndim - len(norm.normalized_shape)))
    weights, shifts = (each.sum(dim=between) if between else each for each in (gradient * normed, gradient))
    return {"weight": total(weights)} | _of_bias(norm.bias, shifts, total)


def _of_norm(norm: nn.Module, inputs: Tensor, gradient: Tensor, total: Sum) -> dict[str, Tensor]:
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, factor = norm.running_mean, (norm.running_var + norm.eps).rsqrt()
    normed = (inputs - mean[:, None, None]) * factor[:, None, None]
    return {"weight": total((gradient * normed).sum(dim=(2, 3))), "bias": total(gradient.sum(dim=(2, 3)))}


def _of_linear_head(head: nn.Module, inputs: Tensor, gradient: Tensor, total: Sum) -> dict[str, Tensor]:
    assert isinstance(head, LinearHead)
    # An image's gradient is the outer product of its gradient at the scores (K,) and its embedding (D,).
    each = gradient[:, :, None] * inputs[:, None, :]
    return {"weight": total(each)} | ({} if head.bias is None else {"bias": total(gradient)})


def _of_cosine_head(head: nn.Module, inputs: Tensor, gradient: Tensor, total: Sum) -> dict[str, Tensor]:
    assert isinstance(head, CosineHead)
    _, each = _cosines(inputs, head.weight.detach()[:, None])
    return {"weight": total(gradient[:, :, None] * each[:, :, 0])}


def _of_lsc_head(head: nn.Module, inputs: Tensor, gradient: Tensor, total: Sum) -> dict[str, Tensor]:
    assert isinstance(head, LSCHead)
    cosine, each = _cosines(inputs, head.weight.detach())
    factor, offset = (2 * head.sharpness**2, 1) if head.similarity == "distance" else (head.sharpness**2, 0)
    similarity = factor * (cosine - offset)
    shares = similarity.softmax(dim=2)
    # The derivative of the mean of the similarities s, weighted by their softmax, is softmax * (1 + s - mean).
    slope = factor * shares * (1 + similarity - (shares * similarity).sum(dim=2, keepdim=True))  # (B, K, P)
    return {"weight": total((gradient[:, :, None] * slope)[..., None] * each)}


def _cosines(embedding: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines (B, K, P) of embeddings (B, D) and weights (K, P, D), and the derivatives (B, K, P, D) by weight."""
    length = weight.norm(dim=2, keepdim=True).clamp_min(1e-12)  # as in F.normalize
    unit, directions = F.normalize(embedding, dim=1), weight / length
    cosine = torch.einsum("bd,kpd->bkp", unit, directions)
    return cosine, (unit[:, None, None] - cosine[..., None] * directions) / length


MEASURES: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor, Sum], dict[str, Tensor]]] = {
    nn.Conv2d: _of_convolution,
    nn.BatchNorm2d: _of_norm,
    nn.Linear: _of_linear,
    nn.LayerNorm: _of_layer_norm,
    LinearHead: _of_linear_head,
    CosineHead: _of_cosine_head,
    LSCHead: _of_lsc_head,
}
