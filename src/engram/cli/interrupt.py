"""Ctrl-C and SIGTERM: the first asks a run to save and stop, the second ends the program at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

SAVING = "saving... (Ctrl-C again to quit at once)"


class Interrupt:
    """Asked by a run whether it should stop; knows which signal came.

    announce: say so on stderr. A live display says it itself, because what is written past it would break it.
    """

    def __init__(self, announce: bool = True) -> None:
        self.announce = announce
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status that says which signal it was, as shells do."""
        return 128 + (self.signal or signal.SIGINT)

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        if self.announce:
            # A handler may run in the middle of a print: only the system call is safe here.
            os.write(2, f"engram: {SAVING}\n".encode())
