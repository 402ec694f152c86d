"""Downloads, against servers on this machine that behave well and badly."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram.core.errors import EngramError
from engram.core.io import data_home
from engram.data.sources import download as fetch
from engram.data.sources.download import fetch_cifar100

CONTENT = np.random.default_rng(0).bytes(700_001)
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
NAME = "cifar-100-python.tar.gz"


class Server(ThreadingHTTPServer):
    """Serves CONTENT as its switches say and notes what it was asked for."""

    daemon_threads = True
    content = CONTENT
    ranges = True
    if_range = True
    etag: str | None = '"one"'
    drop_after: list[int | None]
    status: int | None = None
    content_length = True
    content_range: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.drop_after = []
        self.asked: list[tuple[str | None, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/{NAME}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error of the test."""


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range")
        server.asked.append((asked, self.headers.get("If-Range")))
        if server.status is not None:
            self.send_error(server.status)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        if server.if_range and self.headers.get("If-Range", server.etag) != server.etag:
            start = 0
        if start >= len(server.content):
            self.send_error(416)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            total = len(server.content)
            self.send_header("Content-Range", server.content_range or f"bytes {start}-{total - 1}/{total}")
        if server.content_length:
            self.send_header("Content-Length", str(len(body)))
        if server.etag:
            self.send_header("ETag", server.etag)
        self.end_headers()
        limit = server.drop_after.pop(0) if server.drop_after else None
        self.wfile.write(body if limit is None else body[:limit])

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(timeout=5)
        assert not thread.is_alive()


def download(server: Server, folder: Path, **options: Any) -> Path:
    return fetch_cifar100(folder, **({"url": server.url, "md5": MD5, "size": len(CONTENT), "timeout": 5} | options))


def leftovers(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_download_is_verified_named_and_reported(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    seen: list[tuple[int, int | None]] = []
    path = download(server, folder, report=lambda done, total: seen.append((done, total)))
    assert path == folder / NAME
    assert path.read_bytes() == CONTENT
    assert leftovers(folder) == [NAME]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert server.asked == [(None, None)]


def test_a_complete_file_is_reused_without_the_network(server: Server, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(CONTENT)
    seen: list[tuple[int, int | None]] = []
    assert download(server, tmp_path, report=lambda *progress: seen.append(progress)) == tmp_path / NAME
    assert (server.asked, seen) == ([], [(len(CONTENT), len(CONTENT))])
    (tmp_path / NAME).rename(tmp_path / f"{NAME}.part")
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize("wrong", [CONTENT[:-1], CONTENT[:-1] + b"?"])
def test_a_wrong_file_in_the_place_is_left_alone(server: Server, tmp_path: Path, wrong: bytes) -> None:
    (tmp_path / NAME).write_bytes(wrong)
    with pytest.raises(EngramError, match=r"is not the official archive \(it.* not .*\); move it away"):
        download(server, tmp_path)
    assert (tmp_path / NAME).read_bytes() == wrong
    assert server.asked == []


def test_a_connection_that_drops_is_resumed_at_once(server: Server, tmp_path: Path) -> None:
    server.drop_after = [300_000, 200_000]
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [(None, None), ("bytes=300000-", '"one"'), ("bytes=500000-", '"one"')]
    assert leftovers(tmp_path) == [NAME]


def test_a_broken_download_is_kept_and_resumed_by_the_next_call(server: Server, tmp_path: Path) -> None:
    server.drop_after = [300_000, 0]
    with pytest.raises(
        EngramError,
        match=r"\(the connection was interrupted, 300000 of 700001 bytes are kept for the next try\); try again",
    ):
        download(server, tmp_path)
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:300_000]
    server.asked.clear()
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [("bytes=300000-", '"one"')]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_a_download_is_resumed_without_a_usable_etag(server: Server, tmp_path: Path, etag: str | None) -> None:
    server.etag = etag
    server.drop_after = [300_000]
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [(None, None), ("bytes=300000-", None)]


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [("bytes=1000-", None)]


def test_a_server_without_ranges_that_drops_is_not_asked_for_ever(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.drop_after = [300_000] * 10
    with pytest.raises(EngramError, match="the connection was interrupted, 300000 of 700001"):
        download(server, tmp_path)
    assert len(server.asked) == 2


def test_a_file_that_changed_on_the_server_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    (tmp_path / f"{NAME}.part.etag").write_text('"zero"')
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [("bytes=1000-", '"zero"')]
    assert leftovers(tmp_path) == [NAME]


def test_a_server_that_ignores_the_condition_is_not_trusted_with_the_rest(server: Server, tmp_path: Path) -> None:
    server.if_range = False
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    (tmp_path / f"{NAME}.part.etag").write_text('"zero"')
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [("bytes=1000-", '"zero"'), (None, None)]


@pytest.mark.parametrize("answer", ["bytes 7-700000/700001", "nonsense"])
def test_a_range_that_does_not_fit_starts_again(server: Server, tmp_path: Path, answer: str) -> None:
    server.content_range = answer
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:1000])
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [("bytes=1000-", None), (None, None)]


def test_a_part_that_is_too_long_starts_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT + b"more")
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [(None, None)]


def test_a_range_beyond_the_end_starts_again(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:500]
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:1000])
    with pytest.raises(EngramError, match="offers 500 bytes where the official archive has 700001"):
        download(server, tmp_path)
    assert server.asked == [("bytes=1000-", None), (None, None)]


def test_wrong_content_is_deleted_and_said_so(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(EngramError, match=r"is not the official archive \(its MD5 is .*\), so it was deleted"):
        download(server, tmp_path)
    assert leftovers(tmp_path) == []
    server.content = CONTENT
    assert download(server, tmp_path).read_bytes() == CONTENT


def test_a_login_page_does_not_replace_what_has_come(server: Server, tmp_path: Path) -> None:
    server.content, server.ranges = b"<html>please log in</html>", False
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:1000])
    with pytest.raises(EngramError, match=r"offers 26 bytes .* login page"):
        download(server, tmp_path)
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:1000]


def test_a_server_that_gives_no_length(server: Server, tmp_path: Path) -> None:
    server.content_length = False
    assert download(server, tmp_path / "a").read_bytes() == CONTENT
    server.content = CONTENT + b"too much" * 100_000
    with pytest.raises(EngramError, match=r"it has \d+ bytes, not 700001\), so it was deleted") as caught:
        download(server, tmp_path / "b")
    found = re.search(r"it has (\d+) bytes", str(caught.value))
    assert found is not None
    assert int(found[1]) < len(server.content)  # it stopped reading once there was too much
    assert leftovers(tmp_path / "b") == []


@pytest.mark.parametrize("status", [403, 404, 416, 503])
def test_a_refusal_says_what_to_do_offline(server: Server, tmp_path: Path, status: int) -> None:
    server.status = status
    with pytest.raises(EngramError, match=f"the server answered {status} ") as caught:
        download(server, tmp_path)
    assert f"put it at {tmp_path / NAME}, or give its path as data=PATH" in str(caught.value)
    assert fetch.OFFICIAL_URL in str(caught.value)


def test_no_network_says_what_to_do_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody can answer here
        url = f"http://127.0.0.1:{free.getsockname()[1]}/x"
        with pytest.raises(EngramError, match=r"cannot be downloaded \(Connection refused\)") as caught:
            fetch_cifar100(tmp_path, url=url, md5=MD5, size=10)
    assert f"put it at {tmp_path / NAME}, or give its path as data=PATH" in str(caught.value)


def test_a_silent_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(EngramError, match="the server did not answer in time"):
            fetch_cifar100(tmp_path, url=url, md5=MD5, size=10, timeout=0.2)


def test_an_address_that_is_not_of_the_web_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(CONTENT)
    with pytest.raises(EngramError, match="is not a web address"):
        fetch_cifar100(tmp_path, url=(tmp_path / "x").as_uri(), md5=MD5, size=len(CONTENT))


def test_an_interrupted_download_keeps_what_has_come(server: Server, tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done > 400_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(server, tmp_path, report=interrupt)
    kept = (tmp_path / f"{NAME}.part").read_bytes()
    assert len(kept) > 400_000
    assert CONTENT.startswith(kept)
    assert download(server, tmp_path).read_bytes() == CONTENT


def test_a_full_disk_is_noticed_before_and_while_writing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / f"{NAME}.part").symlink_to("/dev/full")
    with pytest.raises(EngramError, match=r"the disk of .* is full \(the archive needs 1 MB\)"):
        download(server, tmp_path)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    server.asked.clear()
    with pytest.raises(EngramError, match="free some space and try again"):
        download(server, tmp_path)
    assert server.asked == []


def test_no_write_permission(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngramError, match=r"file cannot be used \(File exists\); choose another folder"):
        download(server, tmp_path / "file")

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(EngramError, match=r"cannot be written to \(Permission denied\); .*ENGRAM_DATA"):
        download(server, tmp_path)


def test_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ENGRAM_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert data_home() == tmp_path / ".cache" / "engram"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_home() == tmp_path / ".cache" / "engram"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert data_home() == Path("/var/cache/engram")
    monkeypatch.setenv("ENGRAM_DATA", "~/sets")
    assert data_home() == tmp_path / "sets"
