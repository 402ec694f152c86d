"""Decoding of many image files in batches, one batch ahead of the consumer."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from engram.core.memory_limits import check_memory
from engram.data.decode.image import Images, unreadable_error
from engram.data.decode.processes import DecodedChunk, Decoders, decode_chunk

IN_PROCESS_FILES: Final = 512  # files decoded by threads: starting processes would take as long
_CHUNK: Final = 16  # most files given to a thread or process at once
_BATCH: Final = 256

Report = Callable[[int, int], None]  # called with the number of files done and of all files


@dataclass(frozen=True, eq=False)
class Decoded:
    """A batch of decoded files.

    Parameters
    ----------
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

    Parameters
    ----------
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
        decode = self._decode_here if self._decoders is None else self._decoders.decode
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
