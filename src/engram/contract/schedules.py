"""Schedules of the learning rate: a registry of functions, and the rates of a phase with its warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engram.contract.settings import SCHEDULES, Training
from engram.core.errors import EngramError

Schedule = Callable[[Training, int], Tensor]


def register_schedule(name: str) -> Callable[[Schedule], Schedule]:
    """A decorator that registers a schedule of the learning rate, to be named in `Training.schedule`.

    The function takes a `Training` and the number of steps per epoch. It returns the learning rate of every step of the
    phase, a tensor (epochs * steps,) on the CPU, without the warm-up, which is added to any schedule.
    """

    def decorate(schedule: Schedule) -> Schedule:
        if not callable(schedule):
            raise EngramError(f"the schedule {name!r} is registered with {schedule!r:.80}; it should be a function")
        SCHEDULES.add(name, schedule)
        return schedule

    return decorate


def learning_rates(training: Training, steps_per_epoch: int) -> Tensor:
    """The learning rate of every step of a phase (epochs * steps,), warm-up included."""
    total = training.epochs * steps_per_epoch
    warmup = round(training.warmup * total)
    if warmup == 0:
        return _scheduled(training, steps_per_epoch)
    left = total - warmup
    # Schedules are of whole epochs; one that does not fit into the rest exactly is shortened a little.
    rates = _scheduled(replace(training, epochs=max(1, -(-left // steps_per_epoch)), warmup=0.0), steps_per_epoch)
    rest = rates[torch.arange(left) * len(rates) // max(1, left)]
    return torch.cat([rates[0] * torch.arange(1, warmup + 1) / warmup, rest])


def _scheduled(training: Training, steps_per_epoch: int) -> Tensor:
    """Return the schedule's factor, checked."""
    total = training.epochs * steps_per_epoch
    rates = SCHEDULES.find(training.schedule)(training, steps_per_epoch)
    if not isinstance(rates, Tensor) or rates.shape != (total,):
        found = f"a tensor of the shape {tuple(rates.shape)}" if isinstance(rates, Tensor) else f"{rates!r:.60}"
        raise EngramError(
            f"the schedule {training.schedule!r} returned {found}; it should return a tensor ({total},), the learning "
            f"rate of each step of {training.epochs} epochs with {steps_per_epoch} steps"
        )
    if not bool((rates.isfinite() & (rates >= 0)).all()):
        raise EngramError(
            f"the schedule {training.schedule!r} returned a learning rate that is negative or not finite; each should "
            "be 0 or more"
        )
    return rates.float()


def _epochs(training: Training, steps_per_epoch: int) -> Tensor:
    """The epoch of every step."""
    return torch.arange(training.epochs * steps_per_epoch) // max(1, steps_per_epoch)


@register_schedule("cosine")
def _cosine(training: Training, steps_per_epoch: int) -> Tensor:
    """From the rate down to 0, as half a cosine."""
    total = training.epochs * steps_per_epoch
    return training.lr * 0.5 * (1 + torch.cos(math.pi * torch.arange(total) / total))


@register_schedule("constant")
def _constant(training: Training, steps_per_epoch: int) -> Tensor:
    """The same rate throughout."""
    return torch.full((training.epochs * steps_per_epoch,), training.lr)


@register_schedule("steps")
def _steps(training: Training, steps_per_epoch: int) -> Tensor:
    """The rate, multiplied by `factor` at each milestone."""
    epoch = _epochs(training, steps_per_epoch)
    passed = sum((epoch >= share * training.epochs).long() for share in training.milestones)
    return training.lr * training.factor ** (passed + torch.zeros(len(epoch)))


@register_schedule("restarts")
def _restarts(training: Training, steps_per_epoch: int) -> Tensor:
    """A tenth of the rate for one epoch, then cosines over 1, 2, 4, 8 ... epochs, down to `factor` of the rate."""
    epoch = _epochs(training, steps_per_epoch)
    # The cycle of 2^c epochs begins with epoch 2^c; epoch 0 precedes them.
    start = 2 ** epoch.clamp(min=1).double().log2().floor()
    falling = 0.5 * (1 + torch.cos(math.pi * (epoch - start) / start))
    share = training.factor + (1 - training.factor) * falling
    return (training.lr * torch.where(epoch == 0, 0.1, share)).float()


@register_schedule("rise")
def _rise(training: Training, steps_per_epoch: int) -> Tensor:
    """Up to the rate in equal steps, one per epoch."""
    return training.lr * (_epochs(training, steps_per_epoch) + 1) / max(1, training.epochs)
