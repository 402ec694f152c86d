"""Execution of a run: its stages in order, their results, and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from typing import Any

import torch

from engram.core import metrics
from engram.core.checkpoint import Checkpoint, save_checkpoint, tensors_digest
from engram.core.errors import option, spelled
from engram.core.events import (
    Checkpointed,
    Event,
    ImagesPlaced,
    Progress,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Stopped,
    Warned,
    Working,
)
from engram.core.provenance import own_code, version
from engram.engine import PhaseState
from engram.experiment.base_cache import SharedBase, StageCache
from engram.experiment.feature_pass import FeaturesTaken
from engram.experiment.session import Session
from engram.experiment.stage_work import StageWork, StepTaken, TimeEstimate, pack_phase, unpack_phase
from engram.runs.directory import TASK_PREDICTIONS, RunDirectory
from engram.runs.result import Result, StageRecord, order_value, summarise

UNLOGGED = (Progress, Working)
AGREED_STEPS = 16  # steps on GPUs after which several processes agree on whether to stop or to save
EXEMPLARS = "memory.images"  # the sources of the exemplars tell as much


class RunExecution:
    """A run in progress, with the records of its finished stages."""

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
        self.processes = session.processes
        self.files = files  # None in all processes but the first
        self.wants_to_stop = stop or (lambda: False)
        self.base = SharedBase(session, cache, self.directory or session.config.recipe, self.stop)
        self.stop_after_stage = stop_after_stage
        self.checkpoint_seconds = checkpoint_minutes * 60
        self.records: list[StageRecord] = []
        self.clock: dict[str, float] = {}  # seconds of the stage in progress, by kind of work
        self.phase_at: tuple[int, PhaseState] | None = None  # number and state of the phase to resume
        self.estimate = TimeEstimate([stage.phases for stage in session.plan()])
        self.card = session.card()
        self.saved_at = time.monotonic()
        self.away = 0.0  # seconds spent by the consumer of the events, not by this run

    def stop(self) -> bool:
        """Whether any process wants to stop: they all stop at the same step."""
        return self.processes.any(self.wants_to_stop())[0]

    def now(self) -> float:
        """A clock in seconds that is paused while the consumer of the events works."""
        return time.monotonic() - self.away

    @property
    def directory(self) -> str | None:
        return None if self.files is None else str(self.files.path)

    def events(self, resumed: bool) -> Iterator[Event]:
        """All events; each is written to events.jsonl before it is yielded."""
        if self.files is not None:
            self.files.clear_error()
        try:
            for event in self._events(resumed):
                if self.files is not None and not isinstance(event, UNLOGGED):
                    self.files.append(event)
                left = time.monotonic()
                yield event
                self.away += time.monotonic() - left
        except Exception as error:
            if self.files is not None:
                self.files.write_error(error)
            raise
        finally:
            self.base.release()
            if self.files is not None:
                self.files.close()

    def _events(self, resumed: bool) -> Iterator[Event]:
        session = self.session
        stages = len(session.stream)
        config = session.config
        yield RunStarted(config.recipe, config.method, self.directory, stages, self.card, resumed)
        if session.store.skipped:
            shown = ", ".join(session.store.skipped[:3])
            yield Warned(f"{len(session.store.skipped)} unreadable images were skipped: {shown}")
        if self.files is not None and resumed and len(self.records) < stages:
            yield from self._other_threads()
            yield from self._other_processes()
            yield from self._other_code()
        if self.files is not None and self.records:
            self.files.write_result(dict(self._result()))
        while len(self.records) < stages:
            index = len(self.records)
            if self.stop_after_stage is not None and index > self.stop_after_stage:
                yield Stopped(index - 1, stages, "stopped after the requested stage", self.directory)
                return
            stopped = yield from self._stage(index)
            if stopped:
                yield Stopped(index, stages, "interrupted", self.directory)
                return
        yield RunFinished(dict(self._result()), self.directory)

    def _other_threads(self) -> Iterator[Event]:
        """Warn if the run continues with another number of CPU threads, which the last bits of sums depend on."""
        assert self.files is not None
        begun, now = self.files.manifest.get("hardware", {}).get("threads"), torch.get_num_threads()
        if self.session.engine.device.type == "cpu" and begun not in (None, now):
            began = f"{self.directory} started with {begun} CPU thread{'' if begun == 1 else 's'}"
            yield Warned(
                spelled(
                    f"{began} and continues with {now}, so its last bits will differ from a run that was never "
                    f"stopped; torch.set_num_threads({begun}) or {option('threads', begun)} keeps them"
                )
            )

    def _other_processes(self) -> Iterator[Event]:
        """Warn if the run continues with another number of processes, which the last bits of sums depend on."""
        assert self.files is not None
        begun, now = self.files.manifest.get("hardware", {}).get("processes", 1), self.processes.count
        if begun != now:
            yield Warned(
                f"{self.directory} started with {begun} process{'' if begun == 1 else 'es'} and continues with {now}, "
                "so its last bits will differ from a run that was never stopped"
            )

    def _other_code(self) -> Iterator[Event]:
        """Warn if code of the user, such as a method or an optimiser, was edited since the run started."""
        assert self.files is not None
        config, from_start = self.session.config, not self.records and self.phase_at is None
        now, own = config.code_versions(), config.own_parts()
        changed = self.files.record_code(now, from_start)
        by_file: dict[str, list[str]] = {}
        for kind in [] if from_start else changed:
            file = str(now.get(f"{kind}_file") or self.files.manifest["versions"].get(f"{kind}_file", ""))
            by_file.setdefault(file, []).append(kind)
        for file, kinds in by_file.items():
            named = [name for kind in kinds for name in own.get(kind, [kind.replace("_", " ")])]
            where = f" in {file}" if file else ""
            yield Warned(
                f"the code of the {', '.join(named)}{where} was changed since {self.directory} was trained, so the "
                "result will mix both versions; start a new run to use only one"
            )

    def _stage(self, index: int) -> Generator[Event, None, bool]:
        """Carry out one stage, from its start or from a checkpoint; return whether the run was stopped in it."""
        session, stages = self.session, len(self.session.stream)
        stage = session.stage(index)
        names = [session.store.class_names[session.stream.order[label]] for label in stage.new_labels]
        yield StageStarted(index, stages, names, stage.num_seen, len(stage.pool), int(stage.pool.exemplar.sum()))
        placement, message = session.placed
        if message is not None:
            yield ImagesPlaced(index, stages, placement, message)
        if self.phase_at is None:
            self.clock = {}
        work = StageWork(session.method, session.learner, session.engine, stage, stages, self.now, self.clock)
        stopped = yield from self._train(index, work)
        if stopped:
            return True
        yield from work.finish()
        yield Working(index, stages, "evaluate")
        with work.timed("evaluate"):
            accuracy, by_stage, arrays = session.evaluate(index)
        for note in session.learner.notes:
            yield Warned(spelled(note))
        session.learner.notes.clear()  # before saving, or a resumed run would repeat them
        known = {name: metrics.accuracy(arrays["targets"], arrays[f"{TASK_PREDICTIONS}{name}"]) for name in accuracy}
        seconds, by_kind = sum(self.clock.values()), dict(self.clock)
        self._check_replicas(index)
        record = StageRecord(index, stage.num_seen, accuracy, seconds, by_stage, by_kind, known)
        self.records.append(record)
        self.estimate.stage(index, self.clock)
        if self.files is not None:
            # In this order: if the process ends in between, a checkpoint is never without its arrays, and the result
            # can be written again from the checkpoint.
            self.files.write_stage(index, arrays)
            self._save(None)
            self.files.write_result(dict(self._result()))
        average = self._result()["average_incremental_accuracy"]
        yield StageFinished(index, stages, stage.num_seen, accuracy, by_stage, average, record.seconds, known)
        return False

    def _train(self, index: int, work: StageWork) -> Generator[Event, None, bool]:
        """Train, or load the base stage from the cache; return whether the run was stopped."""
        resume, self.phase_at = self.phase_at, None
        outcome = "train"
        if index == 0 and resume is None:
            outcome = yield from self.base.take()
            if outcome == "stopped":
                return True
        elif index == 0:
            yield from self.base.claim()  # continue with or without the claim
        for event in work.train(resume) if outcome == "train" else work.features():
            if isinstance(event, FeaturesTaken):
                if outcome == "train" and index == 0:
                    yield from self.base.share()  # now: the features can be computed again, the training is longer
                    outcome = "shared"
                yield event.progress(len(self.session.stream))
                if self.stop():  # they are computed again when the run is resumed
                    return True
            elif not isinstance(event, StepTaken):
                yield event
            elif (yield from self._after_step(index, event)):
                return True
        if index == 0 and outcome == "train":
            yield from self.base.share()
        return False

    def _after_step(self, index: int, taken: StepTaken) -> Generator[Event, None, bool]:
        """Yield progress and save checkpoints when they are due; return whether the run was stopped."""
        self.estimate.step(taken)
        if taken.timer.due():
            yield self.estimate.progress(index, len(self.session.stream), taken)
        is_shared_gpu = self.processes.count > 1 and self.session.engine.device.type == "cuda"
        if is_shared_gpu and taken.loop.step % AGREED_STEPS:  # to ask the others takes a part of a step
            return False
        is_due = self.files is not None and time.monotonic() - self.saved_at > self.checkpoint_seconds
        stopped, is_due = self.processes.any(self.wants_to_stop(), is_due)
        if is_due or (stopped and (self.files is not None or self.processes.count > 1)):
            yield from self._checkpoint(taken)
        return stopped

    def _check_replicas(self, index: int) -> None:
        """Refuse to continue with processes that have not learned the same, bit by bit."""
        if self.processes.count > 1:
            state = {name: value for name, value in self.session.learner.state_dict().items() if name != EXEMPLARS}
            what = f"has another {{name}} after stage {index}"
            self.processes.check_equal({"state (by its digest)": tensors_digest(state)}, what)

    def _checkpoint(self, taken: StepTaken) -> Iterator[Event]:
        """Save a checkpoint inside a phase, after yielding the epochs that ended before it."""
        yield from taken.ended()
        state = taken.state()
        if self.files is not None:
            self._save(state)
            yield Checkpointed(taken.stage, taken.loop.phase.name, taken.loop.epoch + 1)

    def _result(self) -> Result:
        config = self.session.config
        identity = {
            "engram": version(),
            "recipe": config.recipe,
            "method": config.method,
            "dataset": self.session.store.name,
            "order": order_value(config.order),
            "seed": config.seed,
            "precision": self.session.engine.precision,
        }
        versions = config.code_versions() if self.files is None else self.files.manifest.get("versions", {})
        code = own_code(versions)
        identity |= {"code": code} if code else {}
        return summarise(identity, self.records)

    def _save(self, phase: tuple[int, PhaseState] | None) -> None:
        """Write a checkpoint. phase: number and state of the phase it is inside; None: between stages."""
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
            packed, data["phase"] = pack_phase(number, state)
            tensors |= packed
        save_checkpoint(self.files.checkpoint, Checkpoint(tensors, data), self.files.path)
        self.saved_at = time.monotonic()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint."""
        tensors, data = dict(checkpoint.tensors), checkpoint.data
        self.phase_at = unpack_phase(tensors, data["phase"])
        self.session.learner.load_state_dict(tensors)
        self.records = [StageRecord(**record) for record in data["records"]]
        self.clock = dict(data["clock"])
        self.session.learner.notes[:] = data.get("notes", [])
