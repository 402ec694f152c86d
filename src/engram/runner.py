"""Runs: a session, step by step, with its files. They yield events and draw nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engram.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from engram.config import RunConfig
from engram.data.load import load_store
from engram.data.store import ImageStore
from engram.engine import PhaseLoop, PhaseState
from engram.errors import EngramError
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
from engram.methods.exemplars import choose_exemplars, class_means
from engram.result import Result, StageRecord, summarise
from engram.rundir import RunDirectory, hardware, read_manifest, version
from engram.session import PhasePlan, Session

PROGRESS_SECONDS = 0.2
UNLOGGED = (Progress, Working)


def run(
    config: RunConfig,
    store: ImageStore | None = None,
    directory: str | Path | None = None,
    *,
    stop: Callable[[], bool] | None = None,
    stop_after_stage: int | None = None,
    checkpoint_minutes: float = 10.0,
    command: str | None = None,
) -> Iterator[Event]:
    """The events of a run, which takes place as they are consumed.

    directory: where the run keeps its files; None writes nothing. store: the images, where the configuration does not
    name them. stop is asked after every step; when it says yes the run saves itself and ends.
    """
    session = Session(config, load_store(config.data) if store is None else store)
    files = None
    if directory is not None:
        files = RunDirectory.create(Path(directory), {**_manifest(session), "command": command})
    yield from _Run(session, files, stop, stop_after_stage, checkpoint_minutes).events(resumed=False)


def resume(
    directory: str | Path,
    store: ImageStore | None = None,
    *,
    stop: Callable[[], bool] | None = None,
    stop_after_stage: int | None = None,
    checkpoint_minutes: float = 10.0,
    data_path: str | None = None,
) -> Iterator[Event]:
    """The events of going on with the run in a directory from its last checkpoint.

    data_path: where the images are now, if they moved.
    """
    path = Path(directory)
    manifest = read_manifest(path)
    config = RunConfig.from_plain(manifest["config"])
    if config.fingerprint() != manifest["config_hash"]:
        raise EngramError(f"the configuration in {path / 'run.json'} was changed after the run began; start a new run")
    if store is None:
        data = config.data if data_path is None else config.with_value("data.path", data_path).data
        store = load_store(data)
    files = RunDirectory.open(path)
    try:
        checkpoint = load_checkpoint(files.checkpoint) if files.checkpoint.exists() else None
        if checkpoint is not None and checkpoint.data.get("config_hash") != manifest["config_hash"]:
            raise EngramError(f"the checkpoint in {path} belongs to another configuration than its run.json")
        if store.fingerprint() != manifest["data"]["fingerprint"]:
            raise EngramError(
                f"the images are not those that the run in {path} began with; give the same data with --data"
            )
        session = Session(config, store)
        going = _Run(session, files, stop, stop_after_stage, checkpoint_minutes)
        if checkpoint is not None:
            going.restore(checkpoint)
    except BaseException:
        files.close()
        raise
    yield from going.events(resumed=True)


def train(config: RunConfig, store: ImageStore | None = None, directory: str | Path | None = None) -> Result:
    """The result of a run, start to end."""
    result = None
    for event in run(config, store, directory):
        if isinstance(event, RunFinished):
            result = event.result
    assert result is not None
    return result  # pyright: ignore[reportReturnType]


def _manifest(session: Session) -> dict[str, Any]:
    """What run.json says of a run beside versions and dates."""
    config, store, stream = session.config, session.store, session.stream
    return {
        "recipe": config.recipe,
        "config": config.to_plain(),
        "config_hash": config.fingerprint(),
        "card": config.card(store),
        "data": {
            "name": store.name,
            "class_names": list(store.class_names),
            "image_size": list(store.image_size),
            "train_images": len(store.train),
            "test_images": len(store.test),
            "skipped": list(store.skipped),
            "fingerprint": store.fingerprint(),
        },
        "order": {"name": config.order, "class_ids": list(stream.order)},
        "stage_sizes": list(stream.sizes),
        "predictors": list(session.method.predictors),
        "hardware": hardware(str(session.engine.device), session.device_name),
    }


class _Run:
    """A run in progress: where it stands, and what it has measured."""

    def __init__(
        self,
        session: Session,
        files: RunDirectory | None,
        stop: Callable[[], bool] | None,
        stop_after_stage: int | None,
        checkpoint_minutes: float,
    ) -> None:
        self.session = session
        self.files = files
        self.stop = stop or (lambda: False)
        self.stop_after_stage = stop_after_stage
        self.checkpoint_seconds = checkpoint_minutes * 60
        self.records: list[StageRecord] = []
        self.clock: dict[str, float] = {}  # seconds of the stage in progress, by kind of work
        self.phase_at: tuple[int, PhaseState] | None = None  # the phase to go on with, and where it stands
        self.plan = session.plan()
        self.work_total = sum(phase.work for stage in self.plan for phase in stage.phases)
        self.work_here, self.seconds_here = 0.0, 0.0  # done in this process, for the rate
        self.saved_at = time.monotonic()

    @property
    def directory(self) -> str | None:
        return None if self.files is None else str(self.files.path)

    def events(self, resumed: bool) -> Iterator[Event]:
        """All events, each written to events.jsonl before it is passed on."""
        try:
            for event in self._events(resumed):
                if self.files is not None and not isinstance(event, UNLOGGED):
                    self.files.append(event)
                yield event
        finally:
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
        if self.phase_at is None:
            self.clock = {}
            with self._clocked("train"):
                method.grow(learner, stage, engine)
        first, state = self.phase_at or (0, None)
        self.phase_at = None
        for number, phase in enumerate(method.phases(learner, stage, engine)):
            if number >= first:
                loop = engine.start(learner, stage, phase, number, state if number == first else None)
                stopped = yield from self._phase(index, number, loop)
                if stopped:
                    return True
        if type(method).finish is not Method.finish:
            yield Working(index, stages, "importance")
        with self._clocked("importance"):
            method.finish(learner, stage, engine)
        yield Working(index, stages, "exemplars")
        with self._clocked("exemplars"):
            learner.memory.update(stage.pool, choose_exemplars(learner, stage, engine), stage.num_seen)
            if "nme" in method.predictors:
                learner.class_means = class_means(learner, engine)
            learner.snapshot_teacher()
        yield Working(index, stages, "evaluate")
        with self._clocked("evaluate"):
            accuracy, by_stage, arrays = session.evaluate(index)
        record = StageRecord(index, stage.num_seen, accuracy, sum(self.clock.values()), by_stage, dict(self.clock))
        self.records.append(record)
        learner.stages_done = index + 1
        if self.files is not None:
            self.files.write_stage(index, arrays)
            self.files.write_result(dict(self._result()))
            self._save(None)
        for note in learner.notes:
            yield Warned(note)
        learner.notes.clear()
        average = self._result()["average_incremental_accuracy"]
        yield StageFinished(index, stages, stage.num_seen, accuracy, by_stage, average, record.seconds)
        return False

    def _phase(self, index: int, number: int, loop: PhaseLoop) -> Generator[Event, None, bool]:
        """The steps of a phase; returns whether it was asked to stop inside."""
        phase, epochs = loop.phase, loop.phase.training.epochs
        yield PhaseStarted(index, phase.name, epochs, len(loop.rows), loop.steps)
        planned = PhasePlan.of(phase)
        per_step = planned.work / max(1, planned.epochs * planned.steps)
        meter = _Meter(loop.batch_size)
        for _ in loop:
            seconds = meter.step()
            self._add("train", seconds)
            self.work_here, self.seconds_here = self.work_here + per_step, self.seconds_here + seconds
            if loop.step == loop.steps:
                yield EpochFinished(
                    index, phase.name, loop.epoch + 1, loop.terms(), loop.learning_rate(), meter.epoch()
                )
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
        loop.check_finite()
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
        started = time.monotonic()
        yield
        self._add(kind, time.monotonic() - started)

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
            "config_hash": self.session.config.fingerprint(),
            "records": [asdict(record) for record in self.records],
            "clock": self.clock,
            "phase": None,
        }
        if phase is not None:
            number, state = phase
            tensors |= {"phase.rows": state.rows, "phase.momentum": state.momentum}
            data["phase"] = {"number": number, "epoch": state.epoch, "step": state.step}
        save_checkpoint(self.files.checkpoint, Checkpoint(tensors, data))
        self.saved_at = time.monotonic()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes over where a checkpoint stood."""
        tensors, data = dict(checkpoint.tensors), checkpoint.data
        phase = data["phase"]
        rows, momentum = tensors.pop("phase.rows", None), tensors.pop("phase.momentum", None)
        self.session.learner.load_state_dict(tensors)
        self.records = [StageRecord(**record) for record in data["records"]]
        self.session.learner.stages_done = len(self.records)
        self.clock = dict(data["clock"])
        if phase is not None:
            assert rows is not None
            assert momentum is not None
            momentum = momentum.to(self.session.engine.device)
            self.phase_at = (phase["number"], PhaseState(rows, momentum, phase["epoch"], phase["step"]))


class _Meter:
    """Times the steps of a phase. On a GPU a step is only launched here; waiting for it shows in a later one."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.last = self.shown = time.monotonic()
        self.epoch_seconds = 0.0
        self.shown_steps = 0

    def step(self) -> float:
        """Seconds since the step before."""
        now = time.monotonic()
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
        return time.monotonic() - self.shown > PROGRESS_SECONDS

    def images_per_second(self) -> float:
        """The rate since it was last shown."""
        now = time.monotonic()
        rate = self.shown_steps * self.batch_size / max(now - self.shown, 1e-9)
        self.shown, self.shown_steps = now, 0
        return rate
