"""Cache of trained base stages: runs with the same base stage, such as methods of one family, train it only once.

A cached base stage is named by a digest of everything that determines it. A changed setting gives another name, so an
outdated base stage is never used.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Literal

from torch import Tensor

from engram.core.checkpoint import Checkpoint, load_checkpoint, read_data, save_checkpoint
from engram.core.errors import EngramError
from engram.core.events import BaseAwaited, BaseReused, Event, Warned
from engram.core.io import data_home, lock, remove_temporaries, writing
from engram.experiment.session import Session

LIMIT_BYTES = 2**30
LOCK = ".lock"
WAIT_SECONDS = 0.1  # between two looks at the claim of another run
_HELD: dict[Path, int] = {}  # the lock files that this process holds, and the thread that holds each


@dataclass(frozen=True)
class CachedBaseStage:
    """A trained base stage on disk. used: when it was last written or read, in seconds since the epoch."""

    key: str
    path: Path
    size: int
    used: float


class BaseStageClaim:
    """The exclusive right to train the base stage of a key, until it is closed or the process ends."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path = path
        self._file = file
        _HELD[path.resolve()] = threading.get_ident()

    def close(self) -> None:
        """Give up the claim."""
        _HELD.pop(self._path.resolve(), None)
        # Remove the file before unlocking it: afterwards another run may have locked it.
        with suppress(OSError):
            self._path.unlink()
        self._file.close()


class StageCache:
    """Trained base stages in a folder. Beyond the limit, the least recently used ones are removed."""

    def __init__(self, folder: str | Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes

    def load(self, key: str) -> dict[str, Tensor] | None:
        """The tensors saved under the key, or None. Raises EngramError if they cannot be used."""
        path = self._path(key)
        try:
            kind = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(kind):  # a FIFO would never end, and a link may lead anywhere
            raise EngramError(f"{path} is not a regular file; remove it")
        checkpoint = load_checkpoint(path)
        if checkpoint.data.get("key") != key:
            raise EngramError(
                f"{path} holds the base stage of other settings, whose key is {checkpoint.data.get('key')}"
            )
        with suppress(OSError):  # a read-only cache can still be used
            os.utime(path)
        return checkpoint.tensors

    def save(self, key: str, tensors: dict[str, Tensor], trained_by: str = "") -> None:
        """Save the tensors under the key, and remove the least recently used base stages beyond the limit.

        trained_by: the name of the run, to be shown in lists.
        """
        save_checkpoint(self._path(key), Checkpoint(tensors, {"key": key, "trained_by": trained_by}))
        remove_temporaries(self.folder, older_than=24 * 3600)
        self._remove_locks(key)
        entries = self.entries()
        excess = sum(entry.size for entry in entries) - self.limit_bytes
        for entry in entries:
            if excess <= 0 or entry.key == key:
                break
            with suppress(FileNotFoundError):  # another run may remove files at the same time
                entry.path.unlink()
            excess -= entry.size

    def claim(self, key: str, holder: str) -> BaseStageClaim | None:
        """Claim the training of the base stage of a key; None if another run has the claim.

        holder: the name that other runs show while they wait. Raises EngramError if the folder cannot be written to or
        locked.
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
        return BaseStageClaim(path, file)

    def holder(self, key: str) -> str:
        """The name of the run that has the claim, or "another run" if it is unknown."""
        with suppress(OSError, UnicodeDecodeError):
            return self._lock_path(key).read_text(encoding="utf-8") or "another run"
        return "another run"

    def is_held_here(self, key: str) -> bool:
        """Whether this thread has the claim; waiting for it would never end."""
        return _HELD.get(self._lock_path(key).resolve()) == threading.get_ident()

    def entries(self) -> list[CachedBaseStage]:
        """All cached base stages, the least recently used first."""
        found: list[CachedBaseStage] = []
        for path in self.folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append(CachedBaseStage(path.stem, path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def trained_by(self, key: str) -> str | None:
        """The name of the run that trained the base stage, or None if it is unknown."""
        name = read_data(self._path(key)).get("trained_by")
        return name if isinstance(name, str) and name else None

    def _remove_locks(self, key: str) -> None:
        """Remove the lock files that killed runs left behind, except that of the key."""
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


def user_cache() -> StageCache:
    """The cache in the data folder, which all runs of a user share."""
    return StageCache(data_home() / "stages")


def which_cache(cache: StageCache | bool | None) -> StageCache | None:
    """The cache for a `cache` argument: True is the user's cache; False and None are no cache."""
    if cache is True:
        return user_cache()
    if cache is None or cache is False:
        return None
    if isinstance(cache, StageCache):
        return cache
    raise EngramError(f"cache should be True, False or a StageCache, got {cache!r:.80}")


class SharedBase:
    """The base stage of a run: loaded from the cache, waited for, or trained and shared with other runs.

    cache: None: the base stage is not shared. name: of this run, shown by runs that wait for it. stop: called while it
    waits. Of several processes, only the first uses the cache, and tells the others what it found.
    """

    def __init__(self, session: Session, cache: StageCache | None, name: str, stop: Callable[[], bool]) -> None:
        self._session = session
        self._cache = cache
        self._name = name
        self._stop = stop
        self._claim: BaseStageClaim | None = None  # while this run trains it

    @cached_property
    def _key(self) -> str | None:
        return None if self._cache is None else self._session.base_key()

    def take(self) -> Generator[Event, None, Literal["reused", "train", "stopped"]]:
        """Load the trained base stage, waiting while another run trains it; otherwise claim it, to be trained here."""
        if (yield from self._load(warn=True)):
            return "reused"
        awaited = False
        while not (yield from self.claim()):
            if not awaited:
                assert self._cache is not None
                assert self._key is not None
                awaited = True
                yield BaseAwaited(0, len(self._session.stream), self._cache.holder(self._key))
            if self._stop():
                return "stopped"
            time.sleep(WAIT_SECONDS)
        # Another run may have finished it before the claim; after waiting, the other run has.
        if (yield from self._load(warn=False)):
            self.release()
            return "reused"
        return "train"

    def _load(self, warn: bool) -> Generator[Event, None, bool]:
        """Load the base stage from the cache; return whether it was there and could be used."""
        if self._cache is None or self._key is None:
            return False
        network, processes, tensors = self._session.learner.network, self._session.processes, None
        try:
            if processes.is_first:
                tensors = self._cache.load(self._key)
            if tensors is not None:
                _check_fits(tensors, network.state_dict())
        except EngramError as error:
            tensors = None
            if warn:
                yield Warned(f"the cached base stage cannot be used, so it is trained again: {error}")
        tensors = processes.tensors_from_first(tensors)
        if tensors is None:
            return False
        network.load_state_dict(tensors)
        yield BaseReused(0, str(self._cache.folder))
        return True

    def claim(self) -> Generator[Event, None, bool]:
        """Claim the training, so that other runs wait for it; return False if this run must wait for another."""
        if self._cache is None or self._key is None:
            return True
        processes, is_claimed = self._session.processes, False
        try:
            if processes.is_first:
                self._claim = self._cache.claim(self._key, self._name)
                is_claimed = self._claim is not None or self._cache.is_held_here(self._key)
        except EngramError as error:
            yield Warned(f"the base stage is trained by this run, even if another run trains it as well: {error}")
            is_claimed = True
        return processes.any(is_claimed)[0]

    def share(self) -> Iterator[Event]:
        """Save the trained base stage in the cache; if that fails, only warn."""
        if self._cache is None or self._key is None or not self._session.processes.is_first:
            return
        try:
            self._cache.save(self._key, self._session.learner.network.state_dict(), Path(self._name).name)
        except EngramError as error:
            yield Warned(f"the base stage could not be cached: {error}")
        self.release()

    def release(self) -> None:
        """Give up the claim, if this run has it."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def _check_fits(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of the network: other names, shapes or types."""
    ours, theirs = (
        {name: (tuple(value.shape), value.dtype) for name, value in state.items()} for state in (expected, tensors)
    )
    wrong = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    if wrong:
        raise EngramError(f"{len(wrong)} of its tensors are missing, unknown or of another shape, such as {wrong[0]}")
