"""Writing files so that a reader never sees half of one, locks, and reading JSON with errors for people."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from engram.core.errors import EngramError

TEMPORARY = ".part"  # suffix of a file that is being written


def typed_path(text: str | Path) -> Path:
    """The path that somebody gave: ~ is the home folder, unless there is something of that very name."""
    return Path(text if os.path.lexists(text) else os.path.expanduser(text))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that turns the system's refusals to write into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk is full"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = "there is no permission to write there"
        else:
            what = error.strerror or str(error)
        raise EngramError(f"cannot write {path}: {what}; what was written before is intact") from error


def lock(path: Path) -> int | None:
    """A handle on the file at the path, made if there is none, that nobody else has locked; None while somebody has.

    Closing the handle lets it go. Links are not followed.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, handle):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # it was removed between opening and locking


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file is the one that the path names now."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write; when the context ends well it is at the path, whole and on disk, else what was there is."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_urlsafe(6)}{TEMPORARY}")
        try:
            with temporary.open("xb") as file:  # a new file: the system derives its mode from the umask
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_bytes(path: Path, content: bytes) -> None:
    """Puts the content at the path, whole and on disk, or leaves what was there."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Puts the text at the path in UTF-8, whole or not at all; what UTF-8 lacks (in odd names of files) as \\udcXX."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def remove_temporaries(folder: Path, older_than: float = 0.0) -> None:
    """Removes what a killed process left half-written below the folder, if it is that many seconds old."""
    for path in folder.rglob(f".*{TEMPORARY}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= older_than:
                path.unlink()


def write_json(path: Path, data: Any) -> None:
    """Puts the data at the path as JSON, whole or not at all."""
    write_bytes(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EngramError(f"there is no {path}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EngramError(f"{path} cannot be read as JSON: it is half-written or damaged ({error})") from error
    if not isinstance(data, dict):
        raise EngramError(f"{path} should hold a JSON object and holds a {type(data).__name__}")
    return data
