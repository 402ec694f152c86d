"""A cache of trained base stages: runs that share one, such as several methods on one class order, train it once.

An entry is named by everything that determines it, so a changed setting has another name and never finds a stale one.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor

from engram.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from engram.files import remove_temporaries

LIMIT_BYTES = 2**30


@dataclass(frozen=True)
class Entry:
    """One trained base stage on disk; used: when it was last written or read, in seconds since the epoch."""

    key: str
    path: Path
    size: int
    used: float


@cache
def _package_code() -> str:
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parent
    for name in ("data", "models", "methods", "engine", "random.py", "learner.py", "session.py"):
        paths = sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name]
        for path in paths:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def code_digest(method: object) -> str:
    """A digest of the code that trains a base stage: edited code finds no old entry.

    It covers this package and, for a method from elsewhere, the class itself.
    """
    digest = hashlib.blake2b(_package_code().encode(), digest_size=16)
    if not type(method).__module__.startswith("engram."):
        try:
            digest.update(inspect.getsource(type(method)).encode())
        except (OSError, TypeError):  # typed in by hand, it has no source to tell it apart by
            digest.update(repr(id(type(method))).encode())
    return digest.hexdigest()


class StageCache:
    """Trained base stages in a folder, the longest unused making room for new ones."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def load(self, key: str) -> dict[str, Tensor] | None:
        """The tensors kept under the key; None where there are none. Raises EngramError for a damaged entry."""
        path = self._path(key)
        if not path.is_file():
            return None
        tensors = load_checkpoint(path).tensors
        with suppress(OSError):  # a cache that cannot be written to can still be read
            os.utime(path)
        return tensors

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keeps the tensors under the key, and removes the longest unused entries beyond the limit."""
        save_checkpoint(self._path(key), Checkpoint(tensors, {"key": key}))
        remove_temporaries(self.folder, older_than=24 * 3600)
        entries = self.entries()
        excess = sum(entry.size for entry in entries) - self.limit_bytes
        for entry in entries:
            if excess <= 0 or entry.key == key:
                break
            with suppress(FileNotFoundError):  # another run may have made room at the same time
                entry.path.unlink()
            excess -= entry.size

    def entries(self) -> list[Entry]:
        """What is kept, the longest unused first."""
        found: list[Entry] = []
        for path in self.folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append(Entry(path.stem, path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"
