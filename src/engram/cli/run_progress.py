"""Progress of several runs: which are active, waiting, done or failed, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engram.cli.text import clock, doing_text
from engram.core import events
from engram.experiment.parallel import Member


@dataclass
class ActiveRun:
    """A run that is training or waiting.

    done: the share of its work that is done, 0 to 1. began: the share that was done before this process continued it;
    None until its first report. holder: the run whose base stage it waits for.
    """

    member: Member
    stage: int = 0
    stages: int = 1
    doing: str = ""
    done: float = 0.0
    began: float | None = None
    accuracy: float | None = None
    left: float | None = None
    holder: str | None = None

    def update(self, event: events.Event) -> None:
        """Take over what an event reports."""
        self.holder = event.holder if isinstance(event, events.BaseAwaited) else None
        if isinstance(event, (events.BaseAwaited, events.BaseReused)) and self.began is None:
            # Another run trains the base stage. If that fails, the next report corrects this.
            self.done = self.member.base_work / max(self.member.total_work, 1.0)
        self.doing = doing_text(event) or self.doing
        if isinstance(event, (events.StageStarted, events.Progress)):
            self.stage, self.stages = event.stage, event.stages
        if isinstance(event, events.Progress):
            self.doing = f"{event.phase} {event.epoch}/{event.epochs}" if event.epochs else event.phase
            self.done, self.left = event.done, event.seconds_left
            # Work before the first report was done by another process, or is a base stage from the cache.
            self.began = event.done if self.began is None else self.began
        elif isinstance(event, events.StageFinished):
            self.accuracy = event.average.get(self.member.config.predictor)

    def work_done(self) -> float:
        """Return the work of this run that this process has done."""
        return 0.0 if self.began is None else self.member.total_work * (self.done - self.began)


class RunsProgress:
    """Counts runs by their state, from their events. It may be read in another thread than the one that notes events.

    bases: the keys of the base stages that are already trained; None if each run trains its own.
    """

    def __init__(
        self,
        members: Sequence[Member],
        bases: Collection[str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._members = {member.name: member for member in members}
        self._waiting = dict(self._members)
        self._bases = None if bases is None else set(bases)  # and those that a run here has begun
        self._active: dict[str, ActiveRun] = {}
        self._counts = {"done": 0, "stopped": 0, "failed": 0, "left to another process": 0}
        self._begun: float | None = None  # time of the first report, after kernels were compiled
        self._work_done = 0.0  # by runs that ended here

    def note(self, run: str, event: events.Event) -> None:
        """Take an event into account."""
        if isinstance(event, events.RunStarted):
            member = self._members[run]
            self._waiting.pop(run, None)
            if self._bases is not None and member.base_key is not None:
                self._bases.add(member.base_key)
            self._active[run] = ActiveRun(member, stages=event.stages, doing="starting")
        elif isinstance(event, events.RunFailed):
            self._end(run, "failed")
        elif isinstance(event, events.Stopped):
            self._end(run, "stopped")
        elif isinstance(event, events.RunBusy):
            self._end(run, "left to another process")
        elif isinstance(event, (events.RunFinished, events.RunSkipped)):
            if run in self._active:
                self._active[run].done = 1.0
            self._end(run, "done")
        elif run in self._active:
            if self._begun is None and isinstance(event, events.Progress):
                self._begun = self._now()
            self._active[run].update(event)

    def _end(self, run: str, state: str) -> None:
        self._counts[state] += 1
        self._waiting.pop(run, None)
        if (active := self._active.pop(run, None)) is not None:
            self._work_done += active.work_done()

    def active(self) -> list[ActiveRun]:
        """Return the active runs in the order in which they began."""
        return list(self._active.values())  # a copy, made in one go

    def seconds_left(self) -> float | None:
        """Return how long all of them will take, at the rate so far; None before the first report."""
        runs = self.active()
        done = self._work_done + sum(run.work_done() for run in runs)
        left = self._work_waiting() + sum(run.member.total_work * (1 - run.done) for run in runs)
        if self._begun is None or done <= 0:
            return None
        return left * (self._now() - self._begun) / done

    def _work_waiting(self) -> float:
        """Return the work of the runs that have not begun; a shared base stage counts once."""
        known = None if self._bases is None else set(self._bases)
        work = 0.0
        for member in list(self._waiting.values()):
            work += member.work
            if known is not None and member.base_key is not None:
                begun = member.progress.position is not None  # then it trains its own base stage to the end
                work -= member.base_work if member.base_key in known and not begun else 0.0
                known.add(member.base_key)
        return work

    def summary(self) -> str:
        """Return the totals in one line."""
        parts = [f"{self._counts['done']} of {len(self._members)} done"]
        parts += [f"{len(self._active)} at work"] if self._active else []
        parts += [f"{len(self._waiting)} waiting"] if self._waiting else []
        parts += [f"{count} {state}" for state, count in self._counts.items() if count and state != "done"]
        left = self.seconds_left()
        return ", ".join(parts) + ("" if left is None else f"; {clock(left)} left")
