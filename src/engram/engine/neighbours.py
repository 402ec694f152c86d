"""Neighbours: before each epoch, for every image of it, the images of new classes that the teacher finds most alike.

They are planned as further images of each step, with the draws that they have as images of the epoch themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.learner import Learner
from engram.data.augment import Draws
from engram.data.stage import Stage
from engram.engine.batch_plan import Plan
from engram.methods import Neighbours, Training

if TYPE_CHECKING:
    from engram.engine.engine import Engine

ENTRIES = 2**24  # similarities at a time: 64 MB


def nearest(unit: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each of the embeddings (M, D) of length 1 the places (M, count) of the nearest ones, the nearest first.

    They are looked for at `places` (C,) alone, and no embedding is its own neighbour; bool (M, count) says which places
    are any's, where there are fewer than `count`. It takes M C D products and holds ENTRIES of the results at a time.
    """
    candidates, width = unit[places], min(count, len(places))
    found: list[Tensor] = []
    is_there: list[Tensor] = []
    for part in torch.arange(len(unit), device=unit.device).split(max(1, ENTRIES // max(1, len(places)))):
        # The nearest of vectors of length 1 have the largest products.
        alike = (unit[part] @ candidates.T).masked_fill_(part[:, None] == places, -torch.inf)
        best = alike.topk(width, dim=1)
        found.append(places[best.indices])
        is_there.append(best.values > -torch.inf)
    missing = (0, count - width)
    return F.pad(torch.cat(found), missing), F.pad(torch.cat(is_there), missing)


class Surroundings:
    """The neighbours of the images of a phase, an epoch at a time.

    Everything that a step reads keeps its place from epoch to epoch and from stage to stage. What an epoch's neighbours
    are depends on its plan and on the teacher alone, so a resumed epoch finds the same ones.
    """

    def __init__(
        self,
        engine: Engine,
        learner: Learner,
        stage: Stage,
        neighbours: Neighbours,
        index: int,
        training: Training,
        images: int,
    ) -> None:
        self._engine, self._learner, self._stage, self._index = engine, learner, stage, index
        self._count, self._first = neighbours.count, neighbours.first
        self._steps, self._size = training.batches(images)
        self._used = min(self._steps * self._size, images)
        space = engine.space
        self._forward = engine.bind(learner, self._size)
        self._pool, self._plan = space.pool(stage), space.plan(self._steps, self._size)
        room, width = len(self._plan), self._size * self._count
        names = ("rows", "top", "left", "mirror", "factor", "lr")
        rows, top, left, mirror, factor, lr = (
            space.room(f"neighbours.{name}", (room, width) if own.ndim == 2 else (room,), own.dtype)
            for name, own in zip(names, self._plan.tensors(), strict=True)
        )
        self._planned = Plan(rows, Draws(top, left, mirror, factor), lr)
        self._shares = space.room("neighbours.shares", (room, width))
        self._unit = space.room("neighbours.embeddings", (room, self._size, learner.network.backbone.dim))
        self._is_new = torch.zeros(0, dtype=torch.bool)
        self._takers: dict[int, Callable[[], None]] = {}  # by batch size

    def load(self, plan: Plan) -> None:
        """Learns of the epochs to come from their plan, on the CPU."""
        self._is_new = self._stage.pool.labels[plan.rows] >= self._stage.num_old

    @torch.no_grad()
    def survey(self, start: int) -> None:
        """Plans the neighbours of the epoch whose first step is at `start`; leaves the counter somewhere."""
        counter, steps, size = self._engine.space.counter, self._steps, self._size
        counter.fill_(start)
        last = self._used - (steps - 1) * size
        for step in range(steps):
            self._taker(last if step == steps - 1 else size)()
        epoch = slice(start, start + steps)
        # Where an epoch ends in a smaller batch, the rest of its last row holds no image.
        places = self._is_new[epoch].flatten()[: self._used].nonzero().squeeze(1)[: self._first]
        found, is_there = nearest(self._unit[epoch].flatten(0, 1), places.to(counter.device), self._count)
        for held, own in zip(self._planned.tensors()[:5], self._plan.tensors()[:5], strict=True):
            held[epoch] = own[epoch].flatten()[found].view(steps, -1)
        shares = is_there / is_there.sum(dim=1, keepdim=True).clamp(min=1)
        self._shares[epoch] = shares.view(steps, -1)

    def _taker(self, size: int) -> Callable[[], None]:
        """What has the teacher look at a batch of that size: recorded on a GPU."""
        if size not in self._takers:
            slot, key = ("neighbours", self._index, size), ("neighbours", size, self._size)
            step, what = partial(self._embed, size), "the search for neighbours"
            self._takers[size] = self._engine.record(slot, key, step, self._learner, what)
        return self._takers[size]

    @torch.no_grad()
    def _embed(self, size: int) -> None:
        counter = self._engine.space.counter
        images = self._forward.images(self._pool, self._plan, counter, size)
        unit = F.normalize(self._forward.teacher(images).embedding, dim=1)
        self._unit[:, :size].index_copy_(0, counter, unit[None])
        counter.add_(1)

    def look(self, counter: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """For the first `size` images of a step: the logits (B, N, K) of their neighbours, and their shares (B, N)."""
        images = self._forward.images(self._pool, self._planned, counter, size * self._count)
        logits = self._forward.aside(images).logits
        shares = self._shares.index_select(0, counter)[0, : size * self._count]
        return logits.view(size, self._count, -1), shares.view(size, self._count)
