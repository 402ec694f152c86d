"""Decoded images on disk, memory-mapped: a set too large for memory is decoded once and then read in place.

An entry is one file of pixels, all images of all splits one after the other, and a JSON file that says what they are.
It is named by what determines it, so changed files have another name and never find stale pixels.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engram.core.errors import EngramError, option
from engram.core.io import read_json, remove_temporaries, replacing, write_json, writing
from engram.data.store import Images

LIMIT_BYTES = 300 * 10**9  # ImageNet's 1,000 classes take 262 of them, its first 100 26
PIXELS, ABOUT = ".pixels", ".json"


@dataclass(frozen=True)
class CachedImages:
    """A decoded set on disk; used: when it was last written or read, in seconds since the epoch."""

    key: str
    size: int
    used: float


class ImageCache:
    """Decoded sets in a folder, the longest unused making room for new ones."""

    def __init__(self, folder: str | Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes

    def about(self, key: str) -> dict[str, Any] | None:
        """What was said of the set under the key; None where it is not there, or not whole."""
        try:
            about = read_json(self.path(key, ABOUT))
            whole = self.path(key).stat().st_size == about["images"] * about["side"] ** 2 * 3
        except (EngramError, OSError, KeyError, TypeError):
            return None
        return about if whole else None

    def images(self, key: str, count: int, side: int) -> Images:
        """The images (count, side, side, 3) of the set under the key, which stay in the file until they are read."""
        path = self.path(key)
        try:
            mapped = np.memmap(path, dtype=np.uint8, mode="r", shape=(count, side, side, 3))
        except (OSError, ValueError) as error:
            raise EngramError(f"the decoded images in {path} cannot be read ({error}); delete the file") from None
        with suppress(OSError):  # a cache that cannot be written to can still be read
            os.utime(path)
        return np.asarray(mapped)

    def save(self, key: str, images: Iterable[Images], expected_bytes: int) -> int:
        """Writes the images, one after the other, and returns how many they were; `describe` makes them an entry.

        What is left of them if that breaks off is removed. expected_bytes: what they will take, at most.
        """
        path = self.path(key)
        count = 0
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_temporaries(self.folder, older_than=24 * 3600)
            self._make_room(key, expected_bytes)
        # Written and not mapped: a full disk is then an error and not the end of the process.
        with replacing(path) as file:
            for image in images:
                file.write(np.ascontiguousarray(image).data)
                count += 1
        return count

    def describe(self, key: str, about: dict[str, Any]) -> None:
        """Makes an entry of the images saved; `images` and `side` are among what is said of them."""
        write_json(self.path(key, ABOUT), about)

    def entries(self) -> list[CachedImages]:
        """What is kept, the longest unused first."""
        found: list[CachedImages] = []
        for path in self.folder.glob(f"*{PIXELS}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append(CachedImages(path.name.removesuffix(PIXELS), status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def _make_room(self, key: str, need: int) -> None:
        """Removes the longest unused entries that leave no room within the limit; refuses what the disk has not.

        What is under the key itself stays until it is replaced.
        """
        entries = [entry for entry in self.entries() if entry.key != key]
        excess = sum(entry.size for entry in entries) + need - self.limit_bytes
        for entry in entries:
            if excess <= 0:
                break
            for kind in (ABOUT, PIXELS):  # a run that has the file open keeps it
                with suppress(FileNotFoundError):
                    self.path(entry.key, kind).unlink()
            excess -= entry.size
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise EngramError(
                f"the decoded images need {need / 1e9:.1f} GB in {self.folder}, where {free / 1e9:.1f} GB are free; "
                f"make room, name a folder on another disk in ENGRAM_DATA, or give a smaller {option('image_size')}"
            )

    def path(self, key: str, kind: str = PIXELS) -> Path:
        """Where the pixels of a set are, or what is said of them (ABOUT)."""
        return self.folder / f"{key}{kind}"
