"""Cache of decoded images on disk, memory-mapped: a data set too large for memory is decoded only once.

A cached data set is a file with the pixels of all images of all splits, and a JSON file that describes them. Its key
depends on the image files, so the cache never returns old pixels for changed files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engram.core.errors import EngramError, option
from engram.core.io import remove_temporaries, replacing, write_json, writing
from engram.core.serialize import to_plain
from engram.data.store import Images
from engram.runs.checked import Count, Size, read_checked

LIMIT_BYTES = 300 * 10**9  # ImageNet takes 262 GB, its first 100 classes 26 GB
PIXELS, DESCRIPTION = ".pixels", ".json"


@dataclass(frozen=True)
class CachedImages:
    """A decoded data set on disk. size: in bytes. used: time of the last use, in seconds since 1970."""

    key: str
    size: int
    used: float


@dataclass(frozen=True)
class Description:
    """A decoded data set: number and side of the images, their numbers by split and class, and the files left out."""

    images: Count
    side: Size
    counts: Mapping[str, tuple[Count, ...]]
    skipped: tuple[str, ...] = ()
    source: str = ""
    fingerprint: str | None = None


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

    def save(self, key: str, images: Iterable[Images], expected_bytes: int) -> int:
        """Write the images to the file of a data set and return their number; `describe` must follow.

        expected_bytes: upper limit of their size. An incomplete file is deleted.
        """
        path = self.path(key)
        count = 0
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_temporaries(self.folder, older_than=24 * 3600)
            self._free_space(key, expected_bytes)
        # Written, not memory-mapped: with a mapped file, a full disk would kill the process.
        with replacing(path) as file:
            for image in images:
                file.write(np.ascontiguousarray(image).data)
                count += 1
        return count

    def describe(self, key: str, description: Description) -> None:
        """Write the description of saved images, to complete the set."""
        write_json(self.path(key, DESCRIPTION), to_plain(description))

    def entries(self) -> list[CachedImages]:
        """List the cached data sets, the longest unused first."""
        found: list[CachedImages] = []
        for path in self.folder.glob(f"*{PIXELS}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append(CachedImages(path.name.removesuffix(PIXELS), status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def _free_space(self, key: str, need: int) -> None:
        """Delete the longest unused data sets, except the one with this key, until the new one keeps to the limit.

        Raise an EngramError if the disk is too small.
        """
        entries = [entry for entry in self.entries() if entry.key != key]
        excess = sum(entry.size for entry in entries) + need - self.limit_bytes
        for entry in entries:
            if excess <= 0:
                break
            for kind in (DESCRIPTION, PIXELS):  # a run that has opened the file can still read it
                with suppress(FileNotFoundError):
                    self.path(entry.key, kind).unlink()
            excess -= entry.size
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise EngramError(
                f"the decoded images need {need / 1e9:.1f} GB in {self.folder}, where {free / 1e9:.1f} GB are free; "
                f"free some space, set ENGRAM_DATA to another disk, or give a smaller {option('image_size')}"
            )

    def path(self, key: str, kind: str = PIXELS) -> Path:
        """Return the path of the pixels of a data set, or of its description."""
        return self.folder / f"{key}{kind}"
