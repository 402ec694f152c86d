"""Read multipart uploads into files while they arrive, within limits; small ones are held in memory if they may be.

Files get names of the server's. The name that a client gives a file is only text.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from engram.core.errors import EngramError
from engram.core.io import lock
from engram.data.decode.prefetch import File
from engram.serve.limits import Limits, Refused, busy

_TEMPORARY, _LOCK = "engram-serve-", ".lock"
OLD = 3600.0  # seconds after which a folder that no server has locked was left by one that was killed
FIELDS, FIELD_BYTES, HEADER_BYTES, NAME_LENGTH = 16, 4096, 8192, 255
SMALL_BYTES = 64 * 2**10  # of a file that is held in memory


@dataclass
class Received:
    """A file of an upload. name: as the client calls it. error: why it cannot be used.

    content: of a small file, which then is not at `path`. digest: empty if small files may be held.
    """

    name: str
    path: Path
    size: int = 0
    digest: str = ""
    error: str | None = None
    content: bytearray | None = None

    @property
    def source(self) -> File:
        """The content to decode."""
        return str(self.path) if self.content is None else self.content


@dataclass
class Upload:
    """The content of an upload: files, and other fields by name."""

    files: list[Received] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)


class Budget:
    """Bytes that all requests together may hold at the same time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._lock = threading.Lock()

    def reserve(self, size: int) -> None:
        """Count bytes that are held; refuse more than the limit."""
        with self._lock:
            if self._used + size > self._limit:
                raise busy("the server is receiving too many bytes at the moment; try again")
            self._used += size

    def try_reserve(self, size: int) -> bool:
        """Count bytes that are held, if that is within the limit."""
        with self._lock:
            fits = self._used + size <= self._limit
            self._used += size if fits else 0
            return fits

    def give_back(self, size: int) -> None:
        """Count bytes that are no longer held."""
        with self._lock:
            self._used -= size


class Spool(Budget):
    """A folder for files of requests, with a limit on the bytes of all of them together.

    memory: small files are held in memory within this budget. None: all are written to the folder.
    """

    def __init__(self, folder: Path, limits: Limits, memory: Budget | None = None) -> None:
        super().__init__(limits.spool_bytes)
        self.folder, self.memory = folder, memory
        self._numbers = itertools.count()

    def new_path(self) -> Path:
        """Return a path that nothing has yet."""
        return self.folder / f"{os.getpid()}-{next(self._numbers):08d}"

    def release(self, files: list[Received]) -> None:
        """Delete the files that are still there, and give their bytes back."""
        for file in files:
            if file.content is None:
                with suppress(OSError):
                    file.path.unlink()
            else:
                self._forget(file)
            self.give_back(file.size)
            file.size = 0

    def hold(self, file: Received, part: memoryview) -> bool:
        """Add a part to the content of a small file; False if it is not small or there is no room for it."""
        content = file.content
        if content is None or self.memory is None or len(content) + len(part) > SMALL_BYTES:
            return False
        if not self.memory.try_reserve(len(part)):
            return False
        content += part
        return True

    def write(self, file: Received) -> IO[bytes]:
        """Open the file at its path for more content, with what was held of it."""
        opened = file.path.open("xb")
        if file.content is not None:
            opened.write(file.content)
            self._forget(file)
        return opened

    def _forget(self, file: Received) -> None:
        """Hold the content no longer."""
        if file.content is not None and self.memory is not None:
            self.memory.give_back(len(file.content))
        file.content = None


def clean_name(text: str) -> str:
    """Return a client's name of a file as text of a bounded length, without the folders before it."""
    name = text.replace("\\", "/").rpartition("/")[2]
    name = "".join(c if c.isprintable() else "�" for c in name)
    return name[:NAME_LENGTH] or "image"


async def read_body(stream: AsyncIterator[bytes], budget: Budget) -> bytes:
    """Read a body into memory; the caller gives its bytes back."""
    content = bytearray()
    try:
        async for chunk in stream:
            budget.reserve(len(chunk))
            content += chunk
    except BaseException:
        budget.give_back(len(content))
        raise
    return bytes(content)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder for uploads; delete it afterwards, and those that killed servers left."""
    for old in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with suppress(OSError, EngramError):
            status = old.lstat()
            is_old = (
                stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and time.time() - status.st_mtime > OLD
            )
            handle = lock(old / _LOCK) if is_old else None
            if handle is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(handle)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as name:
        handle = lock(Path(name) / _LOCK)
        try:
            yield Path(name)
        finally:
            if handle is not None:
                os.close(handle)


async def read_multipart(stream: AsyncIterator[bytes], content_type: str, spool: Spool, limits: Limits) -> Upload:
    """Read an upload; refuse one that is not well formed or exceeds a limit. The caller releases its files."""
    reader = _Reader(_boundary(content_type), spool, limits)
    try:
        async for chunk in stream:
            reader.feed(chunk)
        reader.finish()
    except BaseException:
        reader.close()
        spool.release(reader.upload.files)
        raise
    return reader.upload


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        raise Refused(415, "send images as multipart/form-data in fields called 'images', or as JSON")
    return boundary


class _Reader:
    """Receives the parser's calls."""

    def __init__(self, boundary: bytes, spool: Spool, limits: Limits) -> None:
        self.upload = Upload()
        self._spool, self._limits = spool, limits
        self._header = (bytearray(), bytearray())
        self._header_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._file: IO[bytes] | None = None
        self._received: Received | None = None
        self._hash: blake2b | None = None
        self._field: tuple[str, bytearray] | None = None
        self._complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_content,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except MultipartParseError:
            raise Refused(400, "the upload is not valid multipart/form-data") from None

    def finish(self) -> None:
        if not self._complete:
            raise Refused(400, "the upload ended before its last part was complete")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_part(self) -> None:
        self._headers, self._header_bytes = {}, 0
        self._header = (bytearray(), bytearray())

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES:
            raise Refused(400, "a part of the upload has too long a header")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header[1].extend(data[start:end])

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _begin_content(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        if kind != b"form-data" or not name:
            raise Refused(400, "a part of the upload has no name")
        if b"filename" not in options:
            if len(self.upload.fields) >= FIELDS:
                raise Refused(413, f"an upload may have {FIELDS} fields")
            self._field = (name, bytearray())
            return
        if name not in ("images", "image"):
            raise Refused(400, f"files belong in the field 'images', not in {name[:40]!r}")
        if len(self.upload.files) >= self._limits.files:
            raise Refused(413, f"an upload may have {self._limits.files} images; send the others in another one")
        given = clean_name(options[b"filename"].decode(errors="replace"))
        self._received = Received(given, self._spool.new_path())
        self.upload.files.append(self._received)
        if self._spool.memory is None:
            self._file = self._spool.write(self._received)
            self._hash = blake2b(digest_size=16)
        else:
            self._received.content = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._field[1].extend(data[start:end])
            if len(self._field[1]) > FIELD_BYTES:
                raise Refused(413, f"the field {self._field[0][:40]!r} is longer than {FIELD_BYTES} bytes")
            return
        received = self._received
        if received is None:
            return
        size = received.size + end - start
        if size > self._limits.file_bytes:
            raise Refused(413, f"an image may have {self._limits.file_bytes // 2**20} MiB, {received.name!r} has more")
        self._spool.reserve(end - start)
        received.size = size
        part = memoryview(data)[start:end]
        if self._hash is not None:
            self._hash.update(part)
        if self._spool.hold(received, part):
            return
        if self._file is None:
            self._file = self._spool.write(received)
        self._file.write(part)

    def _end_part(self) -> None:
        if self._field is not None:
            self.upload.fields[self._field[0]] = bytes(self._field[1]).decode(errors="replace")
            self._field = None
        if self._received is not None:
            if self._hash is not None:
                self._received.digest = self._hash.hexdigest()
            self._received = self._hash = None
        self.close()

    def _end(self) -> None:
        self._complete = True
