"""A run in progress: the stages one after the other, what they measure, and the checkpoints between."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from engram.checkpoint import Checkpoint, save_checkpoint
from engram.data.stage import Stage
from engram.engine import PhaseLoop, PhaseState
from engram.events import (
    Checkpointed,
    EpochFinished,
    Event,
    PhaseStarted,
    Progress,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Stopped,
    Warned,
    Working,
)
from engram.methods import Method
from engram.methods.exemplars import class_means
from engram.result import Result, StageRecord, summarise
from engram.rundir import RunDirectory, version
from engram.session import PhasePlan, Session
from engram.sharedbase import SharedBase
from engram.stagecache import StageCache

PROGRESS_SECONDS = 0.2
MOMENTUM, PATH = "phase.momentum.", "phase.path."
UNLOGGED = (Progress, Working)


class Execution:
    """A run in progress: where it stands, and what it has measured."""

    def __init__(
        self,
        session: Session,
        files: RunDirectory | None,
        stop: Callable[[], bool] | None,
        stop_after_stage: int | None,
        checkpoint_minutes: float,
        cache: StageCache | None,
    ) -> None:
        self.session = session
        self.files = files
        self.stop = stop or (lambda: False)
        self.base = SharedBase(session, cache, self.directory or session.config.recipe, self.stop)
        self.stop_after_stage = stop_after_stage
        self.checkpoint_seconds = checkpoint_minutes * 60
        self.records: list[StageRecord] = []
        self.clock: dict[str, float] = {}  # seconds of the stage in progress, by kind of work
        self.phase_at: tuple[int, PhaseState] | None = None  # the phase to go on with, and where it stands
        self.plan = session.plan()
        self.work_total = sum(phase.work for stage in self.plan for phase in stage.phases)
        self.work_here, self.seconds_here = 0.0, 0.0  # done in this process, for the rate
        self.saved_at = time.monotonic()
        self.away = 0.0  # seconds spent by whoever consumes the events; not this run's

    def now(self) -> float:
        """Seconds on a clock that stands still while the consumer of the events is at work."""
        return time.monotonic() - self.away

    @property
    def directory(self) -> str | None:
        return None if self.files is None else str(self.files.path)

    def events(self, resumed: bool) -> Iterator[Event]:
        """All events, each written to events.jsonl before it is passed on."""
        try:
            for event in self._events(resumed):
                if self.files is not None and not isinstance(event, UNLOGGED):
                    self.files.append(event)
                left = time.monotonic()
                yield event
                self.away += time.monotonic() - left
        finally:
            self.base.release()
            if self.files is not None:
                self.files.close()

    def _events(self, resumed: bool) -> Iterator[Event]:
        session = self.session
        stages = len(session.stream)
        card = session.config.card(session.store)
        yield RunStarted(session.config.recipe, session.config.method, self.directory, stages, card, resumed)
        if session.store.skipped:
            shown = ", ".join(session.store.skipped[:3])
            yield Warned(f"{len(session.store.skipped)} unreadable images were left out: {shown}")
        if self.files is not None and self.records:
            self.files.write_result(dict(self._result()))
        while len(self.records) < stages:
            index = len(self.records)
            if self.stop_after_stage is not None and index > self.stop_after_stage:
                yield Stopped(index - 1, stages, "stopped after the stage asked for", self.directory)
                return
            stopped = yield from self._stage(index)
            if stopped:
                yield Stopped(index, stages, "interrupted", self.directory)
                return
        yield RunFinished(dict(self._result()), self.directory)

    def _stage(self, index: int) -> Generator[Event, None, bool]:
        """One stage, whole or from where it stood; returns whether it was asked to stop inside."""
        session, stages = self.session, len(self.session.stream)
        stage = session.stage(index)
        names = [session.store.class_names[session.stream.order[label]] for label in stage.new_labels]
        yield StageStarted(index, stages, names, stage.num_seen, len(stage.pool), int(stage.pool.exemplar.sum()))
        learner, method, engine = session.learner, session.method, session.engine
        stopped = yield from self._train(index, stage)
        if stopped:
            return True
        if type(method).finish is not Method.finish:
            yield Working(index, stages, "importance")
        with self._clocked("importance"):
            method.finish(learner, stage, engine)
        yield Working(index, stages, "exemplars")
        with self._clocked("exemplars"):
            learner.memory.update(stage.pool, method.exemplars(learner, stage, engine), stage.num_seen)
            if "nme" in method.predictors:
                learner.class_means = class_means(learner, engine)
            learner.snapshot_teacher()
        yield Working(index, stages, "evaluate")
        with self._clocked("evaluate"):
            accuracy, by_stage, arrays = session.evaluate(index)
        record = StageRecord(index, stage.num_seen, accuracy, sum(self.clock.values()), by_stage, dict(self.clock))
        self.records.append(record)
        if self.files is not None:
            # In this order: whatever moment it is cut off at, the checkpoint vouches for the arrays, and the result can
            # be written again from the checkpoint.
            self.files.write_stage(index, arrays)
            self._save(None)
            self.files.write_result(dict(self._result()))
        for note in learner.notes:
            yield Warned(note)
        learner.notes.clear()
        average = self._result()["average_incremental_accuracy"]
        yield StageFinished(index, stages, stage.num_seen, accuracy, by_stage, average, record.seconds)
        return False

    def _train(self, index: int, stage: Stage) -> Generator[Event, None, bool]:
        """Grows the head and trains, from the start or from where it stood; returns whether it was asked to stop."""
        session = self.session
        learner, method, engine = session.learner, session.method, session.engine
        first, state = self.phase_at or (0, None)
        self.phase_at = None
        if state is None:
            self.clock = {}
            if index == 0:
                how = yield from self.base.take()
                if how != "train":
                    return how == "stopped"
            with self._clocked("train"):
                method.grow(learner, stage, engine)
        elif index == 0:
            yield from self.base.claim()  # whether it gets it or not: it has begun
        for number, phase in enumerate(method.phases(learner, stage, engine)):
            if number >= first:
                with self._clocked("train"):
                    loop = engine.start(learner, stage, phase, number, state if number == first else None)
                if (yield from self._phase(index, number, loop)):
                    return True
        if index == 0:
            yield from self.base.share()
        return False

    def _phase(self, index: int, number: int, loop: PhaseLoop) -> Generator[Event, None, bool]:
        """The steps of a phase; returns whether it was asked to stop inside."""
        phase, epochs = loop.phase, loop.phase.training.epochs
        yield PhaseStarted(index, phase.name, epochs, len(loop.rows), loop.steps)
        if self.session.engine.is_cold:
            yield Working(index, len(self.plan), "kernels")
        planned = PhasePlan.of(phase)
        per_step = planned.work / max(1, planned.epochs * planned.steps)
        meter = Meter(loop.batch_size, self.now)
        for _ in loop:
            seconds = meter.step()
            self._add("train", seconds)
            self.work_here, self.seconds_here = self.work_here + per_step, self.seconds_here + seconds
            for epoch in loop.finished():
                yield EpochFinished(index, phase.name, epoch.number + 1, epoch.terms, epoch.lr, meter.epoch())
            if meter.due():
                yield self._progress(index, number, loop, meter.images_per_second())
            if self.files is not None and time.monotonic() - self.saved_at > self.checkpoint_seconds:
                self._save((number, loop.state()))
                yield Checkpointed(index, phase.name, loop.epoch)
            if self.stop():
                if self.files is not None:
                    self._save((number, loop.state()))
                    yield Checkpointed(index, phase.name, loop.epoch)
                return True
        for epoch in loop.finished(wait=True):
            self._add("train", meter.step())
            yield EpochFinished(index, phase.name, epoch.number + 1, epoch.terms, epoch.lr, meter.epoch())
        self._add("train", meter.step())
        return False

    def _progress(self, index: int, number: int, loop: PhaseLoop, rate: float) -> Progress:
        before = sum(phase.work for stage in self.plan[:index] for phase in stage.phases)
        phases = self.plan[index].phases
        here = phases[number].work * (loop.epoch * loop.steps + loop.step) / (loop.phase.training.epochs * loop.steps)
        done = before + sum(phase.work for phase in phases[:number]) + here
        left = (self.work_total - done) * self.seconds_here / self.work_here if self.work_here else None
        return Progress(
            stage=index,
            stages=len(self.plan),
            phase=loop.phase.name,
            epoch=loop.epoch + 1,
            epochs=loop.phase.training.epochs,
            step=loop.step,
            steps=loop.steps,
            terms=loop.terms(),
            images_per_second=rate,
            done=done / self.work_total if self.work_total else 1.0,
            seconds_left=left,
        )

    @contextmanager
    def _clocked(self, kind: str) -> Iterator[None]:
        started = self.now()
        yield
        self._add(kind, self.now() - started)

    def _add(self, kind: str, seconds: float) -> None:
        self.clock[kind] = self.clock.get(kind, 0.0) + seconds

    def _result(self) -> Result:
        config = self.session.config
        identity = {
            "engram": version(),
            "recipe": config.recipe,
            "method": config.method,
            "dataset": self.session.store.name,
            "order": int(config.order) if config.order.isdecimal() else config.order,
            "seed": config.seed,
        }
        return summarise(identity, self.records)

    def _save(self, phase: tuple[int, PhaseState] | None) -> None:
        """Writes a checkpoint: between stages, or inside the phase given."""
        assert self.files is not None
        tensors = self.session.learner.state_dict()
        data: dict[str, Any] = {
            "config_hash": self.files.manifest["config_hash"],
            "records": [asdict(record) for record in self.records],
            "clock": self.clock,
            "notes": self.session.learner.notes,
            "phase": None,
        }
        if phase is not None:
            number, state = phase
            tensors |= {"phase.rows": state.rows}
            tensors |= {f"{MOMENTUM}{name}": value for name, value in state.momentum.items()}
            tensors |= {f"{PATH}{name}": value for name, value in state.path.items()}
            data["phase"] = {"number": number, "epoch": state.epoch, "step": state.step}
        save_checkpoint(self.files.checkpoint, Checkpoint(tensors, data))
        self.saved_at = time.monotonic()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes over where a checkpoint stood."""
        tensors, data = dict(checkpoint.tensors), checkpoint.data
        phase = data["phase"]
        rows = tensors.pop("phase.rows", None)
        momentum, path = (
            {name.removeprefix(kind): tensors.pop(name) for name in list(tensors) if name.startswith(kind)}
            for kind in (MOMENTUM, PATH)
        )
        self.session.learner.load_state_dict(tensors)
        self.records = [StageRecord(**record) for record in data["records"]]
        self.clock = dict(data["clock"])
        self.session.learner.notes[:] = data.get("notes", [])
        if phase is not None:
            assert rows is not None
            self.phase_at = (phase["number"], PhaseState(rows, momentum, phase["epoch"], phase["step"], path))


class Meter:
    """Times the steps of a phase. On a GPU a step is only launched here; waiting for it shows in a later one."""

    def __init__(self, batch_size: int, now: Callable[[], float]) -> None:
        self.batch_size = batch_size
        self.now = now
        self.last = self.shown = now()
        self.epoch_seconds = 0.0
        self.shown_steps = 0

    def step(self) -> float:
        """Seconds since the step before."""
        now = self.now()
        seconds, self.last = now - self.last, now
        self.epoch_seconds += seconds
        self.shown_steps += 1
        return seconds

    def epoch(self) -> float:
        """Seconds of the epoch that ended."""
        seconds, self.epoch_seconds = self.epoch_seconds, 0.0
        return seconds

    def due(self) -> bool:
        """Whether it is time to show something."""
        return self.now() - self.shown > PROGRESS_SECONDS

    def images_per_second(self) -> float:
        """The rate since it was last shown."""
        now = self.now()
        rate = self.shown_steps * self.batch_size / max(now - self.shown, 1e-9)
        self.shown, self.shown_steps = now, 0
        return rate
