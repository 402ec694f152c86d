"""Several runs in one process, one thread per run. The result of a run does not depend on the others."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from queue import Full, Queue
from typing import Any

import torch

from engram.core.errors import EngramError, explain
from engram.core.events import BaseReused, Event, RunBusy, RunFailed, RunSkipped, StageFinished
from engram.core.torchrun import is_launched
from engram.data.store import ImageStore
from engram.engine.capture import MAIN_PRIORITY
from engram.experiment.base_cache import StageCache, which_cache
from engram.experiment.image_placement import ImagePlacement
from engram.experiment.members import Member, plan_members
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import resume, run
from engram.runs.directory import RunExists, RunInUse

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
    images: ImagePlacement = "auto",
    gpus: Sequence[int] = (),
) -> Generator[tuple[str, Event], None, None]:
    """Run several configurations: a generator of (name of the run, event).

    If a run fails, its last event is `RunFailed`; if another process is doing it, `RunBusy`. The others continue. An
    invalid configuration or directory is raised before anything starts. Closing the generator stops the runs and waits
    until each has saved a checkpoint.

    Parameters
    ----------
    configs: by name, or a list whose names are made of recipe, order and seed.
    store: the images of all runs; None: read the data set that each configuration names, each once.
    directory: each run has a subdirectory with its name; complete runs are skipped, incomplete ones are resumed.
    at_once: runs at the same time; None: 1 on a CPU and 12 on each GPU.
    stop: called after every step, in the thread of the run.
    cache: of trained base stages, so that runs with the same base stage train it once; True: that of the commands
        (`engram list cache`); False: each run trains its base stage.
    images: as for `run`.
    gpus: the numbers of the GPUs that the runs are spread over; none: the first GPU, if they use one.
    """
    if is_launched():
        raise EngramError("torchrun starts several processes for one run; do several runs without it")
    workers = Workers(
        plan_members(configs, store, directory),
        at_once=at_once,
        stop=stop,
        stop_after_stage=stop_after_stage,
        checkpoint_minutes=checkpoint_minutes,
        cache=which_cache(cache),
        command=command,
        images=images,
        gpus=gpus,
    )
    yield from workers.events()


ON_CPU, ON_CUDA = 1, 12
MOST = 30  # torch has 32 streams; with more runs, two would share one
# Seconds until Python switches between threads. Its default of 5 ms would make each of the many short waits of a run as
# long as the turns of all other runs together.
SWITCH_SECONDS = 1e-4
WAITING_EVENTS = 1000  # if more are waiting to be read, runs wait


_SWITCHING = threading.Lock()
_intervals: list[float] = []  # the original interval, once for each context in use


@contextmanager
def fast_switching() -> Iterator[None]:
    """Switch faster between threads inside this context; the last one to end restores the original interval."""
    with _SWITCHING:
        _intervals.append(_intervals[0] if _intervals else sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        with _SWITCHING:
            original = _intervals.pop()
            if not _intervals:
                sys.setswitchinterval(original)


def default_at_once(members: Sequence[Member], gpus: int = 1) -> int:
    """The default number of runs at the same time: one run uses a whole CPU, but only a small part of a GPU."""
    return ON_CUDA * gpus if any(member.config.device == "cuda" for member in members) else ON_CPU


class Workers:
    """Runs in parallel: at most `at_once` threads, each consuming the events of one run.

    Threads, and not one loop over all runs: the work after a stage waits for the device, and would delay other runs.
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
        images: ImagePlacement = "auto",
        gpus: Sequence[int] = (),
    ) -> None:
        self._gpus = tuple(gpus) or (0,)
        if at_once is not None and at_once < 1:
            raise EngramError(f"the number of runs at a time must be at least 1, got {at_once}")
        most = MOST * len(self._gpus)
        if at_once is not None and at_once > most:
            raise EngramError(
                f"the number of runs at a time must be at most {most}, got {at_once}; more runs wait until others end"
            )
        self.members = list(members)
        self.at_once = default_at_once(members, len(self._gpus)) if at_once is None else at_once
        self._stop = stop or (lambda: False)
        self._cancelled = False
        self._is_unread = False  # nobody reads the events any more
        self._options: dict[str, Any] = {
            "stop_after_stage": stop_after_stage,
            "checkpoint_minutes": checkpoint_minutes,
            "cache": cache,
            "images": images,
        }
        self._command = command
        self._shares = cache is not None
        # The longest first: if a long run started last, it would still run when all others have ended.
        unfinished = [member for member in members if member.progress.state != "done"]
        self._pending = sorted(unfinished, key=lambda member: -member.work)
        self._active: dict[str, threading.Thread] = {}
        self._places: dict[str, int] = {}  # the GPU of each active run
        self._bases: dict[str, str] = {}  # the keys of base stages that are being trained or waited for, by run
        self._events: Queue[tuple[Member, Event | None]] = Queue(WAITING_EVENTS)
        self._threads = torch.get_num_threads()
        self._streams: dict[int, list[torch.cuda.Stream]] = {gpu: [] for gpu in self._gpus}  # not in use by a run

    def events(self) -> Generator[tuple[str, Event], None, None]:
        """The events of all runs, each with the name of its run."""
        with fast_switching() if self.at_once > 1 else nullcontext():
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
                    self._places.pop(member.name)
                else:
                    if isinstance(event, (BaseReused, StageFinished)):
                        self._bases.pop(member.name, None)
                    yield member.name, event
                self._start()
        except KeyboardInterrupt:  # quit now; the runs save checkpoints, and nobody reads their events
            waits, self._cancelled, self._is_unread = False, True, True
            raise
        finally:
            if waits:
                self._stop_and_wait()

    def _start(self) -> None:
        """Start runs until `at_once` are active."""
        while self._pending and len(self._active) < self.at_once and not self._stopping():
            member = self._next()
            self._pending.remove(member)
            if self._shares and member.base_key is not None:
                self._bases[member.name] = member.base_key
            taken = Counter(self._places.values())
            self._places[member.name] = min(self._gpus, key=lambda gpu: taken[gpu])
            # A daemon: quitting must not wait for it.
            thread = threading.Thread(target=self._work, args=(member,), name=member.name, daemon=True)
            self._active[member.name] = thread
            thread.start()

    def _next(self) -> Member:
        """The longest pending run that need not wait for a base stage; if there is none, the longest run."""
        claimed = set(self._bases.values()) if self._shares else set()
        return next((member for member in self._pending if member.base_key not in claimed), self._pending[0])

    def _stopping(self) -> bool:
        return self._cancelled or self._stop()

    def _stop_and_wait(self) -> None:
        """Stop the active runs, which save checkpoints, and wait for them."""
        self._cancelled = True
        while self._active:
            member, event = self._events.get()
            if event is None:
                self._active.pop(member.name).join()

    def _work(self, member: Member) -> None:
        """Execute one run; called in its thread."""
        try:
            torch.set_num_threads(self._threads)  # a new thread may not inherit this number
            with self._stream(member):
                for event in self._run(member):
                    self._put(member, event)
        except RunInUse:
            self._put(member, RunBusy(str(member.directory)))
        except Exception as error:
            self._put(member, _failure(member, error))
        finally:
            self._put(member, None)

    def _put(self, member: Member, event: Event | None) -> None:
        """Put an event into the queue; drop it if nobody reads the events any more."""
        while not self._is_unread:
            with suppress(Full):
                self._events.put((member, event), timeout=0.5)
                return

    def _run(self, member: Member) -> Iterator[Event]:
        """The events of one run: started, resumed, or skipped if it is complete."""
        try:
            yield from self._events_of(member)
        except RunExists:  # another process has done some of it, or all, since its progress was read
            yield from self._events_of(member)

    def _events_of(self, member: Member) -> Iterator[Event]:
        progress = member.read_progress()
        if progress.result is not None:
            yield RunSkipped(progress.result, str(member.directory))
            return
        if progress.state == "incomplete":
            assert member.directory is not None
            events = resume(member.directory, member.store, stop=self._stopping, **self._options)
        else:
            options = {**self._options, "command": self._command}
            events = run(member.config, member.store, member.directory, stop=self._stopping, **options)
        yield from events

    @contextmanager
    def _stream(self, member: Member) -> Iterator[None]:
        """On a GPU, use a separate stream for the run, so that its kernels do not queue behind those of other runs."""
        if member.config.device != "cuda":
            yield
            return
        gpu = self._places[member.name]
        torch.cuda.set_device(gpu)  # of this thread
        # Streams are reused by later runs: memory that the allocator keeps for one stream cannot be used on another.
        try:
            stream = self._streams[gpu].pop()
        except IndexError:
            stream = torch.cuda.Stream(priority=MAIN_PRIORITY)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            with suppress(RuntimeError):  # after a device error, which the run has already reported
                stream.synchronize()
            self._streams[gpu].append(stream)


def _failure(member: Member, error: Exception) -> RunFailed:
    """The event of a run that failed; with the traceback, if the error is unexpected."""
    message, unexpected = explain(error)
    trace = "".join(traceback.format_exception(error)) if unexpected else None
    return RunFailed(message, member.place, unexpected, trace)
