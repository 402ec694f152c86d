"""Stage: what one arrival of new classes trains on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engram.data.samples import Samples

NEVER = 2**31


@dataclass(frozen=True, eq=False)
class Stage:
    """One arrival of new classes.

    pool: the images of the new classes, then the exemplars of the old ones. Phases name rows of it. sizes: the new
    classes of every stage up to this one.
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
        """The classes seen, the new ones included."""
        return self.num_old + self.num_new

    @property
    def new_labels(self) -> range:
        return range(self.num_old, self.num_seen)

    @cached_property
    def all_rows(self) -> Tensor:
        """Every row of the pool."""
        return torch.arange(len(self.pool))

    def arrival(self, capacity: int) -> Tensor:
        """int64 (capacity,): the stage that each label came with, NEVER where it has not come."""
        arrival = torch.full((capacity,), NEVER)
        sizes = self.sizes or ((self.num_old, self.num_new) if self.num_old else (self.num_new,))
        first = self.index + 1 - len(sizes)
        seen = torch.repeat_interleave(torch.arange(first, self.index + 1), torch.tensor(sizes))
        arrival[: len(seen)] = seen
        return arrival

    def rows_of(self, label: int) -> Tensor:
        """The rows of the pool that hold images of one class."""
        return self.pool.rows_of(label)
