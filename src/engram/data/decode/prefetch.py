"""Decoding of many image files in batches, one batch ahead of the consumer, by threads and then by other processes.

For small images most of the work is in Python, where threads take turns. So a large number of files is decoded in
processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from engram.core.errors import EngramError
from engram.core.memory_limits import check_memory
from engram.data.decode.image import Images, LoadLarge, try_decode, unreadable_error

IN_PROCESS_FILES: Final = 512  # files decoded by threads: starting processes would take as long
_CHUNK: Final = 16  # most files given to a thread or process at once
_BATCH: Final = 256

Report = Callable[[int, int], None]  # called with the number of files done and of all files
# A new interpreter instead of multiprocessing, which would run the user's main script again.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from engram.data.decode.prefetch import serve; serve()"
)

File = str | bytes | bytearray  # a path, or the content of a file
DecodedChunk = tuple[Images, list[str | None]]  # images that could be read, and for each file the reason or None


@dataclass(frozen=True, eq=False)
class Decoded:
    """A batch of decoded files.

    paths: files that could be read.
    images: their pixels (N, size, size, 3).
    skipped: path and reason of the others.
    pause: the next batch may take long, so process this one now.
    """

    paths: list[str]
    images: Images
    skipped: list[tuple[str, str]]
    pause: bool = False


def decode_stream(
    paths: Iterable[str | Path | None], size: int, *, batch: int = _BATCH, workers: int | None = None
) -> Iterator[Decoded]:
    """Yield the files in their order, in batches, decoded one batch ahead of the consumer.

    The first `IN_PROCESS_FILES` are decoded by threads, the others by processes. Memory use does not depend on the
    number of files. Files that cannot be read are skipped and listed.

    paths: files. None among them: the next path may take long, so all files before it are yielded at once.
    size: side of the images.
    workers: number of threads or processes; by default the number of cores, at most 16. 1: no process is started.
    """
    with _Pool(size, workers or min(16, os.cpu_count() or 1)) as pool:
        waiting: tuple[list[str], list[Future[DecodedChunk]]] | None = None
        for some, pause in _batches(paths, batch):
            if some:
                waiting, ready = (some, pool.submit(some)), waiting
                if ready is not None:
                    yield _gather(*ready)
            if pause and waiting is not None:
                ready, waiting = waiting, None
                yield _gather(*ready, pause=True)
        if waiting is not None:
            yield _gather(*waiting)


def _batches(paths: Iterable[str | Path | None], batch: int) -> Iterator[tuple[list[str], bool]]:
    """Yield batches of paths, and whether a None followed, which ends a batch early."""
    some: list[str] = []
    for path in paths:
        if path is not None:
            some.append(str(path))
        if path is None or len(some) == batch:
            yield some, path is None
            some = []
    if some:
        yield some, False


class _Pool:
    """Threads that decode files, or that pass them to processes once there are enough files."""

    def __init__(self, size: int, workers: int) -> None:
        self.workers = workers
        self._size = size
        self._threads = ThreadPoolExecutor(workers, "decode")
        self._large = ThreadPoolExecutor(1, "decode-large")  # one thread: each would keep the memory of a large image
        self._decoders: Decoders | None = None
        self._no_processes = workers == 1 or not sys.executable
        self._submitted = 0

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._decoders is not None:
            self._decoders.close()
        self._threads.shutdown()
        self._large.shutdown()

    def submit(self, paths: Sequence[str]) -> list[Future[DecodedChunk]]:
        """Start decoding files, in chunks."""
        self._submitted += len(paths)
        if self._decoders is None and not self._no_processes and self._submitted > IN_PROCESS_FILES:
            self._start_processes()
        decoders = self._decoders

        def decode(part: Sequence[str]) -> DecodedChunk:
            return self._decode_here(part) if decoders is None else decoders.decode(part)

        chunk = min(_CHUNK, -(-len(paths) // self.workers))
        return [self._threads.submit(decode, paths[at : at + chunk]) for at in range(0, len(paths), chunk)]

    def _start_processes(self) -> None:
        try:
            self._decoders = Decoders(self.workers, self._size)
        except OSError as error:
            self._no_processes = True
            reason = f"other processes could not be started ({error.strerror})"
            warnings.warn(f"decoding images in one process, which is slower: {reason}", RuntimeWarning, 2)

    def _decode_here(self, paths: Sequence[str]) -> DecodedChunk:
        return decode_chunk(paths, self._size, lambda load: self._large.submit(load).result())


def _gather(paths: Sequence[str], chunks: Sequence[Future[DecodedChunk]], pause: bool = False) -> Decoded:
    found = [chunk.result() for chunk in chunks]
    named = list(zip(paths, [reason for _, reasons in found for reason in reasons], strict=True))
    return Decoded(
        [path for path, reason in named if reason is None],
        np.concatenate([images for images, _ in found]),
        [(path, reason) for path, reason in named if reason is not None],
        pause,
    )


def decode_files(
    paths: Sequence[str | Path],
    size: int,
    *,
    skip_bad: bool = False,
    workers: int | None = None,
    progress: Report | None = None,
) -> tuple[Images, list[int], list[tuple[str, str]]]:
    """Decode files; return the images (N, size, size, 3), their positions in `paths`, and the skipped with reasons.

    skip_bad: skip files that cannot be read; otherwise the first of them is an error.
    """
    check_memory(len(paths) * size * size * 3, f"{len(paths)} images of {size}x{size} pixels")
    images = np.empty((len(paths), size, size, 3), dtype=np.uint8)
    kept: list[int] = []
    skipped: list[tuple[str, str]] = []
    done = 0
    for part in decode_stream(paths, size, workers=workers):
        if part.skipped and not skip_bad:
            raise unreadable_error(*part.skipped[0])
        images[len(kept) : len(kept) + len(part.paths)] = part.images
        bad = {path for path, _ in part.skipped}
        here = range(done, done + len(part.paths) + len(part.skipped))
        kept += [position for position in here if str(paths[position]) not in bad]
        skipped += part.skipped
        done = here.stop
        if progress is not None:
            progress(done, len(paths))
    return images[: len(kept)], kept, skipped


def decode_chunk(files: Sequence[File], size: int, large: LoadLarge) -> DecodedChunk:
    """Decode files one after the other in this process."""
    found = [try_decode(file, size, True, large) for file in files]
    images = [image for image in found if not isinstance(image, str)]
    pixels = np.stack(images) if images else np.empty((0, size, size, 3), dtype=np.uint8)
    return pixels, [image if isinstance(image, str) else None for image in found]


class Decoders:
    """Processes that decode files to squares. As many threads as there are processes may call `decode`.

    The processes end on `close`, or when this process ends. A process that dies is replaced, and the file that killed
    it is reported as unreadable.

    size: side of the squares, if `decode` is given none.
    seconds: a process that takes longer for one request is killed; None waits for it.
    """

    def __init__(self, count: int, size: int, seconds: float | None = None) -> None:
        self._size, self._seconds = size, seconds
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
            [sys.executable, "-c", _PROGRAM, json.dumps([*map(str, sys.path)]), str(self._lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._lock,),
        )
        self._all.append(process)
        return process

    def decode(self, files: Sequence[File], size: int | None = None) -> DecodedChunk:
        """Decode files in an idle process."""
        size = size or self._size
        for _ in range(2 if len(files) == 1 else 1):  # twice: it may have been killed for another reason than the file
            found = self._try(files, size)
            if found is not None:
                return found
        if len(files) == 1:
            return np.empty((0, size, size, 3), dtype=np.uint8), ["the decoder crashes on it"]
        parts = [self.decode([file], size) for file in files]
        return np.concatenate([images for images, _ in parts]), [reason for _, reasons in parts for reason in reasons]

    def _try(self, files: Sequence[File], size: int) -> DecodedChunk | None:
        """Decode files in an idle process; if it dies, start another one and return None."""
        process = self._idle.get()
        try:
            return self._request(process, files, size)
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

    def _request(self, process: subprocess.Popen[bytes], files: Sequence[File], size: int) -> DecodedChunk:
        assert process.stdin is not None
        assert process.stdout is not None
        what = [file if isinstance(file, str) else len(file) for file in files]
        process.stdin.write(json.dumps([size, *what]).encode() + b"\n")
        for file in files:
            if not isinstance(file, str):
                process.stdin.write(file)
        process.stdin.flush()
        if self._seconds is not None:
            answer = select.poll()
            answer.register(process.stdout, select.POLLIN)
            if not answer.poll(1000 * self._seconds):
                raise EOFError
        line = process.stdout.readline()
        if not line:
            raise EOFError
        reasons = json.loads(line)
        images = np.empty((reasons.count(None), size, size, 3), dtype=np.uint8)
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
    """Run as a decoding process: read lines with a size and files, write the reasons and the pixels of each line.

    A file is its path, or its length; then its bytes follow the line.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when to stop
    lock = int(sys.argv[2])
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
        size, *what = json.loads(line)
        files = [each if isinstance(each, str) else sys.stdin.buffer.read(each) for each in what]
        images, reasons = decode_chunk(files, size, one_at_a_time)
        answers.write(json.dumps(reasons).encode() + b"\n")
        answers.write(images.reshape(-1).data)
        answers.flush()
