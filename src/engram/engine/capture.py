"""Recording a training step as a CUDA graph, with work that may run beside it on a second stream."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

# A recording keeps the priorities of its streams (lower goes first): what runs beside must not go before what the step
# waits for. Streams of the side's priority are no one else's: torch hands out streams again and again, and a run's own
# would record what that run is doing meanwhile.
FIRST, BESIDE = -2, -1
_STREAMS: dict[int, torch.cuda.Stream] = {}  # one a device is enough, for recordings are made one at a time


def _side_stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(priority=BESIDE)
    return _STREAMS[device]


def forget_streams() -> None:
    """After a recording that went wrong: its branch may not have come back."""
    _STREAMS.clear()


class Branch:
    """Launches that may run beside those made on the stream between them and `join`.

    Only while a CUDA graph is recorded; elsewhere they come in their turn. A tensor that a branch uses must live until
    it has joined: freed before, its memory would be given to what runs beside.
    """

    def __init__(self) -> None:
        self._main = self._side = None
        if torch.cuda.is_initialized():
            side = _side_stream()  # made by the steps before the recording
            if torch.cuda.is_current_stream_capturing():
                self._main, self._side = torch.cuda.current_stream(), side

    @contextmanager
    def launching(self) -> Iterator[None]:
        """What is launched in here belongs to the branch, and waits for all that was launched before it."""
        if self._main is None or self._side is None:
            yield
            return
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """From here on everything waits for the branch."""
        if self._main is not None and self._side is not None:
            self._main.wait_stream(self._side)


WARM_UP = 2
# One recording at a time in the process: what the others do meanwhile is not recorded, but compiling kernels and
# collecting garbage are no one's own.
_RECORDING = threading.Lock()
_SPARE: list[torch.cuda.Stream] = []  # for runs on the default stream, which cannot be recorded
_SPOILT: list[torch.cuda.CUDAGraph] = []  # recordings that went wrong: the allocator may still know of them

T = TypeVar("T")


def _recording_stream() -> torch.cuda.Stream:
    """The stream to record on: the caller's own, so that no one else can be on it.

    torch hands out the same few streams again and again: a new one for each recording would soon be another run's.
    """
    current = torch.cuda.current_stream()
    if current != torch.cuda.default_stream():
        return current
    if not _SPARE:
        _SPARE.append(torch.cuda.Stream(priority=FIRST))
    return _SPARE[0]


class NotRecordable(Exception):
    """A step that cannot be recorded, with the reason; it was left without effect."""


class CapturedStep(Generic[T]):
    """A step recorded as a CUDA graph. Calling it replays the recording on whatever its tensors hold then.

    The step must read and write only tensors that keep their place and live as long as this. `state` lists what it
    changes: warming up takes real steps, and their effect is taken back. `returned` is what the step returned when it
    was recorded.
    """

    def __init__(self, step: Callable[[], T], state: Sequence[Tensor]) -> None:
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
                    restore()  # each time: a phase may have fewer steps than the warm-up takes
                stream.synchronize()
                self._graph = torch.cuda.CUDAGraph()
                collecting = gc.isenabled()
                gc.collect()
                gc.disable()  # freeing another graph's memory would break the recording
                try:
                    self.returned = self._record(step)
                finally:
                    if collecting:
                        gc.enable()
                    restore()
        finally:
            torch.cuda.current_stream().wait_stream(stream)

    def _record(self, step: Callable[[], T]) -> T:
        pool = torch.cuda.graph_pool_handle()
        # What other threads do on their streams in the meantime is their own affair.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            returned = step()
            self._graph.capture_end()
        except BaseException as error:
            self._abandon(pool)
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
                raise
            # What the step held must not outlive it: its graph of gradients would bind later steps to this stream.
            traceback.clear_frames(error.__traceback__)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        else:
            return returned
        raise NotRecordable(reason)

    def _abandon(self, pool: tuple[int, int]) -> None:
        """Ends a recording that went wrong, so that the stream and the allocator are as before."""
        with suppress(RuntimeError):  # that it is spoilt is known already
            self._graph.capture_end()
        with suppress(RuntimeError):  # where capture_end came that far
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        _SPOILT.append(self._graph)
        forget_streams()

    def __call__(self) -> T:
        self._graph.replay()
        return self.returned
