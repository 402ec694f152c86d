"""Samples and stages: labelled images, and what one arrival of new classes trains on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from engram.data.image_rows import Pixels, join_images, read_pixels

NEVER = 2**31  # the stage of a class that has not come yet


def content_ids(images: Tensor) -> Tensor:
    """An id (N,) of each image (N, H, W, 3) that depends only on its pixels; for images without a row of a data set."""
    digests = [hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images.numpy()]
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Samples:
    """N labelled images: what a stage trains on, or what the memory holds.

    images: uint8 (N, H, W, 3), a tensor or rows of a data set that stays where it is. labels: int64 (N,), positions in
    the class order. sources: int64 (N,), a stable id of each image: in a run its row in the training split, in a model
    `content_ids`. exemplar: bool (N,), true for images of the memory. state: tensors kept per image, by name, (N, ...).
    """

    images: Pixels
    labels: Tensor
    sources: Tensor
    exemplar: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert not isinstance(self.images, Tensor) or self.images.dtype == torch.uint8, self.images.dtype
        assert len(self.images.shape) == 4, tuple(self.images.shape)
        assert len(self.images) == len(self.labels) == len(self.sources) == len(self.exemplar)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Samples:
        state = {name: value[rows] for name, value in self.state.items()}
        return Samples(self.images[rows], self.labels[rows], self.sources[rows], self.exemplar[rows], state)

    @property
    def pixels(self) -> Tensor:
        """All images as a tensor."""
        return read_pixels(self.images)

    def rows_of(self, label: int) -> Tensor:
        """The rows that hold images of one class, in their order here."""
        return torch.nonzero(self.labels == label).squeeze(1)

    @staticmethod
    def concatenate(parts: Sequence[Samples]) -> Samples:
        """All parts, one after the other. State that a part does not have is zero."""
        names = {name: value for part in parts for name, value in part.state.items()}
        return Samples(
            join_images([part.images for part in parts]),
            torch.cat([part.labels for part in parts]),
            torch.cat([part.sources for part in parts]),
            torch.cat([part.exemplar for part in parts]),
            {
                name: torch.cat([part.state.get(name, like.new_zeros(len(part), *like.shape[1:])) for part in parts])
                for name, like in names.items()
            },
        )


@dataclass(frozen=True, eq=False)
class Stage:
    """One arrival of new classes.

    pool: the images of the new classes (and, in some streams, further images of old ones), then the exemplars of the
    old classes; phases name rows of it. sizes: the number of new classes of every stage up to this one.
    """

    index: int
    num_old: int
    num_new: int
    pool: Samples
    sizes: tuple[int, ...] = ()

    @property
    def is_base(self) -> bool:
        return self.index == 0

    @property
    def num_seen(self) -> int:
        """The number of classes seen, the new ones included."""
        return self.num_old + self.num_new

    @property
    def new_labels(self) -> range:
        return range(self.num_old, self.num_seen)

    @cached_property
    def returning_labels(self) -> list[int]:
        """The old classes of which new images came in this stage."""
        labels = self.pool.labels[~self.pool.exemplar]
        return labels[labels < self.num_old].unique().tolist()

    @cached_property
    def all_rows(self) -> Tensor:
        """Every row of the pool."""
        return torch.arange(len(self.pool))

    def arrival(self, capacity: int) -> Tensor:
        """int64 (capacity,): the stage that each label came with, NEVER for one that has not come."""
        arrival = torch.full((capacity,), NEVER)
        sizes = self.sizes or ((self.num_old, self.num_new) if self.num_old else (self.num_new,))
        first = self.index + 1 - len(sizes)
        seen = torch.repeat_interleave(torch.arange(first, self.index + 1), torch.tensor(sizes))
        arrival[: len(seen)] = seen
        return arrival

    def rows_of(self, label: int) -> Tensor:
        """The rows of the pool that hold images of one class."""
        return self.pool.rows_of(label)
