"""Network: backbone and head, from images in [0, 1] to maps, embedding and scores."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engram.models.heads import Head
from engram.models.resnet import ResNet


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
    has none.
    """

    maps: tuple[Tensor, ...]
    embedding: Tensor
    scores: Tensor
    logits: Tensor
    scale: Tensor
    correction: Tensor | None = None


class Network(nn.Module):
    """A backbone, a head that grows, and the normalisation of the images they were trained on."""

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: ResNet, head: Head, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))

    def forward(self, images: Tensor, train_backbone: bool = True) -> Output:
        with torch.set_grad_enabled(train_backbone and torch.is_grad_enabled()):
            maps, embedding = self.backbone((images - self.mean) / self.std)
        return self.classify(maps, embedding)

    def classify(self, maps: tuple[Tensor, ...], embedding: Tensor) -> Output:
        """What the head says of the backbone's maps and embedding."""
        # The head is small and its softmaxes are sensitive: always in float32.
        with torch.autocast(embedding.device.type, enabled=False):
            embedding = embedding.float()
            given = maps[-1].float().relu().mean(dim=(2, 3)) if self.head.rectified else embedding
            scores = self.head(given)
            if self.head.effect is not None and not self.training:
                scores = scores - self.head.effect(given, self.head)
            # Masked after scaling: the gradient of the scale must not see infinity times zero.
            scale = scores.new_ones(()) if self.head.scale is None else self.head.scale
            logits = (scale * scores).masked_fill(~self.head.seen, -torch.inf)
            scores = scores.masked_fill(~self.head.seen, -torch.inf)
        return Output(maps, embedding, scores, logits, scale, self.head.correction)

    def reset(self, generator: torch.Generator) -> None:
        """Fresh weights for the backbone and for the rows of the classes seen."""
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
            else:
                mask.fill_(float(Part.BACKBONE in parts))
            masks[name] = mask
        return masks
