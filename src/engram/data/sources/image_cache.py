"""Cache of decoded images on disk, memory-mapped: a data set too large for memory is decoded only once.

A cached data set is a file with the pixels of all images of all splits, and a JSON file that describes them. Its key
depends on the image files, so the cache never returns old pixels for changed files. While it is decoded, its pixels so
far and a record of the progress are there instead, and a lock; a killed process loses at most the last part.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from engram.core.errors import EngramError, option
from engram.core.io import lock, remove_temporaries, write_json, writing
from engram.core.serialize import to_plain
from engram.data.store import Images
from engram.runs.checked import Count, Size, read_checked

LIMIT_BYTES = 300 * 10**9  # ImageNet takes 262 GB, its first 100 classes 26 GB
PIXELS, DESCRIPTION = ".pixels", ".json"
UNFINISHED, PROGRESS, LOCK, FOLDER = ".unfinished", ".progress", ".lock", ".folder"
WAIT_SECONDS = 0.5  # between two looks at the lock of another process
Notice = Callable[[str], None]  # called with a sentence for the user


@dataclass(frozen=True)
class CachedImages:
    """A decoded data set on disk. size: in bytes. used: time of the last use, in seconds since 1970. kind: of file."""

    key: str
    size: int
    used: float
    kind: str = PIXELS


@dataclass(frozen=True)
class Description:
    """A decoded data set: number and side of the images, their numbers by split and class, and the files left out."""

    images: Count
    side: Size
    counts: Mapping[str, tuple[Count, ...]]
    skipped: tuple[str, ...] = ()
    source: str = ""
    fingerprint: str | None = None


@dataclass(frozen=True)
class DecodingProgress:
    """How far a decoding is. files: read, of all in their order. counts: images by split and class. skipped: files."""

    files: Count
    counts: Mapping[str, tuple[Count, ...]]
    skipped: tuple[str, ...] = ()

    @property
    def images(self) -> int:
        """The number of images written."""
        return sum(map(sum, self.counts.values()))


@dataclass(frozen=True)
class FolderRecord:
    """The folder that a cached data set was made from, to recognise it without listing its files.

    classes: names of the class folders. folders: when each folder was changed, by path. files: size and time of change
    of some files, by path. Times are in nanoseconds.
    """

    key: str
    classes: tuple[str, ...]
    folders: Mapping[str, int]
    files: Mapping[str, tuple[int, int]]


class ImageCache:
    """Decoded data sets in a folder. Those not used for the longest time are deleted for new ones."""

    def __init__(self, folder: str | Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes

    def description(self, key: str) -> Description | None:
        """Return the description of a data set; None if it is missing, damaged or incomplete: it is decoded again."""
        try:
            found = read_checked(Description, self.path(key, DESCRIPTION), "delete the file")
            counted = sum(map(sum, found.counts.values()))
            complete = counted == found.images and self.path(key).stat().st_size == counted * found.side**2 * 3
        except (EngramError, OSError):
            return None
        return found if complete else None

    def images(self, key: str, count: int, side: int) -> Images:
        """Return the images (count, side, side, 3) of a data set, mapped from the file."""
        path = self.path(key)
        try:
            mapped = np.memmap(path, dtype=np.uint8, mode="r", shape=(count, side, side, 3))
        except (OSError, ValueError) as error:
            raise EngramError(f"the decoded images in {path} cannot be read ({error}); delete the file") from None
        with suppress(OSError):  # a read-only cache can still be used
            os.utime(path)
        return np.asarray(mapped)

    @contextmanager
    def locked(self, key: str, notice: Notice | None = None) -> Iterator[None]:
        """Hold the exclusive right to write a data set inside this context; wait while another process has it."""
        path, waits = self.path(key, LOCK), False
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            while (handle := lock(path)) is None:
                if not waits and notice is not None:
                    notice(f"another process is decoding these images; waiting for it ({path})")
                waits = True
                time.sleep(WAIT_SECONDS)
        try:
            yield
        finally:
            with suppress(OSError):  # before unlocking it: afterwards another process may have locked it
                path.unlink()
            os.close(handle)

    @contextmanager
    def unfinished(self, key: str, image_bytes: int, all_bytes: int) -> Iterator[UnfinishedImages]:
        """Yield the pixels so far of a data set that is being decoded, to append to; they stay after an error.

        all_bytes: upper limit of the size of the whole set. Needs `locked`.
        """
        path = self.path(key, UNFINISHED)
        with writing(path):
            remove_temporaries(self.folder, older_than=24 * 3600)
            known = path.stat().st_size if path.exists() else 0
            self._free_space(key, all_bytes, all_bytes - known)
            with path.open("ab", buffering=0) as file:
                yield UnfinishedImages(self, key, file, image_bytes)

    def finish(self, key: str, description: Description) -> None:
        """Make the pixels so far, which are complete, a data set."""
        with writing(self.path(key)):
            self.path(key, UNFINISHED).replace(self.path(key))
        write_json(self.path(key, DESCRIPTION), to_plain(description))
        self.path(key, PROGRESS).unlink(missing_ok=True)

    def recall(self, name: str) -> FolderRecord | None:
        """Return the record of a folder; None if there is none or it is damaged."""
        try:
            return read_checked(FolderRecord, self.path(name, FOLDER), "delete the file")
        except (EngramError, OSError):
            return None

    def remember(self, name: str, record: FolderRecord) -> None:
        """Save the record of a folder; a read-only cache stays as it is."""
        with suppress(EngramError):
            write_json(self.path(name, FOLDER), to_plain(record))

    def entries(self) -> list[CachedImages]:
        """List the cached data sets, unfinished ones included, the longest unused first."""
        found: list[CachedImages] = []
        for kind in (PIXELS, UNFINISHED):
            for path in self.folder.glob(f"*{kind}"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    found.append(CachedImages(path.name.removesuffix(kind), status.st_size, status.st_mtime, kind))
        return sorted(found, key=lambda entry: entry.used)

    def _free_space(self, key: str, all_bytes: int, need: int) -> None:
        """Delete the longest unused data sets, except the one with this key, until the new one keeps to the limit.

        Raise an EngramError if the disk has less than `need` bytes.
        """
        entries = [entry for entry in self.entries() if entry.key != key]
        excess = sum(entry.size for entry in entries) + all_bytes - self.limit_bytes
        for entry in entries:
            if excess <= 0:
                break
            handle = lock(self.path(entry.key, LOCK))
            if handle is None:  # another process is decoding it
                continue
            for kind in (DESCRIPTION, PROGRESS, UNFINISHED, PIXELS, LOCK):  # a run that has opened it can still read it
                self.path(entry.key, kind).unlink(missing_ok=True)
            os.close(handle)
            excess -= entry.size
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise EngramError(
                f"the decoded images need {need / 1e9:.1f} GB in {self.folder}, where {free / 1e9:.1f} GB are free; "
                f"free some space, set ENGRAM_DATA to another disk, or give a smaller {option('image_size')}"
            )

    def path(self, key: str, kind: str = PIXELS) -> Path:
        """Return the path of the pixels of a data set, or of another of its files."""
        return self.folder / f"{key}{kind}"


class UnfinishedImages:
    """The pixels so far of a data set that is being decoded: written, not mapped, since a full disk would then kill."""

    def __init__(self, cache: ImageCache, key: str, file: FileIO, image_bytes: int) -> None:
        self.path = Path(os.fsdecode(file.name))
        self._cache, self._key, self._file, self._image_bytes = cache, key, file, image_bytes

    def resume(self, empty: DecodingProgress) -> DecodingProgress:
        """Return how far the decoding is, and drop what was written after that; `empty` if nothing is known of it."""
        try:
            found = read_checked(DecodingProgress, self._cache.path(self._key, PROGRESS), "delete the file")
        except (EngramError, OSError):
            found = empty
        alike = {split: len(counts) for split, counts in found.counts.items()}
        is_known = alike == {split: len(counts) for split, counts in empty.counts.items()}
        if not is_known or self.path.stat().st_size < found.images * self._image_bytes:
            found = empty
        self._file.truncate(found.images * self._image_bytes)
        return found

    def append(self, image: Images) -> None:
        """Write an image."""
        left = memoryview(np.ascontiguousarray(image).data).cast("B")
        while left:
            left = left[self._file.write(left) :]

    def mark(self, progress: DecodingProgress) -> None:
        """Record that everything up to here is written."""
        os.fdatasync(self._file.fileno())
        write_json(self._cache.path(self._key, PROGRESS), to_plain(progress))

    def keep(self, progress: DecodingProgress) -> None:
        """Record what was written before an error, as far as that is possible; what is half written is dropped."""
        with suppress(OSError, EngramError):
            os.truncate(self.path, progress.images * self._image_bytes)
            write_json(self._cache.path(self._key, PROGRESS), to_plain(progress))


def folder_name(name: str, side: int, root: Path) -> str:
    """The name under which the record of a folder is saved."""
    digest = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=8).hexdigest()
    return f"{name}-{side}-{digest}"
