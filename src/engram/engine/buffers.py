"""Space: tensors on the device that keep their place from stage to stage, so that a recorded step stays valid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.data.augment import pad_images
from engram.data.stage import Stage
from engram.engine.batch_plan import Mixing, Plan

PLANNED_STEPS = 512  # planned ahead, in whole epochs
TERMS = 16  # the terms that a loss may have
GROWTH = 1.5
PART = 2**28  # bytes of images brought to the device at a time


@dataclass(frozen=True, eq=False)
class Pool:
    """A stage's pool on the device: images with their border, labels, and which are exemplars; room beyond them."""

    padded: Tensor
    labels: Tensor
    exemplar: Tensor


class Space:
    """The pool, the plan, the step's counter, the history of the loss, and the loss weights."""

    def __init__(self, device: torch.device, pad: int) -> None:
        self.device = device
        self.version = 0  # changes when a tensor has moved
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.history = torch.zeros(PLANNED_STEPS, TERMS, device=device)
        self.stage = torch.zeros((), dtype=torch.int64, device=device)
        self._arrival = torch.zeros(0, dtype=torch.int64, device=device)
        self._pad = pad
        self._pool: Pool | None = None
        self._stage: Stage | None = None
        self._plans: dict[int, Plan] = {}
        self._mixings: dict[int, Mixing] = {}
        self._weights: dict[str, Tensor] = {}
        self._rooms: dict[str, Tensor] = {}

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that keeps its place under a name, at least as many rows of that shape; zeros when it is new."""
        held = self._rooms.get(name)
        if held is None or len(held) < shape[0] or held.shape[1:] != shape[1:]:
            held = self._rooms[name] = torch.zeros(shape, dtype=dtype, device=self.device)
            self.version += 1
        return held

    @property
    def held_bytes(self) -> int:
        """What the pool's images take on the device, room beyond them included."""
        return 0 if self._pool is None else self._pool.padded.numel()

    def pool(self, stage: Stage) -> Pool:
        """The stage's pool; brought here once a stage."""
        if self._pool is None or self._stage is not stage:
            samples, pad = stage.pool, self._pad
            height, width = samples.images.shape[1] + 2 * pad, samples.images.shape[2] + 2 * pad
            held = self._pool
            if held is None or len(held.labels) < len(samples) or held.padded.shape[1:3] != (height, width):
                room = len(samples) if held is None else max(len(samples), int(GROWTH * len(held.labels)))
                held = self._pool = None  # the old one makes room for the new
                held = self._pool = Pool(
                    torch.zeros(room, height, width, 3, dtype=torch.uint8, device=self.device),
                    torch.zeros(room, dtype=torch.int64, device=self.device),
                    torch.zeros(room, dtype=torch.bool, device=self.device),
                )
                self.version += 1
            some = max(1, PART // (height * width * 3))
            for start in range(0, len(samples), some):
                part = pad_images(samples.images[start : start + some].to(self.device), pad)
                held.padded[start : start + len(part)] = part
            held.labels[: len(samples)] = samples.labels.to(self.device)
            held.exemplar[: len(samples)] = samples.exemplar.to(self.device)
            self._stage = stage
        assert self._pool is not None
        return self._pool

    def plan(self, steps: int, batch_size: int) -> Plan:
        """Room for the plan of at least one epoch of so many steps."""
        plan = self._plans.get(batch_size)
        if plan is None or len(plan) < steps:
            if plan is not None:
                self.version += 1
            room = max(PLANNED_STEPS, steps)
            plan = self._plans[batch_size] = Plan.room(room, batch_size, self.device)
            if len(self.history) < room:
                self.history = torch.zeros(room, TERMS, device=self.device)
                self.version += 1
        return plan

    def mixing(self, steps: int, batch_size: int) -> Mixing:
        """Room for what is mixed in so many steps."""
        mixing = self._mixings.get(batch_size)
        if mixing is None or len(mixing) < steps:
            if mixing is not None:
                self.version += 1
            mixing = self._mixings[batch_size] = Mixing.room(steps, batch_size, self.device)
        return mixing

    def arrival(self, stage: Stage, capacity: int) -> Tensor:
        """The stage that each class came with, (capacity,); sets the stage at hand too."""
        if len(self._arrival) != capacity:
            self._arrival = torch.zeros(capacity, dtype=torch.int64, device=self.device)
            self.version += 1
        self._arrival.copy_(stage.arrival(capacity))
        self.stage.fill_(stage.index)
        return self._arrival

    def weights(self, values: Mapping[str, float]) -> dict[str, Tensor]:
        """The loss weights of a phase, by name, ()."""
        for name, value in values.items():
            if name not in self._weights:
                self._weights[name] = torch.zeros((), device=self.device)
            self._weights[name].fill_(value)
        return {name: self._weights[name] for name in values}
