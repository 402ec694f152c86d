"""SecondStream: an extension that adds images of other rows to each batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.contract import Extension
from engram.core.rng import generator


@dataclass(frozen=True, eq=False)
class SecondStream(Extension):
    """`batch_size` more images in each batch, from their own rows. They are first in the batch (`Step.streams[name]`).

    The phase's own rows determine how long an epoch is. This stream goes through its rows in one random order after
    another, across the ends of batches and epochs, so that each row is used as often as any other, or once more. With
    fewer rows than batch_size, a batch has some of them twice.

    rows: of the stage's pool. They must not depend on what training changes: a resumed phase asks for them again.
    """

    rows: Tensor
    batch_size: int
    name: str = "beside"

    def recording_key(self) -> Hashable:
        """The rows are read from the plan."""
        return (type(self), self.batch_size, self.name)

    def stream(self) -> tuple[str, int]:
        return self.name, self.batch_size

    def stream_rows(self, epochs: range, steps: int, purpose: tuple[str | int, ...], seed: int) -> Tensor:
        count, size = len(self.rows), self.batch_size
        start, stop = epochs.start * steps * size, epochs.stop * steps * size
        rounds = range(start // count, -(-stop // count))
        named = ("shuffle", *purpose, self.name)
        orders = [torch.randperm(count, generator=generator(seed, *named, each)) for each in rounds]
        places = torch.cat(orders)[start - rounds.start * count : stop - rounds.start * count]
        return self.rows[places].view(-1, size)
