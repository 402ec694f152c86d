"""Planning: the batches of some epochs and their learning rates, drawn on the CPU from named random generators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engram.contract.batch_plan import BatchPlan
from engram.contract.extension import Extension
from engram.contract.schedules import learning_rates
from engram.contract.settings import Training
from engram.core.rng import generator
from engram.data.augment import CENTRE, Augmentation, Draws, draw, identity_draws
from engram.data.planned_crops import draw_numbers


def plan_epochs(
    training: Training,
    augmentation: Augmentation,
    rows: Tensor,
    epochs: range,
    purpose: tuple[str | int, ...],
    seed: int,
    augmented: bool = True,
    extensions: Sequence[Extension] = (),
    image_size: tuple[int, int] | None = None,
    photographs: bool = False,
) -> BatchPlan:
    """The plan of some epochs over these rows, on the CPU; the same arguments give the same plan.

    Parameters
    ----------
    augmented: each image is augmented at random, else used unchanged.
    extensions: those with a stream put its images first in each batch.
    image_size: of images as the network sees them, for an augmentation with a policy.
    photographs: random crops come from the original photographs, before an image is on the device.

    If the last batch of an epoch is smaller, its row of the plan ends in zeros.
    """
    steps, size = training.batches(len(rows))
    used = min(steps * size, len(rows))

    def draws(count: int, *stream: str) -> Draws:
        shape = (steps, count)
        if not augmented:
            return Draws.joined([identity_draws(augmentation, shape) for _ in epochs], dim=0)
        generators = (generator(seed, "augment", *purpose, *stream, epoch) for epoch in epochs)
        return Draws.joined([draw(augmentation, shape, each, image_size) for each in generators], dim=0)

    grids: list[Tensor] = []
    for epoch in epochs:
        shuffled = rows[torch.randperm(len(rows), generator=generator(seed, "shuffle", *purpose, epoch))]
        grid = torch.zeros(steps * size, dtype=torch.int64)
        grid[:used] = shuffled[:used]
        grids.append(grid.view(steps, size))

    def crops(count: int, *stream: str) -> Tensor:
        generators = (generator(seed, "crops", *purpose, *stream, epoch) for epoch in epochs)
        return torch.cat([draw_numbers((steps, count), each) for each in generators])

    is_cropped = photographs and augmented
    parts, drawn, cropped = [torch.cat(grids)], [draws(size)], [crops(size)] if is_cropped else []
    for extension in reversed(extensions):
        stream = extension.stream()
        if stream is not None:
            name, count = stream
            parts.insert(0, extension.stream_rows(epochs, steps, purpose, seed))
            drawn.insert(0, draws(count, name))
            if is_cropped:
                cropped.insert(0, crops(count, name))
    lr = learning_rates(training, steps)[epochs.start * steps : epochs.stop * steps]
    plan = BatchPlan(torch.cat(parts, dim=1), Draws.joined(drawn, dim=1), lr)
    return _of_whole_images(plan, torch.cat(cropped, dim=1)) if is_cropped else plan


def plan_sweep(
    augmentation: Augmentation,
    rows: Tensor,
    size: int,
    stage: int,
    seed: int,
    image_size: tuple[int, int],
    photographs: bool = False,
) -> BatchPlan:
    """A plan with every row once, shuffled, in batches of `size`; the last one is padded with zeros.

    photographs: as for `plan_epochs`.
    """
    draws = draw(augmentation, (len(rows),), generator(seed, "augment", "sweep", stage), image_size)
    order = torch.randperm(len(rows), generator=generator(seed, "shuffle", "sweep", stage))
    steps = -(-len(rows) // size)

    def grid(values: Tensor) -> Tensor:
        padded = torch.zeros(steps * size, *values.shape[1:], dtype=values.dtype)
        padded[: len(values)] = values[order]
        return padded.view(steps, size, *values.shape[1:])

    plan = BatchPlan(grid(rows), Draws(*map(grid, draws.tensors())), torch.zeros(steps))
    if not photographs:
        return plan
    return _of_whole_images(plan, grid(draw_numbers((len(rows),), generator(seed, "crops", "sweep", stage))))


def _of_whole_images(plan: BatchPlan, crops: Tensor) -> BatchPlan:
    """The plan with crops of photographs: on the device they are whole images, of the size that the network sees."""
    whole = torch.full_like(plan.draws.top, CENTRE)
    return replace(plan, draws=replace(plan.draws, top=whole, left=whole), crops=crops)
