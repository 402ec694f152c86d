"""Sweep: one pass over images in train mode that sums values and changes no parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.contract.batch_plan import BatchPlan
from engram.contract.learner import Learner
from engram.contract.phase import Step
from engram.core.rng import generator
from engram.data.augment import Draws, draw
from engram.data.stage import Stage
from engram.engine.capture import CapturedStep

if TYPE_CHECKING:
    from engram.engine.engine import Engine


def sweep(
    engine: Engine,
    learner: Learner,
    stage: Stage,
    rows: Tensor,
    visit: Callable[[Step], Sequence[Tensor]],
    batch_size: int,
) -> list[Tensor]:
    """See `Passes.sweep`.

    Every image is used once; the last batch may be smaller. (A single last image is left out if
    `Engine.drops_last_image` says so.) The running statistics change, as in the released code.
    """
    assert len(rows) > 0, "a sweep needs at least one row"
    size = min(batch_size, len(rows))
    full, rest = divmod(len(rows), size)
    if engine.drops_last_image(learner.network, size, rest or size):
        rest = 0
    forward = engine.bind(learner, size)
    forward.refresh()
    buffers = engine.buffers
    pool, plan, counter = buffers.pool(stage), buffers.plan(full + 1, size), buffers.counter
    plan.load(_plan_batches(engine, learner, stage, rows, size))
    arrival = buffers.arrival(stage, learner.network.head.capacity)

    def take(size: int, totals: list[Tensor]) -> list[Tensor]:
        images = forward.images(pool, plan, counter, size)
        output = forward.student(images, train_backbone=True)
        picked = plan.rows.index_select(0, counter)[0, :size]
        labels, exemplar = pool.labels[picked], pool.exemplar[picked]
        sums = visit(Step(labels, exemplar, output, None, {}, learner.buffers, arrival=arrival, stage=buffers.stage))
        if not totals:
            totals += [torch.zeros_like(value) for value in sums]
        for total, value in zip(totals, sums, strict=True):
            total += value.detach()
        counter.add_(1)
        return totals

    counter.zero_()
    what = "the sweep after a stage"
    with learner.network.in_training():
        step = engine.record(("sweep", size), (visit, size), partial(take, size, []), learner, what)
        if isinstance(step, CapturedStep):
            for total in step.returned:
                total.zero_()
        else:
            step = partial(take, size, [])  # with new sums: the attempt to record may have added to the others
        totals: list[Tensor] = []
        for _ in range(full):
            totals = step()
        totals = [total.clone() for total in totals]
        return take(rest, totals) if rest else totals


def _plan_batches(engine: Engine, learner: Learner, stage: Stage, rows: Tensor, size: int) -> BatchPlan:
    """A plan with every row once, shuffled, in batches of `size`; the last one is padded with zeros."""
    draws = draw(engine.augmentation, (len(rows),), generator(learner.seed, "augment", "sweep", stage.index))
    order = torch.randperm(len(rows), generator=generator(learner.seed, "shuffle", "sweep", stage.index))
    steps = -(-len(rows) // size)

    def grid(values: Tensor) -> Tensor:
        padded = torch.zeros(steps * size, dtype=values.dtype)
        padded[: len(values)] = values[order]
        return padded.view(steps, size)

    shuffled = Draws(grid(draws.top), grid(draws.left), grid(draws.mirror), grid(draws.factor))
    return BatchPlan(grid(rows), shuffled, torch.zeros(steps))
