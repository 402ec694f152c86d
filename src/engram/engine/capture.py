"""Capture: on a GPU a step is hundreds of small kernels; recorded once as a CUDA graph, it is replayed as one."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engram.engine.branch import FIRST, forget_streams

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
