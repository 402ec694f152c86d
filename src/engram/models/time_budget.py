"""How many epochs of a lesson fit into the time there is, by its first steps."""

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
WARM_UP, STEPS = 2, 40  # steps that are not timed, and the most that are
SHARE, LONGEST = 0.1, 10.0  # of the time there is, and seconds, that measuring may take


def epochs_that_fit(lesson: Lesson, minutes: float, stop: Callable[[], bool] | None = None) -> EpochsChosen:
    """The most epochs, 1 at least, with which the lesson takes no longer; it takes some steps and is spent then."""
    budget, started = 60 * minutes, time.monotonic()
    rate = _seconds_per_work(lesson, min(LONGEST, SHARE * budget), stop or (lambda: False))
    left = budget - (time.monotonic() - started)
    epoch = rate * _work(lesson, MOST_EPOCHS) / MOST_EPOCHS

    def seconds(epochs: int) -> float:
        return rate * _work(lesson, epochs) + AFTER * epoch

    epochs = max(1, bisect_right(range(1, MOST_EPOCHS + 1), left, key=seconds))
    return EpochsChosen(minutes, epochs, seconds(epochs), epoch, fits=seconds(epochs) <= left)


def _seconds_per_work(lesson: Lesson, longest: float, stop: Callable[[], bool]) -> float:
    """The seconds of a step over its share of the phase's work, in the first phase."""
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
        raise EngramError(f"{model.config.method} takes no steps that could be timed; leave {option('minutes')} out")
    if taken <= WARM_UP:  # there were no more
        first, steps = begun, taken
    else:
        steps = taken - WARM_UP
    plan = PhasePlan.of(work.phases[0])
    return (time.monotonic() - first) / steps * plan.epochs * plan.steps / plan.work


def _work(lesson: Lesson, epochs: int) -> float:
    """The work of the lesson with so many epochs, in all its phases."""
    model, learner = lesson.model, lesson.model.learner
    assert learner is not None
    method = find_method(model.config.method).make(model.config.lesson_settings(epochs))
    phases = method.phases(learner, lesson.stage, model.engine)
    return sum(PhasePlan.of(phase).work for phase in phases)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
