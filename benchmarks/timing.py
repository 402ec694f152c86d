"""Timing: steps of several runs at once, each in a thread and on a stream of its own."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from benchmarks.ground import Prepared, lengthened


class Steps(Protocol):
    """Something that takes training steps."""

    def take(self, count: int) -> None:
        """Takes so many steps; on a GPU they may still be under way when it returns."""
        ...

    def wait(self) -> None:
        """Returns when the steps taken are done."""
        ...


def synchronise(device: torch.device) -> None:
    """Waits until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, most and number of the values, as they go into the JSON file."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


class EngineSteps:
    """The steps of a phase as the product takes them: engine.start, then one step at a time.

    seconds_before: from the start until the first step is done, all that is captured and compiled for it included.
    """

    def __init__(self, prepared: Prepared, steps: int) -> None:
        session = prepared.session
        self.device = session.engine.device
        self.prepared = prepared
        self._stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        synchronise(self.device)
        started = time.perf_counter()
        with self._on_stream():
            phase = lengthened(prepared.phase, steps)
            self.loop = session.engine.start(session.learner, prepared.stage, phase, 0)
            self._steps: Iterator[None] = iter(self.loop)
        self.take(1)
        self.wait()
        self.seconds_before = time.perf_counter() - started

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def take(self, count: int) -> None:
        with self._on_stream():
            for _ in range(count):
                next(self._steps)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def time_together(takers: Sequence[Steps], steps: int, repetitions: int) -> list[float]:
    """The seconds of each repetition: so many steps of every taker, from the first start to the last end.

    All start behind a barrier. Each thread reads the clock itself: one that watched would have to wait its turn.
    """
    barrier = threading.Barrier(len(takers))
    times: list[list[tuple[float, float]]] = [[] for _ in takers]
    failures: list[BaseException] = []

    def work(taker: Steps, spans: list[tuple[float, float]]) -> None:
        try:
            for _ in range(repetitions):
                taker.wait()
                barrier.wait()
                started = time.perf_counter()
                taker.take(steps)
                taker.wait()
                spans.append((started, time.perf_counter()))
        except threading.BrokenBarrierError:
            pass  # another one failed
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(takers, times, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [max(end for _, end in spans) - min(start for start, _ in spans) for spans in zip(*times, strict=True)]


def per_step(seconds: Sequence[float], runs: int, steps: int, batch_size: int) -> dict[str, Any]:
    """Milliseconds per run and step, and images a second of all runs together, over the repetitions."""
    milliseconds = [1000 * second / (runs * steps) for second in seconds]
    return {"ms": spread(milliseconds), "images_per_second": spread([1000 * batch_size / ms for ms in milliseconds])}


def forget_memory(device: torch.device) -> None:
    """Gives back what nothing holds any more and starts the peaks anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, int] | None:
    """The most bytes in use and the most held by the allocator since the peaks were started; None on a CPU."""
    if device.type != "cuda":
        return None
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"allocated": allocated, "reserved": reserved}
