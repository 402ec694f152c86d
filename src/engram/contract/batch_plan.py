"""BatchPlan: which images each step sees, how they are augmented, and the learning rate, as tensors.

A step reads its row of the plan through a counter on the device, so it is the same sequence of operations every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.data.augment import Draws


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Plan of S steps with B images each. rows: int64 (S, B) into the pool. draws: (S, B). lr: (S,).

    places: int64 (S, B), where the images are on the device if they are streamed; None: the pool's rows are there.
    crops: float32 (S, B, numbers) on the CPU, if random crops come from photographs; None: they are made on the device.
    """

    rows: Tensor
    draws: Draws
    lr: Tensor
    places: Tensor | None = None
    crops: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def allocate(cls, steps: int, batch_size: int, device: torch.device, numbers: int = 0) -> BatchPlan:
        """A plan to load others into, of up to that many steps. numbers: `Augmentation.numbers`."""
        shape = (steps, batch_size)
        draws = Draws(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            torch.zeros(shape, device=device),
            torch.zeros(*shape, numbers, device=device) if numbers else None,
        )
        return cls(torch.zeros(shape, dtype=torch.int64, device=device), draws, torch.zeros(steps, device=device))

    @property
    def image_places(self) -> Tensor:
        """int64 (S, B): where the images are on the device."""
        return self.rows if self.places is None else self.places

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the plan: rows, learning rates, and those of the draws."""
        return self.rows, self.lr, *self.draws.tensors()

    def load(self, other: BatchPlan) -> None:
        """Copy another plan of no more steps, in place, without waiting for the device."""
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            copy_ahead(own, new)

    def row(self, at: Tensor, size: int) -> tuple[Tensor, Draws]:
        """The places of the images (size,) and the draws of the step that the counter (1,) is at."""
        draws = Draws(*(plan.index_select(0, at)[0, :size] for plan in self.draws.tensors()))
        return self.image_places.index_select(0, at)[0, :size], draws

    def part(self, at: Tensor, own: slice) -> BatchPlan:
        """The step that the counter (1,) is at, as a plan of this one step, with these images of the batch."""
        draws = Draws(*(plan.index_select(0, at)[:, own] for plan in self.draws.tensors()))
        rows, lr = self.rows.index_select(0, at)[:, own], self.lr.index_select(0, at)
        places = None if self.places is None else self.places.index_select(0, at)[:, own]
        return BatchPlan(rows, draws, lr, places)

    def learning_rate(self, at: Tensor) -> Tensor:
        """The learning rate (1,) of the step that the counter (1,) is at."""
        return self.lr.index_select(0, at)


def copy_ahead(target: Tensor, source: Tensor) -> None:
    """Copy a CPU tensor into the first rows of another tensor; to a GPU without waiting for it."""
    source = source.pin_memory() if target.is_cuda else source
    target[: len(source)].copy_(source, non_blocking=True)
