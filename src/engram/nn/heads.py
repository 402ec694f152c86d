"""Heads: embeddings to class scores, with unused rows for future classes.

A head has a capacity and a mask of the classes seen, so its shapes stay the same when it grows and a recorded step
stays valid. `grow` opens the next rows; the scores of earlier classes do not change.

Legend: B batch, D embedding, K capacity in classes, P proxies per class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.kernels.availability import is_available_for

Similarity = Literal["distance", "cosine"]


class Head(nn.Module, ABC):
    """Base class of heads: rows in use, growth, and the scale of the scores in the loss.

    class_parameters: names of the parameters whose first dimension is the class. class_buffers: the same for buffers,
    with the value of an unused row. Both grow with the head. Other parameters (the scale) belong to no class.
    rectified: the input of the head (`input_features`) is the mean of the last map's positive part instead of the
    embedding, if the backbone ends in a ReLU (`Backbone.ends_in_relu`).
    """

    class_parameters: tuple[str, ...] = ("weight",)
    class_buffers: Mapping[str, float] = {"seen": 0}
    rectified = False
    seen: Tensor

    def __init__(self, capacity: int, learned_scale: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(capacity, dtype=torch.bool))
        self.scale = nn.Parameter(torch.ones(())) if learned_scale else None
        self.adjustments: list[str] = []  # names of submodules

    def add_adjustment(self, name: str, module: nn.Module) -> None:
        """Add a submodule that changes the scores of predictions, not of training: scores - module(features, head)."""
        self.add_module(name, module)
        self.adjustments.append(name)

    def adjust_scores(self, scores: Tensor, features: Tensor) -> Tensor:
        """The scores (B, K) of a prediction, after every adjustment."""
        for name in self.adjustments:
            scores = scores - self.get_submodule(name)(features, self)
        return scores

    def extra_outputs(self, features: Tensor) -> Mapping[str, Tensor]:
        """Further tensors for the loss, by name (`Output.extras`). features: (B, D), of the backbone that trains."""
        return {}

    def widen(self, dim: int) -> None:
        """Set the size of the features; only a head for backbones with branches can change it."""

    def prepare_for_state(self, state: Mapping[str, Tensor]) -> None:
        """Make the tensors that a saved state of the head has; only for a head that changes them."""

    def input_features(self, embedding: Tensor, maps: Sequence[Tensor], ends_in_relu: bool) -> Tensor:
        """The head's input (B, D) in float32, from the embedding and the maps of the backbone, before their ReLU.

        ends_in_relu: as in `Backbone`.
        """
        if not (self.rectified and ends_in_relu):
            return embedding.float()
        return maps[-1].relu().mean(dim=(2, 3), dtype=torch.float32)

    @property
    def capacity(self) -> int:
        """The number of classes the head can hold."""
        return len(self.seen)

    @property
    def num_classes(self) -> int:
        """The number of classes seen so far. Reads from the device: not for use inside a step."""
        return int(self.seen.sum())

    def grow(self, count: int, generator: torch.Generator) -> range:
        """Open the next `count` rows with random values and return their labels."""
        first = self.num_classes
        labels = range(first, first + count)
        if labels.stop > self.capacity:
            self.reserve(labels.stop)
        self._randomise(labels, generator)
        self.seen[labels.start : labels.stop] = True
        return labels

    def initialise(self, generator: torch.Generator) -> None:
        """Set all rows in use to random values and the scale to 1."""
        self._randomise(range(self.num_classes), generator)
        if self.scale is not None:
            nn.init.ones_(self.scale)

    def _randomise(self, labels: range, generator: torch.Generator) -> None:
        with torch.no_grad():
            for name in self.class_parameters:
                rows = self.get_parameter(name)[labels.start : labels.stop]
                rows.copy_(self._initial_rows(name, tuple(rows.shape), generator))

    def reserve(self, capacity: int) -> None:
        """Increase the capacity. This replaces the tensors: users of the old ones must bind again."""
        if capacity <= self.capacity:
            return
        for name in self.class_parameters:
            old = self.get_parameter(name)
            larger = torch.zeros(capacity, *old.shape[1:], dtype=old.dtype, device=old.device)
            larger[: len(old)] = old.detach()
            setattr(self, name, nn.Parameter(larger, requires_grad=old.requires_grad))
        for name, empty in self.class_buffers.items():
            held = self.get_buffer(name)
            grown = torch.full((capacity, *held.shape[1:]), empty, dtype=held.dtype, device=held.device)
            grown[: len(held)] = held
            setattr(self, name, grown)

    @torch.no_grad()
    def drop(self, labels: Collection[int]) -> None:
        """Remove these classes: the rows after them move up, in place; unused rows are at the end."""
        gone = set(labels)
        assert all(0 <= label < self.num_classes for label in gone), gone
        kept = [row for row in range(self.capacity) if row not in gone]
        for name, empty in (*((name, 0) for name in self.class_parameters), *self.class_buffers.items()):
            rows = self.get_parameter(name) if name in self.class_parameters else self.get_buffer(name)
            moved = rows[kept]  # a copy
            rows.fill_(empty)
            rows[: len(kept)] = moved

    def _initial_rows(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Initial values for rows of a class parameter.

        Random, with the variance of a last layer that no ReLU follows; scores of features of length 1 have it too.
        """
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """Scores (B, K) of features (B, D), for all rows, in use or not."""


class LSCHead(Head):
    """Local similarity classifier: a class's score is the softmax-weighted mean of its P proxies' similarities.

    With unit embedding f and unit proxy w, similarity "distance" is 2 a^2 (cos - 1), as in the released code;
    "cosine" is a^2 cos, as in Eq. (17) of the AFC paper. The order of the classes is nearly the same, but the
    temperature is not.
    """

    def __init__(
        self,
        dim: int,
        capacity: int,
        proxies: int = 10,
        sharpness: float = 1.0,
        similarity: Similarity = "distance",
        learned_scale: bool = True,
    ) -> None:
        super().__init__(capacity, learned_scale)
        self.weight = nn.Parameter(torch.zeros(capacity, proxies, dim))
        self.sharpness = sharpness
        self.similarity = similarity

    @property
    def proxies(self) -> int:
        """The number of proxies per class."""
        return self.weight.shape[1]

    def forward(self, features: Tensor) -> Tensor:
        factor = self.sharpness**2
        if is_available_for(features):
            from engram.kernels.proxies import fits, proxy_scores

            if fits(*self.weight.shape[1:]):
                scale, shift = (2 * factor, 1.0) if self.similarity == "distance" else (factor, 0.0)
                return proxy_scores(features, self.weight, scale, shift)
        unit, proxies = F.normalize(features, dim=1), F.normalize(self.weight, dim=2)
        cosine = (unit @ proxies.flatten(0, 1).T).unflatten(1, self.weight.shape[:2])  # (B, K, P)
        similarity = 2 * factor * (cosine - 1) if self.similarity == "distance" else factor * cosine
        return (similarity.softmax(dim=2) * similarity).sum(dim=2)


class CosineHead(Head):
    """One weight per class. The score is its cosine with the embedding; the loss sees it times a learned scale."""

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(capacity, learned_scale=True)
        self.weight = nn.Parameter(torch.zeros(capacity, dim))

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=1) @ F.normalize(self.weight, dim=1).T


class LinearHead(Head):
    """A weight and, unless bias is False, a bias per class."""

    class_parameters = ("weight", "bias")
    rectified = True

    def __init__(self, dim: int, capacity: int, bias: bool = True) -> None:
        super().__init__(capacity, learned_scale=False)
        self.weight = nn.Parameter(torch.zeros(capacity, dim))
        if bias:
            self.bias = nn.Parameter(torch.zeros(capacity))
        else:
            self.bias = None
            self.class_parameters = ("weight",)

    def _initial_rows(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.zeros(shape) if name == "bias" else super()._initial_rows(name, shape, generator)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)
