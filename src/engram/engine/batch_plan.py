"""The batch plan: which images each step sees, how they are augmented and mixed, and the learning rate, as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.contract.batches import Beside, CutMix
from engram.core.rng import generator
from engram.data.augment import Augmentation, Draws, draw, identity_draws
from engram.methods import Training


@dataclass(frozen=True, eq=False)
class Cut:
    """One step's: partner (B,), the place in the batch of each image's other one; box (4,); share (), see Mixing."""

    partner: Tensor
    box: Tensor
    share: Tensor

    def paste(self, images: Tensor, height_at: int) -> Tensor:
        """The batch with the box of each image taken from its partner, in the same order of memory.

        height_at: the dimension of the images that is their height; their width is the next.
        """
        top, bottom, left, right = self.box.unbind()
        height, width = images.shape[height_at : height_at + 2]
        ys, xs = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        inside = ((ys >= top) & (ys < bottom))[:, None] & ((xs >= left) & (xs < right))
        inside = inside.view(*inside.shape, *[1] * (images.ndim - height_at - 2))
        return torch.where(inside, images[self.partner], images, out=torch.empty_like(images))


@dataclass(frozen=True, eq=False)
class Mixing:
    """What is mixed in each of S steps.

    partner: int64 (S, B), each image's other one in its batch. box: int64 (S, 4), its first row and the one after its
    last, its first column and the one after its last. share: float32 (S,), of the image that is not in the box.
    """

    partner: Tensor
    box: Tensor
    share: Tensor

    def __len__(self) -> int:
        return len(self.share)

    @classmethod
    def room(cls, steps: int, batch_size: int, device: torch.device) -> Mixing:
        """Room to load others into, up to so many steps."""
        partner = torch.zeros(steps, batch_size, dtype=torch.int64, device=device)
        return cls(partner, torch.zeros(steps, 4, dtype=torch.int64, device=device), torch.ones(steps, device=device))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return self.partner, self.box, self.share

    def load(self, other: Mixing) -> None:
        """Takes over another of no more steps, in place; on a GPU nothing waits for it."""
        for held, new in zip(self.tensors(), other.tensors(), strict=True):
            new = new.pin_memory() if held.is_cuda else new
            held[: len(new)].copy_(new, non_blocking=True)

    def row(self, at: Tensor, size: int) -> Cut:
        """What is mixed in the step that the counter (1,) is at, in a batch of that size."""
        partner, box, share = (plan.index_select(0, at)[0] for plan in self.tensors())
        return Cut(partner[:size], box, share)


def plan_mixing(
    mix: CutMix,
    sizes: tuple[int, int, int],
    image_size: tuple[int, int],
    epochs: range,
    purpose: tuple[str | int, ...],
    seed: int,
) -> Mixing:
    """What is mixed in the steps of some epochs, on the CPU; the same arguments give the same.

    sizes: the steps of an epoch, the images in a batch and in an epoch's last.
    """
    steps, batch_size, last = sizes
    height, width = image_size
    planned: list[Mixing] = []
    for epoch in epochs:
        draws = generator(seed, "mix", *purpose, epoch)
        mixed = torch.rand(steps, generator=draws) < mix.probability
        side = (1 - torch.rand(steps, generator=draws)).sqrt()  # of the box, in sides of the image
        centres = (torch.randint(extent, (steps,), generator=draws) for extent in image_size)
        spans: list[Tensor] = []
        for centre, extent in zip(centres, image_size, strict=True):
            half = (side * extent).long() // 2 * mixed
            spans += [(centre - half).clamp(min=0), (centre + half).clamp(max=extent)]
        top, bottom, left, right = spans
        order = torch.rand(steps, batch_size, generator=draws)
        order[-1, last:] = torch.inf  # there is no image in those places
        share = 1 - (bottom - top) * (right - left) / (height * width)
        planned.append(Mixing(order.argsort(dim=1), torch.stack(spans, dim=1), share))
    partner, box, share = (torch.cat(parts) for parts in zip(*(each.tensors() for each in planned), strict=True))
    return Mixing(partner, box, share)


@dataclass(frozen=True, eq=False)
class Plan:
    """rows: int64 (S, B) into the pool. draws: (S, B). lr: (S,)."""

    rows: Tensor
    draws: Draws
    lr: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def room(cls, steps: int, batch_size: int, device: torch.device) -> Plan:
        """A plan to load others into, up to so many steps."""
        shape = (steps, batch_size)
        draws = Draws(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            torch.zeros(shape, device=device),
        )
        return cls(torch.zeros(shape, dtype=torch.int64, device=device), draws, torch.zeros(steps, device=device))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return self.rows, self.draws.top, self.draws.left, self.draws.mirror, self.draws.factor, self.lr

    def load(self, other: Plan) -> None:
        """Takes over another plan of no more steps, in place; on a GPU nothing waits for it."""
        for held, new in zip(self.tensors(), other.tensors(), strict=True):
            new = new.pin_memory() if held.is_cuda else new
            held[: len(new)].copy_(new, non_blocking=True)

    def row(self, at: Tensor, size: int) -> tuple[Tensor, Draws]:
        """The pool rows (size,) and the draws of the step that the counter (1,) is at."""
        top, left, mirror, factor = (
            plan.index_select(0, at)[0, :size]
            for plan in (self.draws.top, self.draws.left, self.draws.mirror, self.draws.factor)
        )
        return self.rows.index_select(0, at)[0, :size], Draws(top, left, mirror, factor)

    def learning_rate(self, at: Tensor) -> Tensor:
        """The learning rate (1,) of the step that the counter (1,) is at."""
        return self.lr.index_select(0, at)


def plan_epochs(
    training: Training,
    augmentation: Augmentation,
    rows: Tensor,
    epochs: range,
    purpose: tuple[str | int, ...],
    seed: int,
    augmented: bool = True,
    beside: Beside | None = None,
) -> Plan:
    """The plan of some epochs over these rows, on the CPU; the same arguments give the same plan.

    augmented: at random, or each image as it is. Where the last batch of an epoch is smaller, its row ends in zeros.
    beside: the second stream's images are the first of each batch, so that those zeros stay at the end.
    """
    steps, size = training.batches(len(rows))
    used = min(steps * size, len(rows))
    grids: list[Tensor] = []
    drawn: list[Draws] = []
    for epoch in epochs:
        shuffled = rows[torch.randperm(len(rows), generator=generator(seed, "shuffle", *purpose, epoch))]
        grid = torch.zeros(steps * size, dtype=torch.int64)
        grid[:used] = shuffled[:used]
        grids.append(grid.view(steps, size))
        if augmented:
            drawn.append(draw(augmentation, (steps, size), generator(seed, "augment", *purpose, epoch)))
        else:
            drawn.append(identity_draws(augmentation, (steps, size)))
    draws = _joined(drawn, dim=0)
    lr = learning_rates(training, steps)[epochs.start * steps : epochs.stop * steps]
    if beside is None:
        return Plan(torch.cat(grids), draws, lr)
    first = _beside_rows(beside, steps, epochs, purpose, seed)
    shape, named = (steps, beside.batch_size), ("augment", *purpose, "beside")
    side = [
        draw(augmentation, shape, generator(seed, *named, epoch)) if augmented else identity_draws(augmentation, shape)
        for epoch in epochs
    ]
    return Plan(torch.cat([first, torch.cat(grids)], dim=1), _joined([_joined(side, dim=0), draws], dim=1), lr)


def _beside_rows(beside: Beside, steps: int, epochs: range, purpose: tuple[str | int, ...], seed: int) -> Tensor:
    """The second stream's rows (S, B) in these epochs: a cut out of one random order after another of all of them."""
    count, size = len(beside.rows), beside.batch_size
    start, stop = epochs.start * steps * size, epochs.stop * steps * size
    rounds = range(start // count, -(-stop // count))
    orders = [torch.randperm(count, generator=generator(seed, "shuffle", *purpose, "beside", each)) for each in rounds]
    places = torch.cat(orders)[start - rounds.start * count : stop - rounds.start * count]
    return beside.rows[places].view(-1, size)


def _joined(draws: Sequence[Draws], dim: int) -> Draws:
    return Draws(
        *(torch.cat([getattr(each, name) for each in draws], dim) for name in ("top", "left", "mirror", "factor"))
    )


def learning_rates(training: Training, steps_per_epoch: int) -> Tensor:
    """The learning rate of every step of a phase (epochs * steps,)."""
    total = training.epochs * steps_per_epoch
    if training.schedule == "constant":
        return torch.full((total,), training.lr)
    if training.schedule == "rise":
        begun = torch.arange(total) // max(1, steps_per_epoch)
        return training.lr * (begun + 1) / max(1, training.epochs)
    if training.schedule == "steps":
        begun = torch.arange(total) // max(1, steps_per_epoch)
        passed = sum((begun >= share * training.epochs).long() for share in training.milestones)
        return training.lr * training.factor ** (passed + torch.zeros(total))
    if training.schedule == "restarts":
        begun = torch.arange(total) // max(1, steps_per_epoch)
        # The cycle of 2^c epochs begins with epoch 2^c; epoch 0 comes before them all.
        start = 2 ** begun.clamp(min=1).double().log2().floor()
        falling = 0.5 * (1 + torch.cos(math.pi * (begun - start) / start))
        share = training.factor + (1 - training.factor) * falling
        return (training.lr * torch.where(begun == 0, 0.1, share)).float()
    return training.lr * 0.5 * (1 + torch.cos(math.pi * torch.arange(total) / total))
