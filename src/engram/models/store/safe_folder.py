"""Read files inside a folder only, even if it contains links; write files that survive a power cut."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engram.core.errors import EngramError


class MissingFile(Exception):
    """A file does not exist, perhaps because it was removed in the meantime."""


class Folder:
    """An open folder. Only regular files inside it are read; links are refused."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    @contextmanager
    def open(cls, path: Path, within: Folder | None = None) -> Iterator[Folder]:
        """Open the folder at a path, which may be a link; or a folder inside another, which may not."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with _as_engram_errors(path):
            if within is None:
                handle = os.open(path, flags)
            else:
                handle = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=within._handle)
        try:
            yield cls(path, handle)
        finally:
            os.close(handle)

    @contextmanager
    def enter(self, name: str) -> Iterator[Folder]:
        """Open a subfolder."""
        assert "/" not in name and name not in (".", ".."), name  # noqa: PT018
        with Folder.open(self.path / name, self) as folder:
            yield folder

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file (`a/b`); refuse one with more bytes than the limit."""
        first, _, rest = name.partition("/")
        if rest:
            with self.enter(first) as folder:
                return folder.read(rest, limit)
        path = self.path / name
        with _as_engram_errors(path):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, dir_fd=self._handle), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise EngramError(
                        f"{path} is not a regular file; the model is damaged or was not written by engram"
                    )
                if status.st_size > limit:
                    raise EngramError(f"{path} has {status.st_size} bytes and may have {limit}; the model is damaged")
                return file.read(limit + 1)[: status.st_size]


@contextmanager
def _as_engram_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise MissingFile(str(path)) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
            raise EngramError(
                f"{path} is a link or has the wrong type; a model's files are regular files in its own folder"
            ) from None
        raise EngramError(f"{path} cannot be read ({error.strerror})") from None


def digest(content: bytes) -> str:
    """Return the checksum of the content: 32 hex digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def is_real_folder(path: Path) -> bool:
    """Return whether the path is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def write_new(path: Path, content: bytes) -> None:
    """Create a file and sync it to disk. Its folder needs `sync_folder`."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk, if the file system supports it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
