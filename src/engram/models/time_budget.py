"""Choose the number of epochs that fit into a time budget, from the speed of the first steps."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable

import torch

from engram.core.errors import EngramError, option
from engram.core.events import EpochsChosen
from engram.experiment.stage_work import AFTER, PhasePlan, StageWork, StepTaken
from engram.methods import find_method
from engram.models.lesson import Lesson

MOST_EPOCHS = 300
WARM_UP, STEPS = 2, 40  # untimed steps, and the largest number of timed steps
SHARE, LONGEST = 0.1, 10.0  # limits of the measurement: fraction of the budget, and seconds


def epochs_that_fit(lesson: Lesson, minutes: float, stop: Callable[[], bool] | None = None) -> EpochsChosen:
    """Return the largest number of epochs (at least 1) that fits. The lesson cannot be used afterwards."""
    budget, started = 60 * minutes, time.monotonic()
    rate = _seconds_per_work(lesson, min(LONGEST, SHARE * budget), stop or (lambda: False))
    left = budget - (time.monotonic() - started)
    epoch = rate * _work(lesson, MOST_EPOCHS) / MOST_EPOCHS

    def seconds(epochs: int) -> float:
        return rate * _work(lesson, epochs) + AFTER * epoch

    epochs = max(1, bisect_right(range(1, MOST_EPOCHS + 1), left, key=seconds))
    return EpochsChosen(minutes, epochs, seconds(epochs), epoch, fits=seconds(epochs) <= left)


def _seconds_per_work(lesson: Lesson, longest: float, stop: Callable[[], bool]) -> float:
    """Measure the seconds per unit of work in the first phase."""
    model, learner = lesson.model, lesson.model.learner
    assert learner is not None
    work = StageWork(model.method, learner, model.engine, lesson.stage, lesson.stage.index + 1)
    begun = time.monotonic()
    first, taken = begun, 0
    for event in work.train():
        if not isinstance(event, StepTaken):
            continue
        taken += 1
        if taken == WARM_UP:
            _wait(model.engine.device)
            first = time.monotonic()
        if taken >= WARM_UP + STEPS or stop() or (taken > WARM_UP and time.monotonic() - begun > longest):
            break
    _wait(model.engine.device)
    if not taken:
        raise EngramError(f"{model.config.method} has no steps that could be timed; leave {option('minutes')} out")
    if taken <= WARM_UP:  # the phase has no more steps
        first, steps = begun, taken
    else:
        steps = taken - WARM_UP
    plan = PhasePlan.of(work.phases[0])
    return (time.monotonic() - first) / steps * plan.epochs * plan.steps / plan.work


def _work(lesson: Lesson, epochs: int) -> float:
    """Return the work of all phases of the lesson with that many epochs."""
    model, learner = lesson.model, lesson.model.learner
    assert learner is not None
    method = find_method(model.config.method).make(model.config.lesson_settings(epochs))
    phases = method.phases(learner, lesson.stage, model.engine)
    return sum(PhasePlan.of(phase).work for phase in phases)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
