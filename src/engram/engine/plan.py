"""The plan of an epoch: which images each step sees, how they are augmented, and the learning rate, all as tensors.

A step reads its row of the plan through a counter on the device, so it is the same sequence of operations every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.data.augment import Augmentation, Draws, draw
from engram.methods import Training
from engram.random import generator


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """rows: int64 (S, B) into the pool. draws: (S, B). lr: (S,). The last step uses the first `last` columns."""

    rows: Tensor
    draws: Draws
    lr: Tensor
    last: int

    def load(self, other: EpochPlan) -> None:
        """Takes over another epoch's plan, in place."""
        self.rows.copy_(other.rows, non_blocking=True)
        self.lr.copy_(other.lr, non_blocking=True)
        for name in ("top", "left", "mirror", "factor"):
            getattr(self.draws, name).copy_(getattr(other.draws, name), non_blocking=True)

    def row(self, at: Tensor, size: int) -> tuple[Tensor, Draws, Tensor]:
        """The pool rows (size,), their draws and the learning rate (1,) of the step that the counter (1,) is at."""
        draws = self.draws
        top, left, mirror, factor = (
            plan.index_select(0, at)[0, :size] for plan in (draws.top, draws.left, draws.mirror, draws.factor)
        )
        rows = self.rows.index_select(0, at)[0, :size]
        return rows, Draws(top, left, mirror, factor), self.lr.index_select(0, at)


def plan_epoch(
    training: Training,
    augmentation: Augmentation,
    rows: Tensor,
    epoch: int,
    purpose: tuple[str | int, ...],
    seed: int,
    device: torch.device,
) -> EpochPlan:
    """The plan of one epoch over these rows; the same arguments give the same plan."""
    steps, size = training.batches(len(rows))
    shuffled = rows[torch.randperm(len(rows), generator=generator(seed, "shuffle", *purpose, epoch))]
    used = min(steps * size, len(rows))
    grid = torch.zeros(steps * size, dtype=torch.int64)
    grid[:used] = shuffled[:used]
    draws = draw(augmentation, (steps, size), generator(seed, "augment", *purpose, epoch))
    lr = learning_rates(training, steps)[epoch * steps : (epoch + 1) * steps]
    return EpochPlan(grid.view(steps, size).to(device), draws.to(device), lr.to(device), last=used - (steps - 1) * size)


def learning_rates(training: Training, steps_per_epoch: int) -> Tensor:
    """The learning rate of every step of a phase (epochs * steps,)."""
    total = training.epochs * steps_per_epoch
    if training.schedule == "constant":
        return torch.full((total,), training.lr)
    return training.lr * 0.5 * (1 + torch.cos(math.pi * torch.arange(total) / total))
