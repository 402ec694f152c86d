"""Network: backbone and head, from images in [0, 1] to maps, embedding and scores."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engram.nn.backbones import ResNet
from engram.nn.expanding import ExpandingBackbone, ExpandingHead, count_older
from engram.nn.factors import Factors
from engram.nn.heads import Head


class Part(enum.Flag):
    """The parts of a network that a phase may train."""

    BACKBONE = enum.auto()
    OLD_CLASSES = enum.auto()
    NEW_CLASSES = enum.auto()
    SCALE = enum.auto()
    CORRECTION = enum.auto()


class Output(NamedTuple):
    """What a network says of a batch.

    maps: one (B, C, H, W) per group. embedding: (B, D). scores: (B, K), minus infinity for classes not seen. logits:
    the scores as the loss sees them (times the learned scale, if any), masked in the same way. scale: that scale, ().
    correction: the head's factor and offset of the newest classes' scores, (2,), which are in the scores; None where it
    has none. auxiliary: the scores (B, K) of the head's second weights, not masked; None where it has none.
    """

    maps: tuple[Tensor, ...]
    embedding: Tensor
    scores: Tensor
    logits: Tensor
    scale: Tensor
    correction: Tensor | None = None
    auxiliary: Tensor | None = None


class Network(nn.Module):
    """A backbone, a head that grows, and the normalisation of the images they were trained on.

    factors: where there are any, the convolutions move by them alone. It is in eval mode but for `in_training`: whoever
    reads with it changes no mode, so that several threads may.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: ResNet, head: Head, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.factors: Factors | None = None
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))
        self.eval()

    @contextmanager
    def in_training(self, mode: bool = True) -> Iterator[None]:
        """A context in which it is in train mode (with False: in eval mode, as outside); not to be read with then."""
        self.train(mode)
        try:
            yield
        finally:
            self.eval()

    def forward(self, images: Tensor, train_backbone: bool = True) -> Output:
        normalised = (images - self.mean) / self.std
        with torch.set_grad_enabled(train_backbone and torch.is_grad_enabled()):
            maps, embedding = self.backbone(normalised)
        older = self.backbone.look_back(normalised) if isinstance(self.backbone, ExpandingBackbone) else None
        return self.classify(maps, embedding, older)

    def classify(self, maps: tuple[Tensor, ...], embedding: Tensor, older: Tensor | None = None) -> Output:
        """What the head says of the backbone's maps and embedding; older: what an expanding one's `look_back` has."""
        # The head is small and its softmaxes are sensitive: always in float32.
        with torch.autocast(embedding.device.type, enabled=False):
            embedding = embedding.float()
            features = embedding
            if self.head.rectified:
                features = maps[-1].relu().mean(dim=(2, 3), dtype=torch.float32)
            auxiliary = self.head.aside(features) if isinstance(self.head, ExpandingHead) else None
            if older is not None:
                features = torch.cat([older[int(self.head.rectified)], features], dim=1)
                embedding = torch.cat([older[0], embedding], dim=1)
            scores = self.head(features)
            if self.head.effect is not None and not self.training:
                scores = scores - self.head.effect(features, self.head)
            # Masked after scaling: the gradient of the scale must not see infinity times zero.
            scale, unseen = self.head.scale, ~self.head.seen
            logits = None if scale is None else (scale * scores).masked_fill(unseen, -torch.inf)
            scores = scores.masked_fill(unseen, -torch.inf)
            if scale is None or logits is None:
                scale, logits = scores.new_ones(()), scores
        return Output(maps, embedding, scores, logits, scale, self.head.correction, auxiliary)

    def make_room(self, state: Mapping[str, Tensor]) -> None:
        """Brings the network to the size of a saved state, which can be loaded then; with factors where that has them.

        Tensors that do not fit are new then: whoever holds the old ones binds again.
        """
        self.head.reserve(len(state["head.seen"]))
        if not any(name.startswith("factors.") for name in state):
            self.factors = None
        elif self.factors is None:
            self.add_factors()
        if isinstance(self.backbone, ExpandingBackbone):
            prefix = "backbone."
            self.backbone.resize(count_older(name.removeprefix(prefix) for name in state if name.startswith(prefix)))
            if isinstance(self.head, ExpandingHead):
                self.head.widen(self.backbone.dim)

    def add_factors(self) -> None:
        """From here on the convolutions keep their weights, times factors that learn."""
        self.factors = Factors(self.backbone)

    def reset(self, generator: torch.Generator) -> None:
        """Fresh weights for the backbone and for the rows of the classes seen."""
        self.factors = None
        self.backbone.initialise(generator)
        self.head.initialise(generator)

    def trainable(self, parts: Part, num_old: int) -> dict[str, Tensor]:
        """For each parameter, 1 where a phase that trains these parts may change it and 0 elsewhere."""
        masks: dict[str, Tensor] = {}
        rows_by_name = {f"head.{name}" for name in self.head.class_parameters}
        for name, parameter in self.named_parameters():
            mask = torch.zeros_like(parameter)
            if name in rows_by_name:
                mask[:num_old] = float(Part.OLD_CLASSES in parts)
                mask[num_old : self.head.num_classes] = float(Part.NEW_CLASSES in parts)
            elif name == "head.correction":
                mask.fill_(float(Part.CORRECTION in parts))
            elif name.startswith("head."):
                mask.fill_(float(Part.SCALE in parts))
            elif parameter.ndim == 4 and self.factors is not None:
                pass  # a convolution, which moves by its factors
            else:
                mask.fill_(float(Part.BACKBONE in parts))
            masks[name] = mask
        return masks
