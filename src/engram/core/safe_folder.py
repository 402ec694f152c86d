"""Read and write files inside a folder only, whatever it contains: links, pipes and devices are refused."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engram.core.errors import EngramError
from engram.core.io import refuse_hard_link, write_bytes, writing


class MissingFile(Exception):
    """A file does not exist, perhaps because it was removed in the meantime. The text is its path."""


class Folder:
    """An open folder. Only regular files inside it are read and written; links are refused.

    A name may be a path inside the folder, such as `a/b`.
    """

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

    @contextmanager
    def _within(self, name: str) -> Iterator[tuple[Folder, str]]:
        """Yield the folder that a file is in, and the file's name there."""
        first, _, rest = name.partition("/")
        if not rest:
            yield self, name
            return
        with self.enter(first) as folder, folder._within(rest) as found:
            yield found

    def has(self, name: str) -> bool:
        """Return whether anything has that name, a broken link too."""
        try:
            with self._within(name) as (folder, last), _as_engram_errors(self.path / name):
                os.lstat(last, dir_fd=folder._handle)
        except MissingFile:
            return False
        return True

    @contextmanager
    def open_file(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """Open a file for reading; yield it and its size."""
        with self._within(name) as (folder, last):
            with _as_engram_errors(self.path / name):
                handle, size = folder._open_regular(last, os.O_RDONLY)
            with os.fdopen(handle, "rb") as file:
                yield file, size

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file; refuse one with more bytes than the limit."""
        path = self.path / name
        with self.open_file(name) as (file, size), _as_engram_errors(path):
            if size > limit:
                raise EngramError(f"{path} has {size} bytes and may have {limit}; it is damaged")
            return file.read(limit + 1)[:size]

    def append(self, name: str, content: bytes) -> None:
        """Append to a file, which is created if it does not exist. A hard link is refused."""
        with self._within(name) as (folder, last), writing(self.path / name):
            handle, _ = folder._open_regular(last, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(handle, "ab") as file:
                refuse_hard_link(self.path / name, os.fstat(handle))
                file.write(content)

    def _open_regular(self, name: str, flags: int) -> tuple[int, int]:
        """Open a regular file in this folder; return its handle and its size. A pipe is not waited for."""
        handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=self._handle)
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode):
            return handle, status.st_size
        os.close(handle)
        raise EngramError(f"{self.path / name} is not a regular file: it is damaged, or was not written by engram")

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically (see `write_bytes`); its folder is created if it does not exist."""
        first, _, rest = name.partition("/")
        if not rest:
            write_bytes(self.path / name, content)  # replaces a link instead of following it
            return
        with writing(self.path / first), suppress(FileExistsError):
            os.mkdir(first, dir_fd=self._handle)
        with self.enter(first) as folder:
            folder.write(rest, content)


def read_inside(root: Path, name: str, limit: int) -> bytes:
    """Return the content of a file in the folder at a path, see `Folder.read`."""
    with Folder.open(root) as folder:
        return folder.read(name, limit)


@contextmanager
def _as_engram_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise MissingFile(str(path)) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK, errno.ENXIO):
            raise EngramError(
                f"{path} is a link or has the wrong type; engram reads only regular files in the folder itself"
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
