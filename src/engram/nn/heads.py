"""Heads: embeddings to class scores, with room for classes to come.

A head is made with a capacity and a mask of the classes seen, so its shapes stay the same when it grows and a captured
step stays valid. `grow` opens the next rows; the scores of the classes before do not change.

Legend: B batch, D embedding, K capacity in classes, P proxies a class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.kernels import availability as kernels
from engram.nn.effect import MomentumEffect

Similarity = Literal["distance", "cosine"]


class Head(nn.Module, ABC):
    """What all heads share: the rows in use, their growth, and the scale that the loss sees the scores through.

    `class_parameters` names the parameters whose first dimension is the class, and `class_buffers` such buffers, with
    what they hold where there is no class; everything else in the head (the scale) belongs to no class. `rectified`: it
    takes the mean of the last map's positive part for its embedding. `effect`: what the network takes from the scores
    when it does not train, None for nothing.
    """

    class_parameters: tuple[str, ...] = ("weight",)
    class_buffers: Mapping[str, float] = {"seen": 0}
    rectified = False
    seen: Tensor

    def __init__(self, capacity: int, learned_scale: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(capacity, dtype=torch.bool))
        self.scale = nn.Parameter(torch.ones(())) if learned_scale else None
        self.correction: nn.Parameter | None = None
        self.effect: MomentumEffect | None = None

    @property
    def capacity(self) -> int:
        """The classes the head has room for."""
        return len(self.seen)

    @property
    def num_classes(self) -> int:
        """The classes seen so far; a host read, not for use inside a step."""
        return int(self.seen.sum())

    def grow(self, count: int, generator: torch.Generator) -> range:
        """Opens the next `count` rows with random values; returns their labels."""
        first = self.num_classes
        labels = range(first, first + count)
        if labels.stop > self.capacity:
            self.reserve(labels.stop)
        self._randomise(labels, generator)
        self.seen[labels.start : labels.stop] = True
        return labels

    def initialise(self, generator: torch.Generator) -> None:
        """Random values for all rows in use, and a scale of 1."""
        self._randomise(range(self.num_classes), generator)
        if self.scale is not None:
            nn.init.ones_(self.scale)

    def _randomise(self, labels: range, generator: torch.Generator) -> None:
        with torch.no_grad():
            for name in self.class_parameters:
                rows = self.get_parameter(name)[labels.start : labels.stop]
                rows.copy_(self._fresh(name, tuple(rows.shape), generator))

    def reserve(self, capacity: int) -> None:
        """Makes room for so many classes in all. The tensors are new then: whoever holds the old ones binds again."""
        if capacity <= self.capacity:
            return
        for name in self.class_parameters:
            old = self.get_parameter(name)
            room = torch.zeros(capacity, *old.shape[1:], dtype=old.dtype, device=old.device)
            room[: len(old)] = old.detach()
            setattr(self, name, nn.Parameter(room, requires_grad=old.requires_grad))
        for name, empty in self.class_buffers.items():
            held = self.get_buffer(name)
            grown = torch.full((capacity,), empty, dtype=held.dtype, device=held.device)
            grown[: len(held)] = held
            setattr(self, name, grown)

    @torch.no_grad()
    def drop(self, labels: Collection[int]) -> None:
        """Forgets these classes: the rows after them move up, in place, and the room is free again at the end."""
        gone = set(labels)
        assert all(0 <= label < self.num_classes for label in gone), gone
        kept = [row for row in range(self.capacity) if row not in gone]
        for name, empty in (*((name, 0) for name in self.class_parameters), *self.class_buffers.items()):
            rows = self.get_parameter(name) if name in self.class_parameters else self.get_buffer(name)
            moved = rows[kept]  # a copy
            rows.fill_(empty)
            rows[: len(kept)] = moved

    def _fresh(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Values for rows of a class parameter to begin with.

        Random ones, with the variance of a last layer, which no rectification follows: scores of features of length 1
        have it too.
        """
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    @abstractmethod
    def forward(self, embedding: Tensor) -> Tensor:
        """Scores (B, K) of every row, seen or not."""


class LSCHead(Head):
    """Local similarity classifier: a class's score is the softmax-weighted mean of its P proxies' similarities.

    With unit embedding f and unit proxy w, similarity "distance" is 2 a^2 (cos - 1), as in the released code;
    "cosine" is a^2 cos, as in the paper (eq. podnet_local_similarity). The order of the classes is nearly the same,
    the temperature is not.
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
        """The proxies of a class."""
        return self.weight.shape[1]

    def forward(self, embedding: Tensor) -> Tensor:
        factor = self.sharpness**2
        if kernels.is_available_for(embedding):
            from engram.kernels.proxies import fits, proxy_scores

            if fits(*self.weight.shape[1:]):
                how = (2 * factor, 1.0) if self.similarity == "distance" else (factor, 0.0)
                return proxy_scores(embedding, self.weight, *how)
        unit, proxies = F.normalize(embedding, dim=1), F.normalize(self.weight, dim=2)
        cosine = (unit @ proxies.flatten(0, 1).T).unflatten(1, self.weight.shape[:2])  # (B, K, P)
        similarity = 2 * factor * (cosine - 1) if self.similarity == "distance" else factor * cosine
        return (similarity.softmax(dim=2) * similarity).sum(dim=2)


class CosineHead(Head):
    """One weight a class; the score is its cosine with the embedding, and the loss sees it through a learned scale."""

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(capacity, learned_scale=True)
        self.weight = nn.Parameter(torch.zeros(capacity, dim))

    def forward(self, embedding: Tensor) -> Tensor:
        return F.normalize(embedding, dim=1) @ F.normalize(self.weight, dim=1).T


class LinearHead(Head):
    """A weight and a bias a class.

    corrected: with an affine correction (factor, offset) of the scores of the classes in `corrected`; it is (1, 0) for
    none of them at first.
    """

    class_parameters = ("weight", "bias")
    rectified = True
    corrected: Tensor

    def __init__(self, dim: int, capacity: int, bias: bool = True, corrected: bool = False) -> None:
        super().__init__(capacity, learned_scale=False)
        self.correction = nn.Parameter(torch.tensor([1.0, 0.0])) if corrected else None
        if corrected:
            self.register_buffer("corrected", torch.zeros(capacity, dtype=torch.bool))
            self.class_buffers = {"seen": 0, "corrected": 0}
        self.weight = nn.Parameter(torch.zeros(capacity, dim))
        if bias:
            self.bias = nn.Parameter(torch.zeros(capacity))
        else:
            self.bias = None
            self.class_parameters = ("weight",)

    def _fresh(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.zeros(shape) if name == "bias" else super()._fresh(name, shape, generator)

    def correct(self, labels: range) -> None:
        """Starts a new correction, of these classes alone."""
        assert self.correction is not None
        with torch.no_grad():
            self.correction.copy_(torch.tensor([1.0, 0.0]))
            self.corrected.zero_()
            self.corrected[labels.start : labels.stop] = True

    def forward(self, embedding: Tensor) -> Tensor:
        scores = F.linear(embedding, self.weight, self.bias)
        if self.correction is None:
            return scores
        factor, offset = self.correction
        return torch.where(self.corrected, factor * scores + offset, scores)


class NormalisedHead(Head):
    """A weight a class, and a batch norm over the scores: each class's have mean 0 and variance 1 in a batch.

    gain, shift: what the norm does after that. mean, variance: the running ones, for evaluation.
    """

    class_parameters = ("weight", "gain", "shift")
    class_buffers: Mapping[str, float] = {"seen": 0, "mean": 0, "variance": 1}
    rectified = True
    mean: Tensor
    variance: Tensor

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(capacity, learned_scale=False)
        self.weight = nn.Parameter(torch.zeros(capacity, dim))
        self.gain = nn.Parameter(torch.zeros(capacity))
        self.shift = nn.Parameter(torch.zeros(capacity))
        self.register_buffer("mean", torch.zeros(capacity))
        self.register_buffer("variance", torch.ones(capacity))

    def _fresh(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return super()._fresh(name, shape, generator) if name == "weight" else torch.full(shape, float(name == "gain"))

    def _randomise(self, labels: range, generator: torch.Generator) -> None:
        super()._randomise(labels, generator)
        self.mean[labels.start : labels.stop] = 0
        self.variance[labels.start : labels.stop] = 1

    def forward(self, embedding: Tensor) -> Tensor:
        scores = F.linear(embedding, self.weight)
        # One sample has no variance: it is taken by the running ones.
        by_batch = self.training and len(scores) > 1
        return F.batch_norm(scores, self.mean, self.variance, self.gain, self.shift, training=by_batch)
