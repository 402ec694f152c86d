"""A cache of trained base stages: runs that share one, such as several methods on one class order, train it once.

An entry is named by everything that determines it, so a changed setting has another name and never finds a stale one.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch import Tensor

from engram.core.checkpoint import Checkpoint, load_checkpoint, read_data, save_checkpoint
from engram.core.errors import EngramError
from engram.core.io import lock, remove_temporaries, writing

LIMIT_BYTES = 2**30
LOCK = ".lock"
# Of this package, what plays a part in training a base stage.
_HELD: dict[Path, int] = {}  # the lock files of this process, and the thread that has each


@dataclass(frozen=True)
class Entry:
    """One trained base stage on disk; used: when it was last written or read, in seconds since the epoch."""

    key: str
    path: Path
    size: int
    used: float


class Claim:
    """The sole right to train the base stage of a key; it ends when it is closed or with the process."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path = path
        self._file = file
        _HELD[path.resolve()] = threading.get_ident()

    def close(self) -> None:
        """Lets another run have it."""
        _HELD.pop(self._path.resolve(), None)
        # While the lock is held, so that nobody removes a file that another has locked since.
        with suppress(OSError):
            self._path.unlink()
        self._file.close()


class StageCache:
    """Trained base stages in a folder, the longest unused making room for new ones."""

    def __init__(self, folder: str | Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = Path(folder)
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

    def save(self, key: str, tensors: dict[str, Tensor], trained_by: str = "") -> None:
        """Keeps the tensors under the key, and removes the longest unused entries beyond the limit.

        trained_by: the name of the run, for whoever looks at what is kept.
        """
        save_checkpoint(self._path(key), Checkpoint(tensors, {"key": key, "trained_by": trained_by}))
        remove_temporaries(self.folder, older_than=24 * 3600)
        self._remove_locks(key)
        entries = self.entries()
        excess = sum(entry.size for entry in entries) - self.limit_bytes
        for entry in entries:
            if excess <= 0 or entry.key == key:
                break
            with suppress(FileNotFoundError):  # another run may have made room at the same time
                entry.path.unlink()
            excess -= entry.size

    def claim(self, key: str, holder: str) -> Claim | None:
        """The claim to train what belongs under the key, in the holder's name; None while another run has it.

        Raises EngramError where the folder cannot be written to or locked.
        """
        path = self._lock_path(key)
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = lock(path)
            if handle is None:
                return None
            file = os.fdopen(handle, "w", encoding="utf-8")
            file.truncate(0)
            file.write(holder)
            file.flush()
        return Claim(path, file)

    def holder(self, key: str) -> str:
        """The name of the run that has the claim, as far as it can be told."""
        with suppress(OSError, UnicodeDecodeError):
            return self._lock_path(key).read_text(encoding="utf-8") or "another run"
        return "another run"

    def is_held_here(self, key: str) -> bool:
        """Whether a run of this very thread has the claim: one that waited for it would wait for ever."""
        return _HELD.get(self._lock_path(key).resolve()) == threading.get_ident()

    def entries(self) -> list[Entry]:
        """What is kept, the longest unused first."""
        found: list[Entry] = []
        for path in self.folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append(Entry(path.stem, path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def trained_by(self, key: str) -> str | None:
        """The name of the run that trained it, as far as it is known."""
        name = read_data(self._path(key)).get("trained_by")
        return name if isinstance(name, str) and name else None

    def _remove_locks(self, key: str) -> None:
        """Removes the lock files that killed runs left, but for the key's own."""
        for path in self.folder.glob(f"*{LOCK}"):
            if path.stem != key:
                with suppress(EngramError):
                    claim = self.claim(path.stem, "")
                    if claim is not None:
                        claim.close()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _lock_path(self, key: str) -> Path:
        return self.folder / f"{key}{LOCK}"
