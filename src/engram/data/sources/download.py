"""Downloads of public data sets: resumed when broken off, checked before use."""

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


def data_home() -> Path:
    """The folder for downloaded data: $ENGRAM_DATA, else engram in the user's cache folder."""
    given = os.environ.get("ENGRAM_DATA")
    if given:
        return typed_path(given)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()) / "engram"


def fetch_cifar100(
    folder: str | Path,
    *,
    url: str = OFFICIAL_URL,
    md5: str = OFFICIAL_MD5,
    size: int = OFFICIAL_SIZE,
    report: Report | None = None,
    timeout: float = 30,
) -> Path:
    """The path of the official CIFAR-100 archive in `folder`, downloaded if it is not there, and verified.

    A download that breaks off is resumed, now or by the next call. `report` is called with the bytes
    so far and in all.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise EngramError(f"{url!r} is no web address; give one that starts with https://")
    download = _Download(typed_path(folder) / ARCHIVE_NAME, url, md5, size, report, timeout)
    try:
        return download.run()
    except OSError as error:
        raise _disk_error(error, download) from None


@dataclass(frozen=True)
class _Download:
    """One file on its way from an address to its place; an OSError that leaves it is the disk's."""

    target: Path
    url: str
    md5: str
    size: int
    report: Report | None
    timeout: float

    @property
    def part(self) -> Path:
        return self.target.with_name(self.target.name + ".part")

    @property
    def tag(self) -> Path:
        """The file that keeps the server's mark of the version that the part belongs to."""
        return self.target.with_name(self.target.name + ".part.etag")

    def run(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if self.target.exists():
            wrong = self._fault(self.target)
            if wrong:
                raise EngramError(
                    f"{self.target} is not the official archive ({wrong}); move it away or delete it, then try again"
                )
            self._tell(self.size)
            return self.target
        self._complete()
        wrong = self._fault(self.part)
        if wrong:
            self._discard()
            raise EngramError(
                f"what {self.url} sent is not the official archive ({wrong}), so it was deleted; "
                f"try again, or {self._by_hand()}"
            )
        os.replace(self.part, self.target)
        self.tag.unlink(missing_ok=True)
        return self.target

    def _complete(self) -> None:
        """Bring the part to its full size, going on for as long as each attempt brings something new."""
        if self._have() > self.size:
            self._discard()
        self._check_space()
        best, reason = -1, ""
        while (have := self._have()) < self.size:
            if have <= best:
                kept = f", {have} of {self.size} bytes are kept for the next try" if have else ""
                raise EngramError(f"{self.url} cannot be downloaded ({reason}{kept}); try again, or {self._by_hand()}")
            best, reason = have, "the connection broke off"
            try:
                if not self._attempt(have):
                    self._discard()
                    self._attempt(0)
            except _BrokenOffError as broken:
                reason = str(broken)

    def _attempt(self, have: int) -> bool:
        """One request for the bytes from `have` on; false where the answer does not fit them."""
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
                raise _BrokenOffError(f"the server answered {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            raise _BrokenOffError(_network_reason(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenOffError(_network_reason(error)) from None

    def _start_of(self, response: http.client.HTTPResponse, have: int) -> int | None:
        """The position of the first byte of the answer; None where it does not fit the part."""
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
                f"{self.url} offers {total} bytes where the official archive has {self.size}, so it may be "
                f"a login page or another file; {self._by_hand()}"
            )
        return have if response.status == 206 else 0

    def _receive(self, response: http.client.HTTPResponse, start: int) -> None:
        done = start
        with self.part.open("ab" if start else "wb") as out:
            if not start:
                self._save_tag(response.headers.get("ETag"))
            self._tell(done)
            while done <= self.size:
                try:
                    chunk = response.read(_CHUNK)
                except http.client.IncompleteRead as error:
                    chunk = error.partial
                except (OSError, http.client.HTTPException) as error:
                    raise _BrokenOffError(_network_reason(error)) from None
                if not chunk:
                    break
                out.write(chunk)
                out.flush()  # so that a full disk is noticed here
                done += len(chunk)
                self._tell(min(done, self.size))

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _saved_tag(self) -> str | None:
        return self.tag.read_text(encoding="latin1") if self.tag.exists() else None

    def _save_tag(self, tag: str | None) -> None:
        # A weak tag does not promise equal bytes, and a line break in it would forge a header.
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
        """What is wrong with a file, None if it is the one expected."""
        found = path.stat().st_size
        if found != self.size:
            return f"it has {found} bytes, not {self.size}"
        with path.open("rb") as file:
            # Against transmission errors; the publisher gives no other checksum.
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        return None if digest == self.md5 else f"its MD5 is {digest}, not {self.md5}"

    def _tell(self, done: int) -> None:
        if self.report is not None:
            self.report(done, self.size)

    def _by_hand(self) -> str:
        return (
            f"without a network, get {OFFICIAL_URL} elsewhere and put it at {self.target}, "
            f"or pass its place with {option('data', 'PATH')}"
        )


class _BrokenOffError(Exception):
    """The network failed; the message says how."""


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
            f"the disk of {folder} is full (the archive needs {download.size / 1e6:.0f} MB); "
            "what has come is kept, so make room and try again"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EngramError(f"{folder} cannot be written to ({error.strerror}); choose another folder with ENGRAM_DATA")
    return EngramError(f"{error.filename or folder} cannot be used ({error.strerror or error}); choose another folder")
