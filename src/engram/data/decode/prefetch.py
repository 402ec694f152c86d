"""Many image files to pixels, some at a time and ahead of whoever takes them."""

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

from engram.core.errors import EngramError, option
from engram.core.memory_limits import check_room
from engram.data.decode.processes import Decoders, Found, decode_here
from engram.data.store import Images

FEW: Final = 512  # files that are decoded here: starting processes would take as long
_CHUNK: Final = 16  # the most that one thread or process is given at once
_BATCH: Final = 256

Report = Callable[[int, int], None]  # how many are done, of how many


@dataclass(frozen=True, eq=False)
class Decoded:
    """Some files decoded: the images (N, size, size, 3) and their paths; skipped: path and reason of those left out.

    pause: the next may be long in coming, so that these are not to wait for it.
    """

    paths: list[str]
    images: Images
    skipped: list[tuple[str, str]]
    pause: bool = False


def decode_stream(
    paths: Iterable[str | Path | None], size: int, *, batch: int = _BATCH, workers: int | None = None
) -> Iterator[Decoded]:
    """The files in their order, a batch at a time, decoded one batch ahead of whoever takes them.

    The first `FEW` are decoded by threads, those after them by processes, `workers` at once (None: as there are cores,
    16 at most; 1: no process). What it needs does not depend on how many there are. Bad files are skipped and named.
    None among the paths: the next may be long in coming, and all before it come at once.
    """
    with _Pool(size, workers or min(16, os.cpu_count() or 1)) as pool:
        before: tuple[list[str], list[Future[Found]]] | None = None
        for some, pause in _batches(paths, batch):
            if some:
                before, taken = (some, pool.submit(some)), before
                if taken is not None:
                    yield _gather(*taken)
            if pause and before is not None:
                taken, before = before, None
                yield _gather(*taken, pause=True)
        if before is not None:
            yield _gather(*before)


def _batches(paths: Iterable[str | Path | None], batch: int) -> Iterator[tuple[list[str], bool]]:
    """The paths, so many at a time or as many as there are before a None, and whether one followed."""
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
    """Threads that decode, and, once there is enough to do, processes that do it for them."""

    def __init__(self, size: int, workers: int) -> None:
        self.workers = workers
        self._size = size
        self._threads = ThreadPoolExecutor(workers, "decode")
        self._large = ThreadPoolExecutor(1, "decode-large")  # every thread that loaded one would keep the memory
        self._decoders: Decoders | None = None
        self._alone = workers == 1 or not sys.executable
        self._given = 0

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._decoders is not None:
            self._decoders.close()
        self._threads.shutdown()
        self._large.shutdown()

    def submit(self, paths: Sequence[str]) -> list[Future[Found]]:
        """Has the files decoded, some at a time."""
        self._given += len(paths)
        if self._decoders is None and not self._alone and self._given > FEW:
            self._start()
        decode = self._here if self._decoders is None else self._decoders.decode
        chunk = min(_CHUNK, -(-len(paths) // self.workers))
        return [self._threads.submit(decode, paths[at : at + chunk]) for at in range(0, len(paths), chunk)]

    def _start(self) -> None:
        try:
            self._decoders = Decoders(self.workers, self._size)
        except OSError as error:
            self._alone = True
            reason = f"no other could be started ({error.strerror})"
            warnings.warn(f"images are decoded by this process alone, and slower: {reason}", RuntimeWarning, 2)

    def _here(self, paths: Sequence[str]) -> Found:
        return decode_here(paths, self._size, lambda load: self._large.submit(load).result())


def _gather(paths: Sequence[str], parts: Sequence[Future[Found]], pause: bool = False) -> Decoded:
    found = [part.result() for part in parts]
    reasons = [reason for _, reasons in found for reason in reasons]
    named = list(zip(paths, reasons, strict=True))
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
    """The images (N, size, size, 3), the positions in `paths` they came from, and those skipped, with the reason.

    Without `skip_bad` the first bad file is refused.
    """
    check_room(len(paths) * size * size * 3, f"{len(paths)} images of {size}x{size} pixels")
    images = np.empty((len(paths), size, size, 3), dtype=np.uint8)
    kept: list[int] = []
    skipped: list[tuple[str, str]] = []
    done = 0
    for part in decode_stream(paths, size, workers=workers):
        if part.skipped and not skip_bad:
            path, reason = part.skipped[0]
            how = f"mend or remove it, or go on without such files with {option('skip_bad', True)}"
            raise EngramError(f"the image {path} cannot be read ({reason}); {how}")
        images[len(kept) : len(kept) + len(part.paths)] = part.images
        bad = {path for path, _ in part.skipped}
        here = range(done, done + len(part.paths) + len(part.skipped))
        kept += [position for position in here if str(paths[position]) not in bad]
        skipped += part.skipped
        done = here.stop
        if progress is not None:
            progress(done, len(paths))
    return images[: len(kept)], kept, skipped
