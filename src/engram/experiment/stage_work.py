"""The work of one stage: training, exemplars, class means and teacher; and estimates of the time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.contract import Method, Phase, Settings
from engram.contract.exemplars import class_means
from engram.contract.image_state import fit_image_state
from engram.contract.learner import Learner
from engram.contract.method import stage_phases
from engram.contract.optimisers import find_optimiser, try_optimiser
from engram.contract.predictors import ImageOutputs, need_means, predicted_scores
from engram.contract.schedules import learning_rates
from engram.contract.settings import trainings
from engram.core.errors import EngramError
from engram.core.events import EpochFinished, Event, PhaseStarted, Progress, Working
from engram.data.image_rows import Pixels
from engram.data.memory import MemoryConfig, try_selection
from engram.data.stage import Stage
from engram.engine import Engine, PhaseLoop, PhaseState
from engram.experiment.feature_pass import FeaturePass, FeaturesTaken
from engram.experiment.image_placement import refuse_changed_images
from engram.nn.network import Network, Part
from engram.runs.checked import Source, checked
from engram.runs.stored_run import StagePosition

PROGRESS_SECONDS = 0.2
RATE_SECONDS = 5.0
# Cost of an image, relative to training on it without a teacher; only for the estimate of the time left.
TEACHER_COST, FROZEN_COST = 1.5, 0.3
# Fixed cost of a step, in images: on an H200, a step of 16 images takes about 0.7 of the time of one of 128 (GDumb
# compared with other methods in results/methods-h200-1.json).
STEP_COST = 210
AFTER = 2.0  # cost of the work after training (importance, exemplars, test images), in epochs
# Names of the tensors of a phase in a checkpoint; those of extensions have PHASE before the extension's own name.
PHASE, ROWS, TERMS = "phase.", "phase.rows", "phase.terms"
OPTIMISER, IMAGES = "phase.optimiser.", "phase.images."
OLD_MOMENTUM = "phase.momentum."  # in checkpoints from before there were other optimisers than SGD


@dataclass(frozen=True)
class PhasePlan:
    """The plan of a phase. images, steps: of one epoch. work: a number proportional to the time of the phase."""

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
    """A step was taken in phase `number` of the stage. Now a checkpoint can be saved, or training stopped."""

    stage: int
    number: int
    loop: PhaseLoop
    timer: StepTimer
    seconds: float

    def ended(self, wait: bool = True) -> Iterator[EpochFinished]:
        """The events of epochs that ended since the last call; with `wait`, wait for the device to finish all of them.

        Yield them before saving a checkpoint: a run resumed from it does not repeat them.
        """
        name = self.loop.phase.name
        for epoch in self.loop.finished(wait):
            yield EpochFinished(self.stage, name, epoch.number + 1, epoch.terms, epoch.lr, self.timer.epoch())

    def state(self) -> tuple[int, PhaseState]:
        """The number of the phase and its state, to resume from with `StageWork.train`."""
        return self.number, self.loop.state()


def try_parts(phases: Iterable[Phase], settings: Settings, memory: MemoryConfig) -> None:
    """Refuse, before anything is trained, a schedule, an optimiser or a selection that does not work."""
    planned = [(phase.training, phase.batches(phase.images)[0]) for phase in phases if phase.images]
    planned += [(training, 2) for training in trainings(settings)]
    for training, steps in dict.fromkeys(planned):
        learning_rates(training, steps)
        try_optimiser(training)
    if memory.is_selected:
        try_selection(memory.selection)


def pack_phase(number: int, state: PhaseState) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The state of a phase as tensors and plain data, for a checkpoint."""
    tensors = {ROWS: state.rows} | {f"{OPTIMISER}{name}": value for name, value in state.optimiser.items()}
    tensors |= {f"{PHASE}{name}": value for name, value in state.extensions.items()}
    tensors |= {f"{IMAGES}{name}": value for name, value in state.image_state.items()}
    tensors |= {} if state.terms is None else {TERMS: state.terms}
    return tensors, {"number": number, "epoch": state.epoch, "step": state.step}


def unpack_phase(tensors: dict[str, Tensor], data: dict[str, Any] | None) -> tuple[int, PhaseState] | None:
    """Remove the state of a phase (see `pack_phase`) from the tensors and return it; None if there is none."""
    rows, terms = tensors.pop(ROWS, None), tensors.pop(TERMS, None)
    old, optimiser, image_state, extensions = (
        {name.removeprefix(kind): tensors.pop(name) for name in list(tensors) if name.startswith(kind)}
        for kind in (OLD_MOMENTUM, OPTIMISER, IMAGES, PHASE)
    )
    optimiser |= {f"momentum.{name}": value for name, value in old.items()}
    if data is None:
        return None
    assert rows is not None
    at = checked(StagePosition, data, Source("the checkpoint", "start again"))
    return at.number, PhaseState(rows, optimiser, at.epoch, at.step, extensions, terms, image_state)


def optimiser_fits(state: PhaseState, optimiser: str, network: Network) -> bool:
    """Whether a phase's state has exactly the tensors that the optimiser keeps for this network."""
    rule = find_optimiser(optimiser)
    parameters = {name: value.shape for name, value in network.named_parameters()}
    shapes = {f"{kind}.{name}": shape for kind in rule.state for name, shape in parameters.items()}
    shapes |= {kind: torch.Size([1]) for kind in rule.scalars}
    return {name: value.shape for name, value in state.optimiser.items()} == shapes


class StageWork:
    """Carries out one stage of a learner with a method and an engine.

    stages: total number, for the events. now: a clock in seconds, which may be paused. clock: the seconds spent are
    added here, by kind of work.
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
        self.phases: list[Phase] = []  # set when training starts
        self._feature_pass = FeaturePass(method, learner, engine, stage)

    def train(self, resume: tuple[int, PhaseState | None] | None = None) -> Iterator[Event | StepTaken | FeaturesTaken]:
        """Grow the head and take every step, then compute the features that the method needs.

        To stop, stop iterating after a StepTaken or FeaturesTaken.

        resume: number and state of a phase; the number of phases and None to continue with the features.
        """
        method, learner, stage, engine = self.method, self.learner, self.stage, self.engine
        first, state = resume or (0, None)
        self._fit_image_state()
        if resume is None:
            with self.timed("train"):
                method.grow(learner, stage, engine)
        self.phases = stage_phases(method, learner, stage, engine)
        try_parts(self.phases, method.settings, learner.memory.config)
        if state is not None:
            self._check_position(first, state)
        for number, phase in enumerate(self.phases):
            if number >= first:
                with self.timed("train"):
                    held = state if number == first else None
                    loop = engine.start(learner, stage, phase, number, held, reads_maps=method.needs_maps)
                yield from self._phase(number, loop)
        yield from self.features()

    def features(self) -> Iterator[FeaturesTaken]:
        """Compute the features that the method needs, of a network that is trained already."""
        features = self._feature_pass
        before, counted, started = features.done_before(), self.clock.get("features", 0.0), self.now()
        for done in features:
            spent = self.now() - started
            self.clock["features"] = counted + spent
            yield FeaturesTaken(self.stage.index, done, len(features.rows), (done - before) / max(spent, 1e-9))

    def _check_position(self, number: int, state: PhaseState) -> None:
        """Refuse to continue at a place that the phases of this stage do not have."""
        phase = self.phases[number] if number < len(self.phases) else None
        known = 0 if state.terms is None else len(state.terms)  # steps of this epoch whose loss was saved
        steps = 0 if phase is None else phase.batches(len(state.rows))[0]
        if phase is None or state.epoch > phase.training.epochs or not known <= state.step <= steps:
            place = f"phase {number}, epoch {state.epoch}, step {state.step}"
            raise EngramError(f"the checkpoint is damaged: this stage has no {place}; start again")
        if not optimiser_fits(state, phase.training.optimiser, self.learner.network):
            raise EngramError(
                f"the checkpoint is damaged: what it holds of the optimiser {phase.training.optimiser} does not fit "
                "the network, or the optimiser was changed; start again"
            )
        if not 0 <= int(state.rows.min()) <= int(state.rows.max()) < len(self.stage.pool):
            raise EngramError("the checkpoint is damaged: its images are not those of the stage; start again")

    def _fit_image_state(self) -> None:
        """Give each image of the pool the tensors that the method keeps per image."""
        capacity = max(self.learner.network.head.capacity, self.stage.num_seen)
        fit_image_state(self.method.image_state, self.stage.pool, capacity)

    def _phase(self, number: int, loop: PhaseLoop) -> Iterator[Event | StepTaken]:
        phase, index = loop.phase, self.stage.index
        yield PhaseStarted(index, phase.name, phase.training.epochs, len(loop.rows), loop.steps)
        if self.engine.is_cold:
            yield Working(index, self.stages, "kernels")
        timer = StepTimer(loop.batch_size, self.now)
        for _ in loop:
            seconds = timer.step()
            self._add("train", seconds)
            taken = StepTaken(index, number, loop, timer, seconds)
            yield from taken.ended(wait=False)
            yield taken
        for epoch in loop.finished(wait=True):
            self._add("train", timer.step())
            yield EpochFinished(index, phase.name, epoch.number + 1, epoch.terms, epoch.lr, timer.epoch())
        self._add("train", timer.step())

    def finish(self) -> Iterator[Event]:
        """The work after training: the method's computation, exemplars, class means, the teacher of the next stage."""
        method, learner, stage, engine = self.method, self.learner, self.stage, self.engine
        if self._feature_pass.views:
            with self.timed("features"):
                method.fit(learner, stage, self._feature_pass.take(), self._feature_pass.labels)
        if type(method).finish is not Method.finish:
            yield Working(stage.index, self.stages, "importance")
        with self.timed("importance"):
            method.finish(learner, stage, engine)
        yield Working(stage.index, self.stages, "exemplars")
        with self.timed("exemplars"):
            chosen = method.exemplars(learner, stage, engine)
            if engine.buffers.photographs is not None:
                refuse_changed_images(method, chosen.values())
            learner.memory.update(stage.pool, chosen, stage.num_seen)
            if need_means(method.predictors):
                learner.class_means = class_means(learner, engine)
            learner.snapshot_teacher()

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the time spent inside this context to that kind of work."""
        started = self.now()
        yield
        self._add(kind, self.now() - started)

    def _add(self, kind: str, seconds: float) -> None:
        self.clock[kind] = self.clock.get(kind, 0.0) + seconds


class TimeEstimate:
    """Progress of the planned stages, and an estimate of the time left.

    plans: the phases of each stage. first: the number of the first of these stages.
    """

    def __init__(self, plans: Sequence[Sequence[PhasePlan]], first: int = 0) -> None:
        self.plans = plans
        self.first = first
        self.total = sum(phase.work for phases in plans for phase in phases)
        self._work, self._seconds = 0.0, 0.0  # of the steps taken in this process
        self._after = AFTER

    def step(self, taken: StepTaken) -> None:
        """Count a step; except the first of a phase, in which kernels are compiled and the step is recorded."""
        if taken.timer.steps == 1:
            return
        planned = PhasePlan.of(taken.loop.phase)
        self._work += planned.work / max(1, planned.epochs * planned.steps)
        self._seconds += taken.seconds

    def stage(self, stage: int, clock: dict[str, float]) -> None:
        """Measure the work after the training of a stage; except for the first stage, which includes compilation."""
        epoch = self._epoch(stage - self.first)
        if stage > self.first and self._seconds and epoch:
            rest = sum(seconds for kind, seconds in clock.items() if kind != "train")
            self._after = rest / epoch * self._work / self._seconds

    def _epoch(self, place: int) -> float:
        """The work of an epoch in the first phase of a stage."""
        return next((phase.work / max(1, phase.epochs) for phase in self.plans[place]), 0.0)

    def progress(self, stage: int, stages: int, taken: StepTaken) -> Progress:
        """The progress event after a step."""
        loop, phases = taken.loop, self.plans[stage - self.first]
        epochs = loop.phase.training.epochs
        before = sum(phase.work for phases in self.plans[: stage - self.first] for phase in phases)
        here = phases[taken.number].work * (loop.epoch * loop.steps + loop.step) / (epochs * loop.steps)
        done = before + sum(phase.work for phase in phases[: taken.number]) + here
        after = self._after * sum(self._epoch(place) for place in range(stage - self.first, len(self.plans)))
        left = (self.total - done + after) * self._seconds / self._work if self._work else None
        rate = taken.timer.images_per_second()
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


class StepTimer:
    """Measures the time of the steps of a phase. On a GPU, the time of a step may be counted in a later one."""

    def __init__(self, batch_size: int, now: Callable[[], float]) -> None:
        self.batch_size = batch_size
        self.now = now
        self.last = self.shown = now()
        self.epoch_seconds = 0.0
        self.steps = 0
        self._marks = deque([(self.shown, 0)])  # times when progress was shown, and the steps until then

    def step(self) -> float:
        """Count a step; return the seconds since the previous one."""
        now = self.now()
        seconds, self.last = now - self.last, now
        self.epoch_seconds += seconds
        self.steps += 1
        return seconds

    def epoch(self) -> float:
        """Seconds of the epoch that ended; starts the next one."""
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        return seconds

    def due(self) -> bool:
        """Whether it is time to show progress."""
        return self.now() - self.shown > PROGRESS_SECONDS

    def images_per_second(self) -> float:
        """The rate over the last RATE_SECONDS, or over the phase if it is shorter; call it when progress is shown."""
        now = self.shown = self.now()
        while len(self._marks) > 1 and now - self._marks[1][0] >= RATE_SECONDS:
            self._marks.popleft()
        since, before = self._marks[0]
        self._marks.append((now, self.steps))
        return (self.steps - before) * self.batch_size / max(now - since, 1e-9)


def best_label(scores: Tensor) -> np.ndarray:
    """The label (N,) with the highest of the scores (N, K)."""
    return scores.argmax(dim=1).to("cpu", torch.int16).numpy()


def class_scores(
    learner: Learner, engine: Engine, images: Pixels, predictors: Iterable[str], when: str = ""
) -> dict[str, Tensor]:
    """The scores (N, K) of uint8 images (N, H, W, 3) for the classes seen, by predictor.

    when: for messages, such as "after stage 1, ".
    """
    outputs = ImageOutputs(engine.inference(learner.network).outputs(images))
    found = {name: predicted_scores(name, learner, outputs) for name in predictors}
    for name, scores in found.items():
        if bool(scores.isnan().any()):
            state = learner.network.state_dict()
            wrong = next((key for key, value in state.items() if bool(value.isnan().any())), None)
            where = f"look at the predictor {name!r}"
            if wrong is not None:
                where = f"{wrong} of the network has such values: look at what the method does after training (finish)"
            raise EngramError(f"{when}the predictor {name!r} returned scores that are not numbers (NaN); {where}")
    return found
