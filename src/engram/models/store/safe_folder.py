"""Reading below a folder and nowhere else, whatever its entries are; and what makes writing outlast a power cut."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engram.core.errors import EngramError


class Vanished(Exception):
    """A file is not there (any more)."""


class Folder:
    """A folder held open. What is read of it lies below it: links are refused, as is all that is no ordinary file."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    @contextmanager
    def open(cls, path: Path, within: Folder | None = None) -> Iterator[Folder]:
        """The folder at a path, which may be a link, or of a name within another, which may not."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if within is None:
            with _refusing(path):
                handle = os.open(path, flags)
        else:
            with _refusing(path):
                handle = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=within._handle)
        try:
            yield cls(path, handle)
        finally:
            os.close(handle)

    @contextmanager
    def enter(self, name: str) -> Iterator[Folder]:
        """A folder of that name in this one."""
        assert "/" not in name and name not in (".", ".."), name  # noqa: PT018
        with Folder.open(self.path / name, self) as folder:
            yield folder

    def read(self, name: str, limit: int) -> bytes:
        """The content of a file below (`a/b`), of so many bytes at most."""
        first, _, rest = name.partition("/")
        if rest:
            with self.enter(first) as folder:
                return folder.read(rest, limit)
        path = self.path / name
        with _refusing(path):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, dir_fd=self._handle), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise EngramError(f"{path} is no ordinary file; the model is damaged or was not written by engram")
                if status.st_size > limit:
                    raise EngramError(f"{path} has {status.st_size} bytes and may have {limit}; the model is damaged")
                return file.read(limit + 1)[: status.st_size]


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Vanished(str(path)) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
            raise EngramError(
                f"{path} is a link or not what it should be; a model's files lie in its own folder"
            ) from None
        raise EngramError(f"{path} cannot be read ({error.strerror})") from None


def digest(content: bytes) -> str:
    """32 hex digits that change when the content does."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def is_real_folder(path: Path) -> bool:
    """Whether there is a folder at the path itself, not one that a link leads to."""
    return path.is_dir() and not path.is_symlink()


def write_new(path: Path, content: bytes) -> None:
    """A new file with that content, on disk; its folder is another matter (`sync_folder`)."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Brings a folder's entries to disk, where its file system does that."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
