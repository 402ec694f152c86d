"""Decoding in other processes: for small images most of the work is in Python, where threads take turns."""

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

import numpy as np

from engram.core.errors import EngramError
from engram.data.decode.image import Images, LoadLarge, try_decode

# A new interpreter instead of multiprocessing, which would run the user's main script again.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from engram.data.decode.processes import serve; serve()"
)

DecodedChunk = tuple[Images, list[str | None]]  # images that could be read, and for each file the reason or None


def decode_chunk(paths: Sequence[str], size: int, large: LoadLarge) -> DecodedChunk:
    """Decode files one after the other in this process."""
    found = [try_decode(path, size, True, large) for path in paths]
    images = [image for image in found if not isinstance(image, str)]
    pixels = np.stack(images) if images else np.empty((0, size, size, 3), dtype=np.uint8)
    return pixels, [image if isinstance(image, str) else None for image in found]


class Decoders:
    """Processes that decode files to squares. As many threads as there are processes may call `decode`.

    The processes end on `close`, or when this process ends. A process that dies is replaced, and the file that killed
    it is reported as unreadable.
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        with tempfile.TemporaryFile() as file:
            self._lock = os.dup(file.fileno())  # locked by the process that loads a large image
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
            [sys.executable, "-c", _PROGRAM, json.dumps([*map(str, sys.path)]), str(self._size), str(self._lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._lock,),
        )
        self._all.append(process)
        return process

    def decode(self, paths: Sequence[str]) -> DecodedChunk:
        """Decode files in an idle process."""
        for _ in range(2):  # twice: the process may have been killed for another reason than these files
            found = self._try(paths)
            if found is not None:
                return found
        if len(paths) == 1:
            return np.empty((0, self._size, self._size, 3), dtype=np.uint8), ["the decoder crashes on it"]
        parts = [self.decode([path]) for path in paths]
        return np.concatenate([images for images, _ in parts]), [reason for _, reasons in parts for reason in reasons]

    def _try(self, paths: Sequence[str]) -> DecodedChunk | None:
        """Decode files in an idle process; if it dies, start another one and return None."""
        process = self._idle.get()
        try:
            return self._request(process, paths)
        except (OSError, ValueError, EOFError):
            process.kill()
            process.wait()
            if self._closed:
                raise
            try:
                process = self._start()
            except OSError as error:
                raise EngramError(
                    f"a process that decodes images died, and no other could be started ({error.strerror}); close "
                    "other programs and try again"
                ) from None
            return None
        finally:
            self._idle.put(process)

    def _request(self, process: subprocess.Popen[bytes], paths: Sequence[str]) -> DecodedChunk:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(paths).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise EOFError
        reasons = json.loads(line)
        images = np.empty((reasons.count(None), self._size, self._size, 3), dtype=np.uint8)
        if process.stdout.readinto(images.reshape(-1).data) != images.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
            raise EOFError
        return images, reasons

    def close(self) -> None:
        """Kill the processes, even if they are decoding."""
        self._closed = True
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(OSError):  # unwritten data
                    stream.close()
        os.close(self._lock)


def serve() -> None:
    """Run as a decoding process: read lines with lists of paths, write the reasons and the pixels of each list."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when to stop
    size, lock = int(sys.argv[2]), int(sys.argv[3])
    # Keep the pipe for answers only: what libraries print from here on goes to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def one_at_a_time(load: Callable[[], Images | str]) -> Images | str:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        try:
            return load()
        finally:
            fcntl.lockf(lock, fcntl.LOCK_UN)

    for line in sys.stdin.buffer:
        images, reasons = decode_chunk(json.loads(line), size, one_at_a_time)
        answers.write(json.dumps(reasons).encode() + b"\n")
        answers.write(images.reshape(-1).data)
        answers.flush()
