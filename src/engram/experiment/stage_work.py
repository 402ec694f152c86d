"""The work of one stage in order: train, finish, exemplars, class means, teacher, evaluation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import Method, Phase
from engram.contract.exemplars import class_means
from engram.contract.image_state import fit_image_state
from engram.contract.learner import Learner
from engram.core.events import EpochFinished, Event, PhaseStarted, Progress, Working
from engram.data.stage import Stage
from engram.engine import Engine, PhaseLoop, PhaseState
from engram.nn.network import Part

PROGRESS_SECONDS = 0.2
RATE_SECONDS = 5.0
# What an image costs, against training without a teacher; only for the estimate of the time left.
TEACHER_COST, FROZEN_COST = 1.5, 0.3
# What a step costs beside its images, in images: on an H200 one of 16 takes about 0.7 of the time of one of 128
# (GDumb's against the others' in results/methods-h200-1.json).
STEP_COST = 210
AFTER = 2.0  # what follows a stage's training (importance, exemplars, test images), in epochs
# Names of the tensors of a phase in a checkpoint; those of the extensions begin with PHASE and their own name.
PHASE, ROWS, TERMS = "phase.", "phase.rows", "phase.terms"
MOMENTUM, IMAGES = "phase.momentum.", "phase.images."


@dataclass(frozen=True)
class PhasePlan:
    """A phase as it will be: images and steps of one epoch, and its work, which is in proportion to its time."""

    name: str
    epochs: int
    images: int
    steps: int
    batch_size: int
    work: float

    @classmethod
    def of(cls, phase: Phase) -> PhasePlan:
        """The plan of a phase."""
        steps, size, last = phase.batches(phase.images)
        cost = TEACHER_COST if phase.teacher else 1.0 if Part.BACKBONE in phase.train else FROZEN_COST
        cost += sum(extension.cost() for extension in phase.extensions)
        work = cost * phase.training.epochs * ((steps - 1) * size + last + STEP_COST * steps)
        return cls(phase.name, phase.training.epochs, phase.images, steps, size, work)


@dataclass(frozen=True, eq=False)
class StepTaken:
    """A step was taken in the stage's phase of that number: the moment to save where it stands, or to stop."""

    stage: int
    number: int
    loop: PhaseLoop
    meter: Meter
    seconds: float

    def ended(self, wait: bool = True) -> Iterator[EpochFinished]:
        """The epochs that ended and were not told yet; all of them, if to wait for the device.

        They are told before a checkpoint: whoever goes on from it does not come by them again.
        """
        name = self.loop.phase.name
        for epoch in self.loop.finished(wait):
            yield EpochFinished(self.stage, name, epoch.number + 1, epoch.terms, epoch.lr, self.meter.epoch())

    def state(self) -> tuple[int, PhaseState]:
        """Where training stands, to go on from with `StageWork.train`."""
        return self.number, self.loop.state()


def pack_phase(number: int, state: PhaseState) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Where a phase stands as tensors and plain data, for a checkpoint."""
    tensors = {ROWS: state.rows} | {f"{MOMENTUM}{name}": value for name, value in state.momentum.items()}
    tensors |= {f"{PHASE}{name}": value for name, value in state.extensions.items()}
    tensors |= {f"{IMAGES}{name}": value for name, value in state.image_state.items()}
    tensors |= {} if state.terms is None else {TERMS: state.terms}
    return tensors, {"number": number, "epoch": state.epoch, "step": state.step}


def unpack_phase(tensors: dict[str, Tensor], data: dict[str, Any] | None) -> tuple[int, PhaseState] | None:
    """What `pack_phase` packed, taken out of the tensors; None where the checkpoint stood inside no phase."""
    rows, terms = tensors.pop(ROWS, None), tensors.pop(TERMS, None)
    momentum, image_state, extensions = (
        {name.removeprefix(kind): tensors.pop(name) for name in list(tensors) if name.startswith(kind)}
        for kind in (MOMENTUM, IMAGES, PHASE)
    )
    if data is None:
        return None
    assert rows is not None
    return data["number"], PhaseState(rows, momentum, data["epoch"], data["step"], extensions, terms, image_state)


class StageWork:
    """One stage of a learner, for whoever has a method, an engine and images.

    now: seconds on a clock that may stand still. clock: the seconds spent, by kind of work, are added there. stages:
    how many there are in all, for the events.
    """

    def __init__(
        self,
        method: Method,
        learner: Learner,
        engine: Engine,
        stage: Stage,
        stages: int,
        now: Callable[[], float] = time.monotonic,
        clock: dict[str, float] | None = None,
    ) -> None:
        self.method, self.learner, self.engine, self.stage = method, learner, engine, stage
        self.stages = stages
        self.now = now
        self.clock: dict[str, float] = {} if clock is None else clock
        self.phases: list[Phase] = []  # once training has begun

    def train(self, resume: tuple[int, PhaseState] | None = None) -> Iterator[Event | StepTaken]:
        """Grows the head and takes every step, from the start or from a phase's number and where it stood.

        Whoever stops asking after a StepTaken has stopped the training there.
        """
        method, learner, stage, engine = self.method, self.learner, self.stage, self.engine
        first, state = resume or (0, None)
        self._fit_image_state()
        if state is None:
            with self.clocked("train"):
                method.grow(learner, stage, engine)
        self.phases = method.phases(learner, stage, engine)
        for number, phase in enumerate(self.phases):
            if number >= first:
                with self.clocked("train"):
                    loop = engine.start(learner, stage, phase, number, state if number == first else None)
                yield from self._phase(number, loop)

    def _fit_image_state(self) -> None:
        """Give each image of the pool the tensors that the method keeps per image."""
        capacity = max(self.learner.network.head.capacity, self.stage.num_seen)
        fit_image_state(self.method.image_state, self.stage.pool, capacity)

    def _phase(self, number: int, loop: PhaseLoop) -> Iterator[Event | StepTaken]:
        phase, index = loop.phase, self.stage.index
        yield PhaseStarted(index, phase.name, phase.training.epochs, len(loop.rows), loop.steps)
        if self.engine.is_cold:
            yield Working(index, self.stages, "kernels")
        meter = Meter(loop.batch_size, self.now)
        for _ in loop:
            seconds = meter.step()
            self._add("train", seconds)
            taken = StepTaken(index, number, loop, meter, seconds)
            yield from taken.ended(wait=False)
            yield taken
        for epoch in loop.finished(wait=True):
            self._add("train", meter.step())
            yield EpochFinished(index, phase.name, epoch.number + 1, epoch.terms, epoch.lr, meter.epoch())
        self._add("train", meter.step())

    def finish(self) -> Iterator[Event]:
        """What follows the training: what the method computes, exemplars, class means, the next stage's teacher."""
        method, learner, stage, engine = self.method, self.learner, self.stage, self.engine
        if type(method).finish is not Method.finish:
            yield Working(stage.index, self.stages, "importance")
        with self.clocked("importance"):
            method.finish(learner, stage, engine)
        yield Working(stage.index, self.stages, "exemplars")
        with self.clocked("exemplars"):
            learner.memory.update(stage.pool, method.exemplars(learner, stage, engine), stage.num_seen)
            if "nme" in method.predictors:
                learner.class_means = class_means(learner, engine)
            learner.snapshot_teacher()

    @contextmanager
    def clocked(self, kind: str) -> Iterator[None]:
        """A context whose time counts as that kind of work."""
        started = self.now()
        yield
        self._add(kind, self.now() - started)

    def _add(self, kind: str, seconds: float) -> None:
        self.clock[kind] = self.clock.get(kind, 0.0) + seconds


class Outlook:
    """How far the training of the stages planned is, and how long the rest will take.

    plans: the phases of each stage. first: the number of the first of these stages.
    """

    def __init__(self, plans: Sequence[Sequence[PhasePlan]], first: int = 0) -> None:
        self.plans = plans
        self.first = first
        self.total = sum(phase.work for phases in plans for phase in phases)
        self._work, self._seconds = 0.0, 0.0  # done in this process, for the rate
        self._after = AFTER

    def step(self, taken: StepTaken) -> None:
        """Takes account of a step; not of a phase's first, in which kernels are compiled and the step is recorded."""
        if taken.meter.steps == 1:
            return
        planned = PhasePlan.of(taken.loop.phase)
        self._work += planned.work / max(1, planned.epochs * planned.steps)
        self._seconds += taken.seconds

    def stage(self, stage: int, clock: dict[str, float]) -> None:
        """Takes account of what followed a stage's training, from its seconds; not of the first, which compiles too."""
        epoch = self._epoch(stage - self.first)
        if stage > self.first and self._seconds and epoch:
            rest = sum(seconds for kind, seconds in clock.items() if kind != "train")
            self._after = rest / epoch * self._work / self._seconds

    def _epoch(self, place: int) -> float:
        """The work of an epoch in the first phase of a stage."""
        return next((phase.work / max(1, phase.epochs) for phase in self.plans[place]), 0.0)

    def progress(self, stage: int, stages: int, taken: StepTaken) -> Progress:
        """Where training stands."""
        loop, phases = taken.loop, self.plans[stage - self.first]
        epochs = loop.phase.training.epochs
        before = sum(phase.work for phases in self.plans[: stage - self.first] for phase in phases)
        here = phases[taken.number].work * (loop.epoch * loop.steps + loop.step) / (epochs * loop.steps)
        done = before + sum(phase.work for phase in phases[: taken.number]) + here
        after = self._after * sum(self._epoch(place) for place in range(stage - self.first, len(self.plans)))
        left = (self.total - done + after) * self._seconds / self._work if self._work else None
        rate = taken.meter.images_per_second()
        return Progress(
            stage=stage,
            stages=stages,
            phase=loop.phase.name,
            epoch=loop.epoch + 1,
            epochs=epochs,
            step=loop.step,
            steps=loop.steps,
            terms=loop.terms(),
            images_per_second=rate,
            done=done / self.total if self.total else 1.0,
            seconds_left=left,
        )


class Meter:
    """Times the steps of a phase. On a GPU a step is only launched here; waiting for it shows in a later one."""

    def __init__(self, batch_size: int, now: Callable[[], float]) -> None:
        self.batch_size = batch_size
        self.now = now
        self.last = self.shown = now()
        self.epoch_seconds = 0.0
        self.steps = 0
        self._marks = deque([(self.shown, 0)])  # when it was shown, and the steps until then

    def step(self) -> float:
        """Seconds since the step before."""
        now = self.now()
        seconds, self.last = now - self.last, now
        self.epoch_seconds += seconds
        self.steps += 1
        return seconds

    def epoch(self) -> float:
        """Seconds of the epoch that ended."""
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        return seconds

    def due(self) -> bool:
        """Whether it is time to show something."""
        return self.now() - self.shown > PROGRESS_SECONDS

    def images_per_second(self) -> float:
        """The rate over the last seconds, or all of the phase where it is shorter; it is shown now."""
        now = self.shown = self.now()
        while len(self._marks) > 1 and now - self._marks[1][0] >= RATE_SECONDS:
            self._marks.popleft()
        since, before = self._marks[0]
        self._marks.append((now, self.steps))
        return (self.steps - before) * self.batch_size / max(now - since, 1e-9)


def predict(learner: Learner, engine: Engine, images: Tensor) -> dict[str, np.ndarray]:
    """The predicted label of each uint8 image (N, H, W, 3), by predictor.

    cnn: the class with the highest score. nme: the class whose mean of exemplars is nearest; only where there are
    class means.
    """
    embedding, scores = engine.infer(learner.network, images)
    predictions = {"cnn": scores.argmax(dim=1)}
    if learner.class_means is not None:
        # Means and embeddings have length 1, so the nearest mean has the largest product.
        predictions["nme"] = (F.normalize(embedding, dim=1) @ learner.class_means.T).argmax(dim=1)
    return {name: labels.to("cpu", torch.int16).numpy() for name, labels in predictions.items()}
