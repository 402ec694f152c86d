"""How several runs stand: which are at work, waiting, done or failed, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engram.cli.text import clock
from engram.core.events import (
    BaseAwaited,
    BaseReused,
    Event,
    PhaseStarted,
    Progress,
    RunFailed,
    RunFinished,
    RunSkipped,
    RunStarted,
    StageFinished,
    StageStarted,
    Stopped,
    Working,
)
from engram.experiment.parallel import Member

WORK = {"kernels": "compiling kernels", "importance": "finishing", "exemplars": "exemplars", "evaluate": "evaluating"}


@dataclass
class Line:
    """A run at work. done: its share, 0 to 1; began: what of it was done before this process took it up.

    holder: the run whose base stage it waits for.
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


class Tally:
    """Counts runs by how they stand, from their events. It may be read in another thread than the one that notes.

    bases: the keys of the base stages that are trained already; None where each run trains its own.
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
        self._lines: dict[str, Line] = {}
        self._counts = {"done": 0, "failed": 0, "stopped": 0}
        self._begun: float | None = None  # when the first report came: compiling is behind it then
        self._work_done = 0.0  # here, by runs that have ended

    def note(self, run: str, event: Event) -> None:
        """Takes an event into account."""
        line = self._lines.get(run)
        if isinstance(event, RunStarted):
            member = self._members[run]
            self._waiting.pop(run, None)
            if self._bases is not None and member.base_key is not None:
                self._bases.add(member.base_key)
            self._lines[run] = Line(member, stages=event.stages, doing="starting")
        elif isinstance(event, (RunFinished, RunSkipped, RunFailed, Stopped)):
            self._end(run, event)
        elif line is not None:
            if self._begun is None and isinstance(event, Progress):
                self._begun = self._now()
            _update(line, event)

    def _end(self, run: str, event: Event) -> None:
        ended = "failed" if isinstance(event, RunFailed) else "stopped" if isinstance(event, Stopped) else "done"
        self._counts[ended] += 1
        self._waiting.pop(run, None)
        line = self._lines.pop(run, None)
        if line is not None:
            line.done = 1.0 if isinstance(event, RunFinished) else line.done
            self._work_done += _work(line, line.done)

    def active(self) -> list[Line]:
        """The runs at work, in the order they began."""
        return list(self._lines.values())  # a copy, made in one go

    def seconds_left(self) -> float | None:
        """How long all of them will take, at the rate so far; None until there is one."""
        lines = self.active()
        done = self._work_done + sum(_work(line, line.done) for line in lines)
        left = self._work_waiting() + sum(_total(line) * (1 - line.done) for line in lines)
        if self._begun is None or done <= 0:
            return None
        return left * (self._now() - self._begun) / done

    def _work_waiting(self) -> float:
        """The work of the runs that have not begun; a base stage that several share is the work of the first."""
        known = None if self._bases is None else set(self._bases)
        work = 0.0
        for member in list(self._waiting.values()):
            work += member.work
            if known is not None and member.base_key is not None:
                begun = member.progress.position is not None  # then it trains its own to the end
                work -= member.base_work if member.base_key in known and not begun else 0.0
                known.add(member.base_key)
        return work

    def text(self) -> str:
        """The totals in one line."""
        parts = [f"{self._counts['done']} of {len(self._members)} done"]
        parts += [f"{len(self._lines)} at work"] if self._lines else []
        parts += [f"{len(self._waiting)} waiting"] if self._waiting else []
        parts += [f"{self._counts[how]} {how}" for how in ("stopped", "failed") if self._counts[how]]
        left = self.seconds_left()
        return ", ".join(parts) + ("" if left is None else f"; {clock(left)} left")


def _update(line: Line, event: Event) -> None:
    """Has the line say what the event says."""
    line.holder = event.holder if isinstance(event, BaseAwaited) else None
    if isinstance(event, (BaseAwaited, BaseReused)) and line.began is None:
        line.done = line.member.base_work / max(_total(line), 1.0)  # by another; should that fail, a report says so
    if isinstance(event, StageStarted):
        line.stage, line.stages, line.doing = event.stage, event.stages, "starting"
    elif isinstance(event, PhaseStarted):
        line.doing = event.phase
    elif isinstance(event, Working):
        line.doing = WORK.get(event.what, event.what)
    elif isinstance(event, Progress):
        line.stage, line.stages = event.stage, event.stages
        line.doing = f"{event.phase} {event.epoch}/{event.epochs}"
        line.done, line.left = event.done, event.seconds_left
        # What came before the first report was another process's work, or a base stage's from the cache.
        line.began = event.done if line.began is None else line.began
    elif isinstance(event, StageFinished):
        line.accuracy = event.average.get(line.member.config.predictor)


def _work(line: Line, share: float) -> float:
    """The work of a run that was done here, up to that share of it."""
    return 0.0 if line.began is None else _total(line) * (share - line.began)


def _total(line: Line) -> float:
    return line.member.total_work
