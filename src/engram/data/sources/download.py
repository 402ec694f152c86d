"""Download of public files: resumed after an interruption, verified before use."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engram.core.errors import EngramError, option
from engram.core.io import typed_path
from engram.data.sources.cifar import ARCHIVE_NAME

OFFICIAL_URL: Final = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
OFFICIAL_MD5: Final = "eb9058c3a382ffc7106e4002c42a8d85"
OFFICIAL_SIZE: Final = 169_001_437

_CHUNK: Final = 2**18

Report = Callable[[int, int | None], None]


def fetch_cifar100(
    folder: str | Path,
    *,
    url: str = OFFICIAL_URL,
    md5: str = OFFICIAL_MD5,
    size: int = OFFICIAL_SIZE,
    report: Report | None = None,
    timeout: float = 30,
) -> Path:
    """Download the official CIFAR-100 archive into `folder`, unless it is there, verify it, and return its path.

    An interrupted download is resumed, by this call or the next. report: called with the bytes so far and in total.
    """
    target = typed_path(folder) / ARCHIVE_NAME
    by_hand = (
        f"without a network, download {OFFICIAL_URL} elsewhere and put it at {target}, "
        f"or give its path as {option('data', 'PATH')}"
    )
    # MD5 is the only checksum that the publisher gives. It detects transmission errors.
    return fetch(target, url, "md5", md5, size, "archive", by_hand, report=report, timeout=timeout)


def fetch(
    target: Path,
    url: str,
    algorithm: str,
    checksum: str,
    size: int,
    what: str,
    by_hand: str,
    *,
    report: Report | None = None,
    timeout: float = 30,
) -> Path:
    """Download an official file to a path, unless it is there, verify it, and return the path.

    algorithm: of the checksum, as hashlib calls it. what: the word for the file in messages. by_hand: what to do
    without a network. report: as for `fetch_cifar100`.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise EngramError(f"{url!r} is not a web address; give one that starts with https://")
    download = _Download(target, url, algorithm, checksum, size, what, by_hand, report, timeout)
    try:
        return download.run()
    except OSError as error:
        raise _disk_error(error, download) from None


@dataclass(frozen=True)
class _Download:
    """The download of one file. Its methods raise an OSError only for problems with the disk."""

    target: Path
    url: str
    algorithm: str
    checksum: str
    size: int
    what: str
    by_hand: str
    report: Report | None
    timeout: float

    @property
    def part(self) -> Path:
        return self.target.with_name(self.target.name + ".part")

    @property
    def tag(self) -> Path:
        """File with the server's ETag for the version that was downloaded in part."""
        return self.target.with_name(self.target.name + ".part.etag")

    def run(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if self.target.exists():
            fault = self._fault(self.target)
            if fault:
                raise EngramError(
                    f"{self.target} is not the official {self.what} ({fault}); move it away or delete it, "
                    "then try again"
                )
            self._report(self.size)
            return self.target
        self._complete()
        fault = self._fault(self.part)
        if fault:
            self._discard()
            raise EngramError(
                f"the file from {self.url} is not the official {self.what} ({fault}), so it was deleted; "
                f"try again, or {self.by_hand}"
            )
        os.replace(self.part, self.target)
        self.tag.unlink(missing_ok=True)
        return self.target

    def _complete(self) -> None:
        """Download the rest of the file; retry as long as each attempt makes progress."""
        if self._have() > self.size:
            self._discard()
        self._check_space()
        best, reason = -1, ""
        while (have := self._have()) < self.size:
            if have <= best:
                kept = f", {have} of {self.size} bytes are kept for the next try" if have else ""
                raise EngramError(f"{self.url} cannot be downloaded ({reason}{kept}); try again, or {self.by_hand}")
            best, reason = have, "the connection was interrupted"
            try:
                if not self._attempt(have):
                    self._discard()
                    self._attempt(0)
            except _NetworkError as error:
                reason = str(error)

    def _attempt(self, have: int) -> bool:
        """Request the bytes from position `have`; return False if the answer does not continue them."""
        with self._open(have) as response:
            start = self._start_of(response, have)
            if start is None:
                return False
            self._receive(response, start)
            return True

    def _open(self, have: int) -> http.client.HTTPResponse:
        request = urllib.request.Request(self.url, headers={"User-Agent": "engram", "Accept-Encoding": "identity"})
        if have:
            request.add_header("Range", f"bytes={have}-")
            tag = self._saved_tag()
            if tag:
                request.add_header("If-Range", tag)
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416 and have:
                    self._discard()
                    return self._open(0)
                raise _NetworkError(f"the server answered {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            raise _NetworkError(_network_reason(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise _NetworkError(_network_reason(error)) from None

    def _start_of(self, response: http.client.HTTPResponse, have: int) -> int | None:
        """Return the position of the first byte of the answer, or None if it does not continue the partial file."""
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
            tag, saved = response.headers.get("ETag"), self._saved_tag()
            if match is None or int(match[1]) != have or (tag and saved and tag != saved):
                return None
            total = None if match[2] == "*" else int(match[2])
        else:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
        if total is not None and total != self.size:
            raise EngramError(
                f"{self.url} offers {total} bytes where the official {self.what} has {self.size}, so it may be "
                f"a login page or another file; {self.by_hand}"
            )
        return have if response.status == 206 else 0

    def _receive(self, response: http.client.HTTPResponse, start: int) -> None:
        done = start
        with self.part.open("ab" if start else "wb") as out:
            if not start:
                self._save_tag(response.headers.get("ETag"))
            self._report(done)
            while done <= self.size:
                try:
                    chunk = response.read(_CHUNK)
                except http.client.IncompleteRead as error:
                    chunk = error.partial
                except (OSError, http.client.HTTPException) as error:
                    raise _NetworkError(_network_reason(error)) from None
                if not chunk:
                    break
                out.write(chunk)
                out.flush()  # to notice a full disk here
                done += len(chunk)
                self._report(min(done, self.size))

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _saved_tag(self) -> str | None:
        return self.tag.read_text(encoding="latin1") if self.tag.exists() else None

    def _save_tag(self, tag: str | None) -> None:
        # A weak tag does not guarantee equal bytes, and a line break in it would forge a header.
        if tag and not tag.startswith("W/") and tag.isprintable() and tag.isascii():
            self.tag.write_text(tag, encoding="latin1")
        else:
            self.tag.unlink(missing_ok=True)

    def _discard(self) -> None:
        self.part.unlink(missing_ok=True)
        self.tag.unlink(missing_ok=True)

    def _check_space(self) -> None:
        needed, free = self.size - self._have(), shutil.disk_usage(self.target.parent).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{free // 10**6} MB are free")

    def _fault(self, path: Path) -> str | None:
        """Describe what is wrong with a file; None if it is the expected one."""
        found = path.stat().st_size
        if found != self.size:
            return f"it has {found} bytes, not {self.size}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.new(self.algorithm, usedforsecurity=False)).hexdigest()
        return None if digest == self.checksum else f"its {self.algorithm.upper()} is {digest}, not {self.checksum}"

    def _report(self, done: int) -> None:
        if self.report is not None:
            self.report(done, self.size)


class _NetworkError(Exception):
    """A failure of the network; the message gives the reason."""


def _network_reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "the server did not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _disk_error(error: OSError, download: _Download) -> EngramError:
    folder = download.target.parent
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EngramError(
            f"the disk of {folder} is full (the {download.what} needs {download.size / 1e6:.0f} MB); "
            "the downloaded part is kept, so free some space and try again"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EngramError(f"{folder} cannot be written to ({error.strerror}); choose another folder with ENGRAM_DATA")
    return EngramError(f"{error.filename or folder} cannot be used ({error.strerror or error}); choose another folder")
