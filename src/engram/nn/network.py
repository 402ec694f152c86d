"""Network: backbone and head, from images in [0, 1] to feature maps, embedding and scores."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engram.nn.backbone import Backbone
from engram.nn.heads import Head
from engram.nn.views import PLAIN, View, seen_as

_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Part(enum.Flag):
    """The parts of a network that a phase may train. HEAD_SHARED: head parameters of no class, such as the scale."""

    BACKBONE = enum.auto()
    OLD_CLASSES = enum.auto()
    NEW_CLASSES = enum.auto()
    HEAD_SHARED = enum.auto()


class Output(NamedTuple):
    """Output of a network for a batch.

    maps: (B, C, H, W), those of the backbone. embedding: (B, D). scores: (B, K), minus infinity for classes not
    seen yet. logits: the scores as the loss sees them (times the learned scale, if there is one), masked the same way.
    scale: that scale, (). features: (B, D'), exactly what the head sees. extras: further tensors that the head returns
    (`Head.extra_outputs`), by name.
    """

    maps: tuple[Tensor, ...]
    embedding: Tensor
    scores: Tensor
    logits: Tensor
    scale: Tensor
    features: Tensor | None = None
    extras: Mapping[str, Tensor] = _NOTHING


class Network(nn.Module):
    """A backbone, a head that grows, and the normalisation of the images they were trained on.

    A network is in train mode only inside `in_training`. Reading changes no mode, so several threads may read at once.
    A method that needs more overrides `part_of`, `resize_for_state` or `reset` (`Method.network`).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))
        self.eval()

    @property
    def views(self) -> tuple[View, ...]:
        """The views that predictions are averaged over (`averaged`); the first is the image as it is."""
        return (PLAIN,)

    @contextmanager
    def in_training(self, mode: bool = True) -> Iterator[None]:
        """Put the network in train mode (or, with False, leave it in eval mode) inside this context."""
        self.train(mode)
        try:
            yield
        finally:
            self.eval()

    def normalised(self, images: Tensor) -> Tensor:
        """Images in [0, 1] as the backbone expects them."""
        return (images - self.mean) / self.std

    def forward(
        self,
        images: Tensor,
        train_backbone: bool = True,
        run_backbone: Callable[[Tensor], tuple[tuple[Tensor, ...], Tensor]] | None = None,
    ) -> Output:
        """Output for images in [0, 1]. run_backbone: what computes the pass of the backbone instead of its modules."""
        normalised = self.normalised(images)
        with torch.set_grad_enabled(train_backbone and torch.is_grad_enabled()):
            maps, embedding = (run_backbone or self.backbone)(normalised)
        return self.classify(maps, embedding, self.backbone.branch_embeddings(normalised))

    def classify(self, maps: tuple[Tensor, ...], embedding: Tensor, branches: Tensor | None = None) -> Output:
        """Apply the head to the backbone's maps and embedding. branches: as `branch_embeddings` returns them."""
        # The head is small and its softmaxes are sensitive: always in float32.
        with torch.autocast(embedding.device.type, enabled=False):
            features = self.head.input_features(embedding, maps, self.backbone.ends_in_relu)
            embedding = embedding.float()
            extras = self.head.extra_outputs(features)
            if branches is not None:
                features = torch.cat([branches[int(self.head.rectified)], features], dim=1)
                embedding = torch.cat([branches[0], embedding], dim=1)
            scores, logits, scale = self.score(features)
        return Output(maps, embedding, scores, logits, scale, features, extras)

    def score(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, logits and scale (as in Output) of features that are as the head sees them, in float32."""
        scores = self.head(features)
        if not self.training:
            scores = self.head.adjust_scores(scores, features)
        # Masked after scaling: the gradient of the scale must not see infinity times zero.
        scale, unseen = self.head.scale, ~self.head.seen
        logits = None if scale is None else (scale * scores).masked_fill(unseen, -torch.inf)
        scores = scores.masked_fill(unseen, -torch.inf)
        if scale is None or logits is None:
            return scores, scores, scores.new_ones(())
        return scores, logits, scale

    def resize_for_state(self, state: Mapping[str, Tensor]) -> None:
        """Resize the network to a saved state, so that it can be loaded.

        Tensors that do not fit are replaced: users of the old ones must bind again.
        """
        prefix = "backbone."
        self.backbone.resize(
            self.backbone.count_branches(name.removeprefix(prefix) for name in state if name.startswith(prefix))
        )
        self.head.reserve(len(state["head.seen"]))
        self.head.widen(self.backbone.dim)
        own = {name.removeprefix("head."): value for name, value in state.items() if name.startswith("head.")}
        self.head.prepare_for_state(own)

    def reset(self, generator: torch.Generator) -> None:
        """Set the backbone and the rows of the classes seen to the weights that they start from."""
        self.backbone.restart(generator)
        self.head.initialise(generator)

    def part_of(self, name: str, parameter: Tensor) -> Part | None:
        """The part that a parameter belongs to, unless it has one row per class; None: no phase trains it."""
        return Part.HEAD_SHARED if name.startswith("head.") else Part.BACKBONE

    def trainable(self, parts: Part, num_old: int) -> dict[str, Tensor]:
        """For each parameter, 1 where a phase that trains these parts may change it and 0 elsewhere."""
        masks: dict[str, Tensor] = {}
        rows_by_name = {f"head.{name}" for name in self.head.class_parameters}
        for name, parameter in self.named_parameters():
            mask = torch.zeros_like(parameter)
            if name in rows_by_name:
                mask[:num_old] = float(Part.OLD_CLASSES in parts)
                mask[num_old : self.head.num_classes] = float(Part.NEW_CLASSES in parts)
            else:
                part = self.part_of(name, parameter)
                mask.fill_(float(part is not None and part in parts))
            masks[name] = mask
        return masks


def averaged(network: Network, forward: Callable[[Tensor], Output], images: Tensor) -> Output:
    """The output for images (N, 3, H, W), with features that are averaged over the network's views, and their scores.

    forward: a pass of the network.
    """
    output = forward(images)
    others = [forward(seen_as(images, view)).features for view in network.views[1:]]
    if not others or output.features is None:
        return output
    total = output.features
    for features in others:
        assert features is not None
        total = total + features
    features = total / len(network.views)
    scores, logits, scale = network.score(features)
    return output._replace(features=features, scores=scores, logits=logits, scale=scale)
