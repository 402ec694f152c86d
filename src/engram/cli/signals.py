"""Ctrl-C, SIGTERM and SIGHUP: the first asks a run to save and stop; a later Ctrl-C quits at once.

`timeout`, service managers and terminals signal a process and its group, so each signal may come twice. Therefore only
Ctrl-C, and only some time after the first signal, means that somebody does not want to wait.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from contextlib import suppress
from types import FrameType

HANGUP = getattr(signal, "SIGHUP", None)  # not on every system
SAVING = "saving... (Ctrl-C again to quit at once)"
AGAIN_SECONDS = 1.0  # a Ctrl-C sooner after the first signal is taken for the same request


class Interrupt:
    """Tells a run whether to stop, and which signal arrived.

    announce: print a message on stderr. A live display shows the message itself; printing would break its lines.
    """

    def __init__(self, announce: bool = True) -> None:
        self.announce = announce
        self.signal: int | None = None
        self._since = 0.0  # when the signal arrived
        self._quits = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status for the signal, as shells report it."""
        return 128 + (self.signal or signal.SIGINT)

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:  # as under nohup
            self._before[HANGUP] = signal.signal(HANGUP, self._hang_up)
        return self

    def __exit__(self, *error: object) -> None:
        if self._quits:  # the program ends: one more Ctrl-C would only interrupt the message about it
            self._before[signal.SIGINT] = signal.SIG_IGN
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal not in (None, HANGUP):
            if number == signal.SIGINT and not self._quits and time.monotonic() - self._since >= AGAIN_SECONDS:
                self._quits = True
                raise KeyboardInterrupt
            return
        self.signal, self._since = number, time.monotonic()
        if self.announce:
            # A handler may run in the middle of a print: only the system call is safe here.
            with suppress(OSError):
                os.write(2, f"engram: {SAVING}\n".encode())

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """The terminal was closed, which may send several signals: nobody can ask twice or read what is printed."""
        self.signal = self.signal or number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            with suppress(OSError):
                if not stat.S_ISREG(os.fstat(output).st_mode):
                    os.dup2(nowhere, output)
        os.close(nowhere)
