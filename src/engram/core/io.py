"""Files: atomic writing, locks, and reading JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from engram.core.errors import EngramError

TEMPORARY = ".part"  # suffix of a file that is being written
MAX_DEPTH, MAX_DIGITS = 50, 1000  # of JSON; configurations have about four levels


def typed_path(text: str | Path) -> Path:
    """Return the path that a user typed, with ~ expanded to the home folder unless a file of that name exists."""
    return Path(text if os.path.lexists(text) else os.path.expanduser(text))


def data_home() -> Path:
    """Return the folder for downloaded data: $ENGRAM_DATA, or engram in the user's cache folder."""
    given = os.environ.get("ENGRAM_DATA")
    if given:
        return typed_path(given)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()) / "engram"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside this context into an EngramError that names the path and the reason."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise EngramError(f"{place} cannot be read ({error.strerror}); check its permissions") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside this context into an EngramError that names the path and the reason."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = "there is no permission to write there"
        elif error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            reason = "it is a link or has the wrong type"
        else:
            reason = error.strerror or str(error)
        raise EngramError(f"cannot write {path}: {reason}; files written before are intact") from error


def lock(path: Path) -> int | None:
    """Lock the file at a path and return its handle, or None if another process has locked it.

    The file is created if necessary. Closing the handle releases the lock. Only a regular file without further names
    (hard links) is locked.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise EngramError(f"{path} is not a regular file; remove it")
            refuse_hard_link(path, os.fstat(handle))
            with suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(handle)):
                    return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the file was removed or replaced between opening and locking


def refuse_hard_link(path: Path, status: os.stat_result) -> None:
    """Refuse a file that has another name: writing into it would change the file of that name too."""
    if status.st_nlink > 1:
        raise EngramError(
            f"{path} is a hard link: a file elsewhere has the same content and would change too; "
            "replace it by a copy, or remove it"
        )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces the one at the path when the context ends without an error."""
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
    """Write a file atomically: after a failure, the old file is still there."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write text atomically, as `encoded` returns it."""
    write_bytes(path, encoded(text))


def encoded(text: str) -> bytes:
    """Return text in UTF-8; characters it cannot encode (from unusual file names) become \\udcXX."""
    return text.encode(errors="backslashreplace")


def remove_temporaries(folder: Path, older_than: float = 0.0) -> None:
    """Delete the temporary files that killed processes left in a folder, if they are that many seconds old."""
    for path in folder.rglob(f".*{TEMPORARY}"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime >= older_than:
                path.unlink()


def write_json(path: Path, data: Any) -> None:
    """Write data atomically as JSON."""
    write_bytes(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def parse_json(content: bytes | str) -> Any:
    """Parse JSON from a file; raise a ValueError of one line if it is damaged.

    Nesting and the length of numbers are bounded, so that nothing that uses the data exhausts the stack or stops at
    Python's limit of 4,300 digits. Numbers may be infinite or NaN: typed readers refuse them and name the key.
    """
    try:
        data = json.loads(content.decode() if isinstance(content, bytes) else content, parse_int=_whole_number)
        _check_depth(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return data


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _check_depth(data: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        if isinstance(item, (dict, list)):
            _check_depth(item, depth + 1)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object."""
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise EngramError(f"there is no {path}") from error
    except (OSError, ValueError) as error:
        raise EngramError(f"{path} cannot be read as JSON: it is half-written or damaged ({error})") from error
    if not isinstance(data, dict):
        raise EngramError(f"{path} should contain a JSON object, but contains a {type(data).__name__}")
    return data
