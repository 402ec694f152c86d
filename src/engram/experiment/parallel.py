"""Several runs in one process, one thread each; the result of a run does not depend on the others."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from queue import Full, Queue

import torch

from engram.core.errors import EngramError, explain
from engram.core.events import BaseReused, Event, RunFailed, RunSkipped, StageFinished
from engram.data.store import ImageStore
from engram.engine.capture import FIRST
from engram.experiment.base_cache import StageCache
from engram.experiment.members import Member, plan_members
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import resume, run
from engram.experiment.shared_base import which_cache

__all__ = ["Member", "Workers", "plan_members", "run_together"]


def run_together(
    configs: Sequence[RunConfig] | Mapping[str, RunConfig],
    store: ImageStore | None = None,
    directory: str | Path | None = None,
    *,
    at_once: int | None = None,
    stop: Callable[[], bool] | None = None,
    stop_after_stage: int | None = None,
    checkpoint_minutes: float = 10.0,
    cache: StageCache | bool | None = True,
    command: str | None = None,
) -> Generator[tuple[str, Event], None, None]:
    """The events of several runs, each with the name of its run, as they come.

    configs: by name, or a list whose names are made of recipe, order and seed. store: the images of all of them; None
    reads what each configuration names, every set once. directory: each run has the subdirectory of its name there; one
    that is complete is skipped, one that is not is gone on with. at_once: how many at a time; None is 1 on a CPU and 12
    on a GPU. cache: where a base stage that several have is trained once and found by later runs, by default that of
    the commands (`engram list cache`); False has each run train its own. stop is asked by each run after every step, in
    that run's thread. A run that fails says so in its last event (`RunFailed`), and the others go on; what is wrong
    with a configuration or a directory is raised before anything starts. Closing the generator stops the runs and waits
    until each has saved itself.
    """
    workers = Workers(
        plan_members(configs, store, directory),
        at_once=at_once,
        stop=stop,
        stop_after_stage=stop_after_stage,
        checkpoint_minutes=checkpoint_minutes,
        cache=which_cache(cache),
        command=command,
    )
    yield from workers.events()


ON_CPU, ON_CUDA = 1, 12
MOST = 30  # torch has 32 streams to give out; with more runs two would be on the same
# Seconds after which a thread gives way to another. Python's own 5 ms make each of the many short waits of one run as
# long as the others together take.
TURN = 1e-4
WAITING_EVENTS = 1000  # beyond these a run waits for whoever reads them


_TURNS = threading.Lock()
_turns: list[float] = []  # what it was before, one for each that wants short turns


@contextmanager
def short_turns() -> Iterator[None]:
    """Threads give way to one another sooner; as before once nobody wants it any more."""
    with _TURNS:
        _turns.append(_turns[0] if _turns else sys.getswitchinterval())
        sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        with _TURNS:
            before = _turns.pop()
            if not _turns:
                sys.setswitchinterval(before)


def default_at_once(members: Sequence[Member]) -> int:
    """How many runs to do at a time where nobody says: a CPU is filled by one, a GPU by far from one."""
    return ON_CUDA if any(member.config.device == "cuda" for member in members) else ON_CPU


class Workers:
    """Runs side by side: at most `at_once` threads, each consuming the events of one run.

    Threads and not turns in one loop: what follows a stage waits for the device, and would hold the others up.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        at_once: int | None = None,
        stop: Callable[[], bool] | None = None,
        stop_after_stage: int | None = None,
        checkpoint_minutes: float = 10.0,
        cache: StageCache | None = None,
        command: str | None = None,
    ) -> None:
        if at_once is not None and at_once < 1:
            raise EngramError(f"at least one run at a time is needed, got {at_once}")
        if at_once is not None and at_once > MOST:
            raise EngramError(f"at most {MOST} runs at a time, got {at_once}; the others wait their turn")
        self.members = list(members)
        self.at_once = default_at_once(members) if at_once is None else at_once
        self._stop = stop or (lambda: False)
        self._given_up = False
        self._unheard = False
        self._how = {"stop_after_stage": stop_after_stage, "checkpoint_minutes": checkpoint_minutes, "cache": cache}
        self._command = command
        self._shares = cache is not None
        # The longest first: a long one begun last would end alone.
        unfinished = [member for member in members if member.progress.state != "done"]
        self._pending = sorted(unfinished, key=lambda member: -member.work)
        self._active: dict[str, threading.Thread] = {}
        self._bases: dict[str, str] = {}  # the base stages that are being trained or waited for, by run
        self._events: Queue[tuple[Member, Event | None]] = Queue(WAITING_EVENTS)
        self._threads = torch.get_num_threads()
        self._streams: list[torch.cuda.Stream] = []  # those that no run is using

    def events(self) -> Generator[tuple[str, Event], None, None]:
        """The events of all runs as they come, each with the name of its run."""
        with short_turns() if self.at_once > 1 else nullcontext():
            yield from self._all_events()

    def _all_events(self) -> Generator[tuple[str, Event], None, None]:
        waits = True
        try:
            for member in self.members:
                if member.progress.result is not None:
                    yield member.name, RunSkipped(member.progress.result, str(member.directory))
            self._start()
            while self._active:
                member, event = self._events.get()
                if event is None:
                    self._active.pop(member.name).join()
                    self._bases.pop(member.name, None)
                else:
                    if isinstance(event, (BaseReused, StageFinished)):
                        self._bases.pop(member.name, None)
                    yield member.name, event
                self._start()
        except KeyboardInterrupt:  # quit at once; the runs save themselves, and nobody hears of it
            waits, self._given_up, self._unheard = False, True, True
            raise
        finally:
            if waits:
                self._wind_up()

    def _start(self) -> None:
        """Starts as many runs as there are places for."""
        while self._pending and len(self._active) < self.at_once and not self._stopping():
            member = self._next()
            self._pending.remove(member)
            if self._shares and member.base_key is not None:
                self._bases[member.name] = member.base_key
            # A daemon, so that quitting at once does not wait for it.
            thread = threading.Thread(target=self._work, args=(member,), name=member.name, daemon=True)
            self._active[member.name] = thread
            thread.start()

    def _next(self) -> Member:
        """The longest run that would not have to wait for a base stage at once; where all would, the longest."""
        claimed = set(self._bases.values()) if self._shares else set()
        return next((member for member in self._pending if member.base_key not in claimed), self._pending[0])

    def _stopping(self) -> bool:
        return self._given_up or self._stop()

    def _wind_up(self) -> None:
        """Has the runs still at work save themselves, and waits for them."""
        self._given_up = True
        while self._active:
            member, event = self._events.get()
            if event is None:
                self._active.pop(member.name).join()

    def _work(self, member: Member) -> None:
        """One run from start to end, in a thread of its own."""
        try:
            torch.set_num_threads(self._threads)  # a new thread need not have the number of the one it came from
            with self._stream(member):
                for event in self._run(member):
                    self._put(member, event)
        except Exception as error:
            self._put(member, _failure(member, error))
        finally:
            self._put(member, None)

    def _put(self, member: Member, event: Event | None) -> None:
        """Hands an event over; where nobody listens any more it is dropped."""
        while not self._unheard:
            with suppress(Full):
                self._events.put((member, event), timeout=0.5)
                return

    def _run(self, member: Member) -> Iterator[Event]:
        """The events of one run: from its beginning, from where it stood, or that there is nothing to do."""
        progress = member.read_progress()
        if progress.result is not None:
            yield RunSkipped(progress.result, str(member.directory))
            return
        if progress.state == "incomplete":
            assert member.directory is not None
            events = resume(member.directory, member.store, stop=self._stopping, **self._how)
        else:
            how = {**self._how, "command": self._command}
            events = run(member.config, member.store, member.directory, stop=self._stopping, **how)
        yield from events

    @contextmanager
    def _stream(self, member: Member) -> Iterator[None]:
        """On a GPU, a stream of the run's own, so that its kernels do not queue behind those of the others."""
        if member.config.device != "cuda":
            yield
            return
        # Used again by a later run: memory that the allocator has for one stream is of no use to another.
        try:
            stream = self._streams.pop()
        except IndexError:
            stream = torch.cuda.Stream(priority=FIRST)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            with suppress(RuntimeError):  # after an error of the device, which the run has reported
                stream.synchronize()
            self._streams.append(stream)


def _failure(member: Member, error: Exception) -> RunFailed:
    """The event of a run that ended in an error, with the traceback of an unexpected one."""
    message, unexpected = explain(error)
    trace = "".join(traceback.format_exception(error)) if unexpected else None
    return RunFailed(message, member.place, unexpected, trace)
