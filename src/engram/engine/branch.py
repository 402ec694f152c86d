"""Work of a step that does not wait for the rest of it: a branch of its recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
