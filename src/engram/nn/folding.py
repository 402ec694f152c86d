"""Fold batch norms into the convolutions before them, for faster inference with a network that does not change."""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from engram.nn.backbone import Backbone

CLOSE = 1e-3  # allowed difference of an output, relative to its largest value


# The convolutions and norms of each backbone that can be folded, by name; found once, because it takes two passes.
_PAIRS: WeakKeyDictionary[Backbone, list[tuple[str, str]]] = WeakKeyDictionary()


@torch.no_grad()
def fold_norms(backbone: Backbone, image_size: tuple[int, int]) -> Backbone:
    """A copy of the backbone whose convolutions contain the norms that follow them, or the backbone if it has none.

    Which norm follows which convolution is found in a pass over one random image. If folding them changes the output
    for it, none is folded.
    """
    pairs = _PAIRS.get(backbone)
    if pairs is None:
        image = torch.randn(1, 3, *image_size, generator=torch.Generator().manual_seed(0))
        pairs, expected = _convolutions_before_norms(backbone, image)
        maps, embedding = _folded(backbone, pairs)(image)
        if not all(_is_close(*both) for both in zip((*maps, embedding), expected, strict=True)):
            pairs = []
        _PAIRS[backbone] = pairs
    return _folded(backbone, pairs) if pairs else backbone


def _folded(backbone: Backbone, pairs: list[tuple[str, str]]) -> Backbone:
    shared = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
    folded = copy.deepcopy(backbone, shared)  # with the same tensors
    for convolution, norm in pairs:
        conv, after = folded.get_submodule(convolution), folded.get_submodule(norm)
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(after, nn.BatchNorm2d)
        assert after.running_mean is not None
        assert after.running_var is not None
        weight, conv.bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, after.running_mean, after.running_var, after.eps, after.weight, after.bias
        )
        conv.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last), requires_grad=False)
        folded.set_submodule(norm, nn.Identity())
    return folded


def _is_fixed(module: nn.Module) -> bool:
    """Whether this is a norm with running statistics."""
    return isinstance(module, nn.BatchNorm2d) and module.running_mean is not None


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= CLOSE * expected.abs().max())


def _convolutions_before_norms(backbone: Backbone, image: Tensor) -> tuple[list[tuple[str, str]], tuple[Tensor, ...]]:
    """The names of convolutions and of the norms that read their output, and the backbone's output for the image."""
    made: dict[int, tuple[str, Tensor]] = {}  # by id; the tensor is kept, so that no other one gets its id
    pairs: list[tuple[str, str]] = []
    used: list[str] = []

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle | None:
        def after_convolution(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            used.append(name)
            made[id(output)] = (name, output)

        def before_norm(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            used.append(name)
            if id(inputs[0]) in made:
                pairs.append((made[id(inputs[0])][0], name))

        if isinstance(module, nn.Conv2d):
            return module.register_forward_hook(after_convolution)
        return module.register_forward_pre_hook(before_norm) if _is_fixed(module) else None

    handles = [watch(name, module) for name, module in backbone.named_modules()]
    maps, embedding = backbone(image)
    for handle in handles:
        if handle is not None:
            handle.remove()
    once = [pair for pair in pairs if all(used.count(name) == 1 for name in pair)]
    return once, (*maps, embedding)
