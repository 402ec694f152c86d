"""Decoding of many image files into a cache: in threads, in their order, continued where it was stopped."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import numpy as np

from engram.core.errors import EngramError, option
from engram.data.decode.prefetch import Report
from engram.data.sources.image_cache import DecodingProgress, Description, ImageCache, UnfinishedImages
from engram.data.store import Images

CHUNK: Final = 512  # files handed to the threads at once, between two records of the progress
HASHED_BYTES: Final = 2**24  # read at once to compute the fingerprint
Attempt = Callable[[str], Images | EngramError]  # decodes the file at a path, or says why it cannot
Listed = Mapping[str, Sequence[tuple[int, str]]]  # class id and path of each file, by split


def check_files(paths: Sequence[str], attempt: Attempt) -> None:
    """Raise an EngramError for the first of these files that cannot be decoded."""
    for path in paths:
        found = attempt(path)
        if isinstance(found, EngramError):
            raise found


class Decoding:
    """Decodes the files of all splits of a data set, from where an earlier process stopped.

    progress: called with the number of files that are read and of all files.
    """

    def __init__(
        self,
        cache: ImageCache,
        key: str,
        side: int,
        class_names: Sequence[str],
        files: Listed,
        attempt: Attempt,
        progress: Report | None,
    ) -> None:
        self._cache, self._key, self._side = cache, key, side
        self._names, self._files = class_names, files
        self._attempt, self._progress = attempt, progress
        self._listed = [(split, class_id, path) for split in files for class_id, path in files[split]]
        self._counts = {split: [0] * len(class_names) for split in files}
        self._skipped: list[str] = []
        self._read = 0

    def decode(self, skip_bad: bool) -> Description:
        """Write the pixels of all files to the cache and return the description of the data set.

        A file that cannot be decoded is skipped or raised. What was decoded before an error or a kill is kept.
        """
        image_bytes = self._side**2 * 3
        all_bytes = len(self._listed) * image_bytes
        with ExitStack() as stack:
            into = stack.enter_context(self._cache.unfinished(self._key, image_bytes, all_bytes))
            found = into.resume(self._state())
            self._read, self._skipped = found.files, list(found.skipped)
            self._counts = {split: list(counts) for split, counts in found.counts.items()}
            fingerprint = Fingerprint(into, self._names, self._files, self._side)
            stack.callback(fingerprint.stop)
            fingerprint.reaches(self._state().images)
            try:
                self._append_all(into, fingerprint, skip_bad)
            except BaseException as error:
                into.keep(self._state())
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._disk_full() from error
                raise
            counts = {split: tuple(numbers) for split, numbers in self._counts.items()}
            digest = fingerprint.digest(counts)
        return Description(sum(map(sum, counts.values())), self._side, counts, tuple(self._skipped), "", digest)

    def _state(self) -> DecodingProgress:
        counts = {split: tuple(numbers) for split, numbers in self._counts.items()}
        return DecodingProgress(self._read, counts, tuple(self._skipped))

    def _append_all(self, into: UnfinishedImages, fingerprint: Fingerprint, skip_bad: bool) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            while self._read < len(self._listed):
                part = self._listed[self._read : self._read + CHUNK]
                images = threads.map(self._attempt, [path for _, _, path in part])
                for (split, class_id, path), image in zip(part, images, strict=True):
                    if not isinstance(image, EngramError):
                        into.append(image)
                        self._counts[split][class_id] += 1
                    elif skip_bad:
                        self._skipped.append(path)
                    else:
                        threads.shutdown(wait=False, cancel_futures=True)
                        raise image
                    self._read += 1
                    if self._progress is not None:
                        self._progress(self._read, len(self._listed))
                into.mark(self._state())
                fingerprint.reaches(self._state().images)

    def _disk_full(self) -> EngramError:
        return EngramError(
            f"the disk of {self._cache.folder} is full; {self._read:,} of {len(self._listed):,} files are decoded and "
            f"kept: free some space and start again, or give a smaller {option('image_size')}"
        )


class Fingerprint:
    """The fingerprint of a store (`ImageStore.fingerprint`), computed in a thread behind the images being written.

    The numbers of images come before the pixels in it. They are taken to be those of the files; if some are skipped,
    `digest` reads the pixels again.
    """

    def __init__(self, images: UnfinishedImages, names: Sequence[str], files: Listed, side: int) -> None:
        self._path, self._names, self._side = images.path, tuple(names), side
        listed = {split: [class_id for class_id, _ in files[split]] for split in files}
        self._counts = {split: tuple(np.bincount(ids, minlength=len(names)).tolist()) for split, ids in listed.items()}
        self._changed = threading.Condition()
        self._written, self._stopped = 0, False
        self._digest: str | None = None
        self._thread = threading.Thread(target=self._follow, name="fingerprint", daemon=True)
        self._thread.start()

    def reaches(self, images: int) -> None:
        """Tell that this many images are written."""
        with self._changed:
            self._written = images
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def digest(self, counts: Mapping[str, tuple[int, ...]]) -> str:
        """The fingerprint, when all images are written: these many by split and class."""
        if counts != self._counts:
            self.stop()
            self._counts, self._stopped = dict(counts), False
            self._follow()
        else:
            self._thread.join()
        if self._digest is None:
            raise EngramError(f"the decoded images in {self._path} cannot be read again; check the disk")
        return self._digest

    def _follow(self) -> None:
        digest = hashlib.blake2b(repr(self._names).encode(), digest_size=16)
        image_bytes = self._side**2 * 3
        some = max(1, HASHED_BYTES // image_bytes)
        done = 0
        with self._path.open("rb") as file:
            for counts in self._counts.values():
                end = done + sum(counts)
                digest.update(repr((sum(counts), self._side, self._side, 3)).encode())
                digest.update(np.repeat(np.arange(len(counts), dtype="<i8"), counts).data)
                while done < end:
                    ready = self._wait_for(done)
                    if ready is None:
                        return
                    count = min(some, ready - done, end - done)
                    pixels = file.read(count * image_bytes)
                    if len(pixels) < count * image_bytes:
                        return  # `digest` says that it cannot be read
                    digest.update(pixels)
                    done += count
        self._digest = digest.hexdigest()

    def _wait_for(self, done: int) -> int | None:
        """Wait until more than that many images are written; return their number, or None when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._written > done)
            return None if self._stopped else self._written
