"""Per-image state: tensors that a method keeps for each image, such as the logits it once had.

A method declares them in `Method.image_state`. They are rows of the stage's pool, kept with an exemplar in the memory,
and part of every checkpoint and model. A loss reads and writes them in `Step.images`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.core.errors import EngramError, described
from engram.data.stage import Samples


@dataclass(frozen=True)
class ImageTensor:
    """A tensor that is kept for each image. per_class: it has one value per class. shape: else. fill: initial value."""

    shape: tuple[int, ...] = ()
    per_class: bool = False
    fill: float = 0.0

    def row_shape(self, capacity: int) -> tuple[int, ...]:
        """The shape of one image's tensor, for a head of that capacity."""
        return (capacity,) if self.per_class else self.shape

    def fitted(self, kept: Tensor | None, count: int, capacity: int) -> Tensor:
        """The tensors of `count` images, float32: those kept, widened to the capacity, or the initial value."""
        fitted = torch.full((count, *self.row_shape(capacity)), self.fill)
        if kept is not None:
            fitted[tuple(slice(size) for size in kept.shape)] = kept
        return fitted


def fit_image_state(declared: Mapping[str, ImageTensor], pool: Samples, capacity: int) -> None:
    """Give each image of the pool its tensors: exemplars those that they have, new images the initial values."""
    for name, kept in declared.items():
        state = kept.fitted(pool.state.get(name), len(pool), capacity)
        state[~pool.exemplar] = kept.fill
        pool.state[name] = state


@dataclass
class ImageStateRows:
    """The per-image tensors of one batch.

    pool: by name, one row per image of the pool. rows: (B,), the batch's rows of it. pool_ids: a stable id of each
    image of the pool. written: rows and values to keep.
    """

    pool: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    pool_ids: Tensor | None = None
    written: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor:
        """A stable id of each image of the batch (B,): in a run, its row in the training split."""
        assert self.rows is not None
        assert self.pool_ids is not None
        return self.pool_ids.index_select(0, self.rows)

    def read(self, name: str) -> Tensor:
        """The tensor of each image of the batch (B, ...), as it was before the step."""
        self._check(name)
        assert self.rows is not None
        return self.pool[name].index_select(0, self.rows)

    def write(self, name: str, values: Tensor, part: slice = slice(None)) -> None:
        """Keep values for the images in that part of the batch (such as `step.streams["main"]`) after this step.

        No image may be in that part twice.
        """
        self._check(name)
        assert self.rows is not None
        rows = self.rows[part]
        wanted = (len(rows), *self.pool[name].shape[1:])
        if not isinstance(values, Tensor) or values.shape != wanted:
            raise EngramError(
                f"{name!r} keeps a tensor of the shape {wanted} for these {len(rows)} images, but "
                f"step.images.write was given {described(values)}"
            )
        self.written[name] = (rows, values.detach().float())

    def _check(self, name: str) -> None:
        if name not in self.pool:
            raise EngramError(
                f"no tensor {name!r} is kept per image; declare it in the method: "
                f'image_state = {{"{name}": ImageTensor(...)}}'
            )
