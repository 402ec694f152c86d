"""Samples: labelled images that a stage can train on, wherever they came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Samples:
    """N labelled images: what a stage trains on, or what the memory holds.

    images: uint8 (N, H, W, 3). labels: int64 (N,), positions in the class order. sources: int64 (N,), the row of
    each image in the training split it came from. exemplar: bool (N,), true for images out of the memory.
    """

    images: Tensor
    labels: Tensor
    sources: Tensor
    exemplar: Tensor

    def __post_init__(self) -> None:
        assert self.images.dtype == torch.uint8, self.images.dtype
        assert self.images.ndim == 4, tuple(self.images.shape)
        assert len(self.images) == len(self.labels) == len(self.sources) == len(self.exemplar)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Samples:
        return Samples(self.images[rows], self.labels[rows], self.sources[rows], self.exemplar[rows])

    def rows_of(self, label: int) -> Tensor:
        """The rows that hold images of one class, in their order here."""
        return torch.nonzero(self.labels == label).squeeze(1)

    @staticmethod
    def concatenate(parts: list[Samples]) -> Samples:
        """All the parts, one after the other."""
        return Samples(
            torch.cat([part.images for part in parts]),
            torch.cat([part.labels for part in parts]),
            torch.cat([part.sources for part in parts]),
            torch.cat([part.exemplar for part in parts]),
        )
