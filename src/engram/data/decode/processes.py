"""Decoding by other processes: of a small image most of the work is Python's, and at that threads take turns."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO

import numpy as np

from engram.core.errors import EngramError
from engram.data.decode.image import Large, try_decode
from engram.data.store import Images

# It is not imported from the script that started all: that would run again. The path is this process's own.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from engram.data.decode.processes import serve; serve()"
)

Found = tuple[Images, list[str | None]]  # the images that could be read, and of each file why not


def decode_here(paths: Sequence[str], size: int, large: Large) -> Found:
    """The files one after the other, in this process."""
    found = [try_decode(path, size, True, large) for path in paths]
    images = [image for image in found if not isinstance(image, str)]
    pixels = np.stack(images) if images else np.empty((0, size, size, 3), dtype=np.uint8)
    return pixels, [image if isinstance(image, str) else None for image in found]


class Decoders:
    """Processes that decode files to squares of that size, `decode` being for as many threads as there are of them.

    They end when this is closed, or when the process that has it does. One that dies is replaced, and the file it died
    of is refused.
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        with tempfile.TemporaryFile() as file:
            self._turn = os.dup(file.fileno())  # locked by whoever loads a large image
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        self._closed = False
        try:
            for _ in range(count):
                self._idle.put(self._start())
        except BaseException:
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps([*map(str, sys.path)]), str(self._size), str(self._turn)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._turn,),
        )
        self._all.append(process)
        return process

    def _replace(self) -> subprocess.Popen[bytes]:
        try:
            return self._start()
        except OSError as error:
            raise EngramError(
                f"a process that decodes images died, and no other could be started ({error.strerror}); close other "
                "programs and try again"
            ) from None

    def decode(self, paths: Sequence[str]) -> Found:
        """The files, by whichever process is idle."""
        for _ in range(2):  # one that was killed by somebody else says nothing of the files
            found = self._try(paths)
            if found is not None:
                return found
        if len(paths) == 1:
            return np.empty((0, self._size, self._size, 3), dtype=np.uint8), ["the decoder dies of it"]
        parts = [self.decode([path]) for path in paths]
        return np.concatenate([images for images, _ in parts]), [reason for _, reasons in parts for reason in reasons]

    def _try(self, paths: Sequence[str]) -> Found | None:
        """None where the process died."""
        process = self._idle.get()
        try:
            return self._ask(process, paths)
        except (OSError, ValueError, EOFError):
            process.kill()
            process.wait()
            if self._closed:
                raise
            process = self._replace()
            return None
        finally:
            self._idle.put(process)

    def _ask(self, process: subprocess.Popen[bytes], paths: Sequence[str]) -> Found:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(paths).encode() + b"\n")
        process.stdin.flush()
        reasons = json.loads(process.stdout.readline() or _ended())
        images = np.empty((reasons.count(None), self._size, self._size, 3), dtype=np.uint8)
        if process.stdout.readinto(images.reshape(-1).data) != images.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
            _ended()
        return images, reasons

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        self._closed = True
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(OSError):  # what was still to be written to it
                    stream.close()
        os.close(self._turn)


def _ended() -> bytes:
    raise EOFError


def serve() -> None:
    """What such a process does: a list of paths a line in; why each cannot be read, and the pixels, out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides
    size, turn = int(sys.argv[2]), int(sys.argv[3])
    asked, told = sys.stdin.buffer, _take_over_stdout()

    def alone(load: Callable[[], Images | str]) -> Images | str:
        fcntl.lockf(turn, fcntl.LOCK_EX)
        try:
            return load()
        finally:
            fcntl.lockf(turn, fcntl.LOCK_UN)

    for line in asked:
        images, reasons = decode_here(json.loads(line), size, alone)
        told.write(json.dumps(reasons).encode() + b"\n")
        told.write(images.reshape(-1).data)
        told.flush()


def _take_over_stdout() -> BinaryIO:
    """The pipe, which nothing that a library prints may get into from here on."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe
