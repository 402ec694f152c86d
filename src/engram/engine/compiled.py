"""Passes by torch's modules that torch compiles: residual backbones on large images, which our kernels do not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engram.contract.learner import Learner
from engram.engine.forward import LARGE_PIXELS, Compute, Forward
from engram.kernels.availability import reason_unavailable
from engram.nn.backbone import Backbone
from engram.nn.network import Network, Output
from engram.nn.resnet import ResNet

COMPILED_FORMS = 64  # the most: groups, batch sizes, with and without gradient, in train and eval mode

BackbonePass = Callable[[Tensor], tuple[tuple[Tensor, ...], Tensor]]


def why_not_compiled(compute: Compute, backbone: Backbone) -> str | None:
    """Why torch does not compile the passes of this backbone; None if it does."""
    if type(backbone) is not ResNet:
        return "only engram's residual backbones are compiled"
    if compute.image_size[0] * compute.image_size[1] < LARGE_PIXELS:
        return "compiling takes longer than it saves on small images"
    return reason_unavailable(compute.device)


class CompiledForward(Forward):
    """Passes whose norms, ReLUs and sums torch compiles into few kernels; convolutions stay those of cuDNN.

    Only full batches are compiled: partial ones have another size in every stage.

    own_stem: in bf16, a stem with max pooling is our kernel (`kernels/pooled_stem.py`): 26 % more images a second than
    with torch's, 21 % with a teacher (docs/scale.md).
    """

    own_stem = True

    def __init__(self, compute: Compute, learner: Learner, batch_size: int) -> None:
        super().__init__(compute, learner, batch_size)
        # Compiling makes the nodes that add up gradients, on another stream than the one that a step is recorded on.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        own_stem = self.own_stem and compute.precision == "bf16"
        self._student, self._teacher = (_compiled(each, own_stem) for each in (learner.network, learner.teacher))

    def student(self, images: Tensor, train_backbone: bool) -> Output:
        with self._compute.autocast():
            return self._learner.network(images, train_backbone, self._chosen(self._student, images))

    def teacher(self, images: Tensor) -> Output:
        with torch.no_grad(), self._compute.autocast():
            return self._learner.teacher(images, run_backbone=self._chosen(self._teacher, images))

    def _chosen(self, compiled: BackbonePass, images: Tensor) -> BackbonePass | None:
        return compiled if len(images) == self.full_batch else None


def _compiled(network: Network, own_stem: bool) -> BackbonePass:
    """The pass of the network's backbone, compiled group by group: losses need gradients at the maps between them."""
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_FORMS)
    backbone = network.backbone
    assert isinstance(backbone, ResNet)
    # deterministic: torch would otherwise choose between kernels, and so between orders of sums, by timing them.
    how: dict[str, Any] = {"fullgraph": True, "dynamic": False, "options": {"deterministic": True}}
    groups = [torch.compile(partial(backbone.group_pass, number), **how) for number in range(len(backbone.groups))]
    if own_stem and backbone.pooled[0]:
        from engram.kernels.pooled_stem import CHANNELS, pooled_stem

        if backbone.conv.out_channels in CHANNELS:
            blocks = torch.compile(backbone.groups[0], **how)
            groups[0] = lambda x: blocks(pooled_stem(x, backbone.conv, backbone.bn))

    def run(x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        maps: list[Tensor] = []
        for group in groups:
            x = group(x)
            maps.append(x)
        return tuple(maps), x.mean(dim=(2, 3))

    return run
