"""Recording of a training step as a CUDA graph, optionally with parallel work on a second stream."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

# Priorities of streams; the lower number goes first. A recording keeps them: the side stream must not delay work that
# the step waits for. Only the side stream has SIDE_PRIORITY. torch hands out the same few streams repeatedly; with
# the priority of a run's stream we could get that stream, and would record what that run does at the same time.
MAIN_PRIORITY, SIDE_PRIORITY = -2, -1
_SIDE_STREAMS: dict[int, torch.cuda.Stream] = {}  # one per device is enough: only one recording is made at a time


def _side_stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(priority=SIDE_PRIORITY)
    return _SIDE_STREAMS[device]


class Branch:
    """Work that may run in parallel with the work launched on the main stream before `join`.

    Only while a CUDA graph is recorded; otherwise everything runs in order. Keep every tensor that a branch uses until
    `join`: if it were freed earlier, its memory could be reused by the parallel work.
    """

    def __init__(self) -> None:
        self._main = self._side = None
        if torch.cuda.is_initialized():
            side = _side_stream()  # created in the warm-up steps, before the recording
            if torch.cuda.is_current_stream_capturing():
                self._main, self._side = torch.cuda.current_stream(), side

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launch on the branch inside this context, after everything launched before."""
        if self._main is None or self._side is None:
            yield
            return
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Make all later work wait for the branch."""
        if self._main is not None and self._side is not None:
            self._main.wait_stream(self._side)


WARM_UP = 2
MAX_UNUSED_BYTES = 1 << 30  # memory that torch may hold unused when a step is recorded
# One recording at a time per process. The work of other threads is not recorded, but they share the compilation of
# kernels and the garbage collector.
_RECORDING = threading.Lock()
_SPARE: list[torch.cuda.Stream] = []  # for runs on the default stream, which cannot be recorded
_FAILED: list[torch.cuda.CUDAGraph] = []  # failed recordings are kept: the allocator may still refer to them

T = TypeVar("T")
GraphMemory = Any  # names the memory of one or more recordings; torch has no public type for it


def _recording_stream() -> torch.cuda.Stream:
    """The stream to record on: the current one, which no other run uses.

    torch hands out the same few streams repeatedly: a new one for each recording would soon be one of another run.
    """
    current = torch.cuda.current_stream()
    if current != torch.cuda.default_stream():
        return current
    if not _SPARE:
        _SPARE.append(torch.cuda.Stream(priority=MAIN_PRIORITY))
    return _SPARE[0]


class NotRecordable(Exception):
    """A step cannot be recorded, for the reason given. The attempt changed nothing."""


class CapturedStep(Generic[T]):
    """A step recorded as a CUDA graph. Calling it replays the recording with the current values of its tensors.

    The step may only read and write tensors that keep their addresses and live as long as this object.

    state: the tensors that the step changes. The warm-up takes real steps, whose effect is undone with it.
    pool: memory that recordings share which never run at the same time; None: memory of its own.
    returned: the return value of the step from when it was recorded.
    """

    def __init__(self, step: Callable[[], T], state: Sequence[Tensor], pool: GraphMemory | None = None) -> None:
        saved = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        stream = _recording_stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with _RECORDING, torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    step()
                    restore()  # after each step: a phase may have fewer steps than the warm-up
                stream.synchronize()
                unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
                if unused > MAX_UNUSED_BYTES:  # a recording cannot use what the warm-up left to the allocator
                    torch.cuda.empty_cache()
                self._graph = torch.cuda.CUDAGraph()
                collecting = gc.isenabled()
                gc.collect()
                gc.disable()  # freeing another graph's memory would break the recording
                try:
                    self.returned = self._record(step, pool or torch.cuda.graph_pool_handle())
                finally:
                    if collecting:
                        gc.enable()
                    restore()
        finally:
            torch.cuda.current_stream().wait_stream(stream)

    def _record(self, step: Callable[[], T], pool: GraphMemory) -> T:
        # thread_local: other threads may do anything on their streams at the same time.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            returned = step()
            self._graph.capture_end()
        except BaseException as error:
            self._abandon(pool)
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
                raise
            # Free everything the step held: its autograd graph would tie later steps to this stream.
            traceback.clear_frames(error.__traceback__)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        else:
            return returned
        raise NotRecordable(reason)

    def _abandon(self, pool: GraphMemory) -> None:
        """End a failed recording, so that the stream and the allocator are as before."""
        with suppress(RuntimeError):  # raised because the recording failed
            self._graph.capture_end()
        with suppress(RuntimeError):  # raised if capture_end has already done it
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        _FAILED.append(self._graph)
        _SIDE_STREAMS.clear()  # the branch may not have joined

    def __call__(self) -> T:
        self._graph.replay()
        return self.returned
