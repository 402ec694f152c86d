"""Attacks a running server: python tools/attack_server.py [--count N] [--seed S] [--upload BYTES] [--quick]

Makes a small model, starts `engram serve` with a token in a process of its own, and sends what a stranger on the
network, another page in the browser or a broken client could send: wrong names of the host, foreign origins, wrong
tokens, tricks with paths, headers and uploads without end, image bombs, slow connections, and N mutations of valid
requests (none of which could change the model even if it were valid). A case is a fault if

- it is answered by another status than it should be, by 500, or not at all within some seconds;
- the server ends, prints a traceback, takes much memory, or no longer answers a valid request as before;
- the model has another checksum afterwards, or a file has appeared outside of the draft.

The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import io
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engram.models.learning import learn_into
from engram.models.model_config import ModelConfig

TOKEN = "a-token-for-the-attack-0123456789"
BOUNDARY = "attack"
CLASSES = ("apple", "boat")
PREFIX = "/api/v1/models/model"
REPLY_SECONDS = 30.0
HEADER_MOST = 32 * 2**20  # bytes after which the server should have closed a connection; sockets hold some of them
MEMORY_BYTES = 400 * 2**20  # that the server may take beyond what it had
REFUSALS = {400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 421, 422, 431, 503}
TRICKS = (
    *("../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "....//....//etc/passwd"),
    *("/etc/passwd", "//etc/passwd", "C:\\windows\\win.ini", "..\\..\\x", "%00", "x%00.png", "model%2f..%2fmodel"),
    *(
        "current",
        "draft.json",
        ".lock",
        "generations/000001/model.json",
        "%c0%ae%c0%ae/",
        "a" * 5000,
        "%ff%fe",
        "\u202e",
    ),
)


def picture(label: int, number: int) -> np.ndarray:
    """A small image of a class."""
    draw = np.random.default_rng((label, number))
    return (np.full((8, 8, 3), 60 + 120 * label) + draw.integers(-20, 21, (8, 8, 3))).clip(0, 255).astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """The image as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG file of few bytes that claims many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10**6)))
        + chunk(b"IEND", b"")
    )


def make_model(path: Path) -> None:
    """A model of two classes, with nothing to undo."""
    images = np.stack([picture(label, number) for label in range(2) for number in range(8)])
    config = ModelConfig.choose("afc", image_size=8, images=16, epochs=1, backbone="resnet10", device="cpu")
    for _ in learn_into(path, images, [CLASSES[row // 8] for row in range(16)], config=config, device="cpu"):
        pass


def multipart(files: Sequence[tuple[str, bytes]], fields: Sequence[tuple[str, str]] = ()) -> tuple[str, bytes]:
    """Content type and body of an upload."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields
    ]
    body = "".join(parts).encode()
    for name, content in files:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\n\r\n'
        body += head.encode(errors="surrogateescape") + content + b"\r\n"
    return f"multipart/form-data; boundary={BOUNDARY}", body + f"--{BOUNDARY}--\r\n".encode()


class Target:
    """The server under attack."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        host = address.removeprefix("http://").rstrip("/")
        self.host, self.place = host, (host.partition(":")[0], int(host.partition(":")[2]))

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str | None = None,
        host: str | None = None,
        token: str | None = TOKEN,
        **headers: str,
    ) -> bytes:
        """A whole request as bytes."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host if host is None else host}", "Connection: close"]
        lines += [] if token is None else [f"Authorization: Bearer {token}"]
        lines += [] if kind is None else [f"Content-Type: {kind}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(body)}"] if body or method != "GET" else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape") + body

    def send(self, content: bytes, patience: float | None = None) -> tuple[int | None, bytes]:
        """Send bytes and return the status and the body of the answer; None if the connection was closed without.

        patience: seconds after which the client says that no more will come.
        """
        with socket.create_connection(self.place, timeout=REPLY_SECONDS) as connection:
            with suppress(OSError):
                connection.sendall(content)
                if patience is not None and not select.select([connection], [], [], patience)[0]:
                    connection.shutdown(socket.SHUT_WR)
            return read_answer(connection)

    def ask(self, *arguments: Any, **options: Any) -> tuple[int | None, bytes]:
        """Send a request and return status and body of the answer."""
        return self.send(self.request(*arguments, **options))

    def memory(self) -> int:
        """Resident bytes of the server."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read_answer(connection: socket.socket) -> tuple[int | None, bytes]:
    """Status and body of the first answer; None without one, TimeoutError if none comes."""
    answer = http.client.HTTPResponse(connection)
    try:
        answer.begin()
        return answer.status, answer.read()
    except (http.client.HTTPException, ConnectionError):
        return None, b""
    finally:
        answer.close()


@contextmanager
def served(model: Path, log: Path) -> Iterator[Target]:
    """A server of the model in a process of its own."""
    command = [sys.executable, "-m", "engram", "serve", str(model), "--no-browser", "--json", "--threads", "1"]
    with log.open("w") as errors:
        environment = {**os.environ, "ENGRAM_TOKEN": TOKEN}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield Target(process, json.loads(process.stdout.readline())["address"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def checksums(folder: Path) -> dict[str, str]:
    """The checksum of every file below a folder but those of the draft."""
    files = (file for file in folder.rglob("*") if file.is_file() and "model.draft" not in file.parts)
    return {str(file.relative_to(folder)): hashlib.blake2b(file.read_bytes()).hexdigest() for file in files}


class Attack:
    """Sends the cases and collects faults."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.random = target, random.Random(seed)
        self.faults: list[str] = []
        self.seen: Counter[str] = Counter()

    def expect(self, what: str, found: tuple[int | None, bytes], *allowed: int) -> None:
        """Note a fault unless the status is one of those allowed, and the answer says why in JSON."""
        status, body = found
        self.seen[f"{status}"] += 1
        if status not in allowed:
            self.faults.append(f"{what}: {status} instead of {allowed}: {body[:200]!r}")
        elif status is not None and status >= 400:
            try:
                if not isinstance(json.loads(body)["error"], str):
                    raise ValueError(body)
            except (ValueError, KeyError, TypeError):
                self.faults.append(f"{what}: the answer is not an error in JSON: {body[:200]!r}")
        if b"Traceback" in body or b"root:" in body or b".py" in body:
            self.faults.append(f"{what}: the answer says too much: {body[:200]!r}")

    def access(self) -> None:
        """Names, origins and tokens."""
        ask, own = self.target.ask, self.target.host
        port = own.partition(":")[2]
        for host in (
            "evil.example",
            f"evil.example:{port}",
            f"127.0.0.1.evil.example:{port}",
            "",
            "[::1",
            "localhost:x",
        ):
            self.expect(f"Host {host!r}", ask("GET", PREFIX, host=host), 400, 421)
        for host in (f"localhost:{port}", f"[::1]:{port}", own):
            self.expect(f"Host {host!r}", ask("GET", PREFIX, host=host), 200)
        for origin in (
            "http://evil.example",
            "null",
            f"http://{own}.evil.example",
            f"http://localhost:{int(port) + 1}",
            "x",
        ):
            for method, path in (("GET", PREFIX), ("POST", f"{PREFIX}/undo"), ("DELETE", f"{PREFIX}/draft/images")):
                self.expect(f"Origin {origin!r}", ask(method, path, Origin=origin), 403)
        self.expect("cross-site", ask("POST", f"{PREFIX}/undo", Sec_Fetch_Site="cross-site"), 403)
        self.expect("its own origin", ask("GET", PREFIX, Origin=f"http://{own}"), 200)
        for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x", "\xe9"):
            for path in (PREFIX, f"{PREFIX}/classes", "/metrics", "/api/v1/openapi.json"):
                self.expect(f"token {token!r}", ask("GET", path, token=token), 400, 401)
        self.expect("health", ask("GET", "/api/v1/health", token=None), 200)

    def paths(self) -> None:
        """Names and ids that look like paths, in addresses, names of files and of classes."""
        ask = self.target.ask
        for trick in TRICKS:
            quoted = "".join(
                c if c.isascii() and c != "\\" else "".join(f"%{b:02x}" for b in c.encode()) for c in trick
            )
            for place in (
                f"/{quoted}",
                f"/api/v1/models/{quoted}",
                f"{PREFIX}/examples/{quoted}",
                f"{PREFIX}/draft/images/{quoted}",
            ):
                self.expect(f"GET {place[:80]}", ask("GET", place), 400, 404, 405, 414, 431)
            new = json.dumps({"name": "x"}).encode()
            self.expect("rename", ask("PATCH", f"{PREFIX}/classes/{quoted}", new, "application/json"), 400, 404)
            kind, body = multipart([(trick.replace('"', ""), png(picture(0, 99)))])
            self.expect(f"file {trick[:40]!r}", ask("POST", f"{PREFIX}/predict", body, kind), 200, 400)
            ids = json.dumps({"ids": [trick], "class": trick}).encode()
            self.expect("move", ask("PATCH", f"{PREFIX}/draft/images", ids, "application/json"), 404, 422)

    def headers(self) -> None:
        """Headers, trailers and chunks that never end: the connection is closed after a bounded number of bytes."""
        whole = self.target.request("POST", f"{PREFIX}/predict", kind="application/json", Transfer_Encoding="chunked")
        whole = whole.replace(b"Content-Length: 0\r\n", b"")
        starts = {
            "address": b"GET /",
            "header": whole[:-2] + b"X: ",
            "trailer": whole + b"0\r\nX: ",
            "chunk": whole + b"1;x=",
        }
        for what, start in starts.items():
            sent, block = 0, b"x" * 2**16
            with socket.create_connection(self.target.place, timeout=REPLY_SECONDS) as connection:
                try:
                    connection.sendall(start)
                    while sent < HEADER_MOST:
                        sent += connection.send(block)
                except OSError:
                    pass  # the server has closed its end
            self.seen[f"endless {what} ended"] += sent < HEADER_MOST
            if sent >= HEADER_MOST:
                self.faults.append(f"the server took {sent} bytes of {what} without an end")

    def uploads(self, size: int) -> None:
        """Too much, too many, and what is no image."""
        ask = self.target.ask
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\n'.encode()
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        for what, length in (("announced", f"Content-Length: {size}"), ("chunked", "Transfer-Encoding: chunked")):
            for path in (f"{PREFIX}/predict", f"{PREFIX}/draft/images"):
                self.expect(f"{size} bytes, {what}", self._endless(path, kind, length, head, size), 413)
            self.expect(
                f"JSON, {what}", self._endless(f"{PREFIX}/predict", "application/json", length, b"[", size), 413
            )
        kind, body = multipart([(f"{number}", b"x") for number in range(600)])
        self.expect("600 files", ask("POST", f"{PREFIX}/predict", body, kind), 413)
        kind, body = multipart([], [(f"field {number}", "x") for number in range(100)])
        self.expect("100 fields", ask("POST", f"{PREFIX}/predict", body, kind), 413)
        good = png(picture(0, 99))
        bad = [bomb(60_000, 60_000), bomb(30_000, 20_000), bomb(70_000, 1), b"", b"GIF89a", good[: len(good) // 2]]
        bad += [bytes(self.random.randbytes(500)), b"<svg onload=alert(1)>", b"PK\x03\x04" + bytes(100), b"%PDF-1.4"]
        for content in bad:
            kind, body = multipart([("x.png", content)], [("class", "bad")])
            for path in ("predict", "draft/images"):
                status, answer = ask("POST", f"{PREFIX}/{path}", body, kind)
                self.expect(f"{path} of {content[:12]!r}", (status, answer), 200)
                said = json.loads(answer) if status == 200 else {}
                if not (said.get("rejected") or "error" in said.get("predictions", [{}])[0]):
                    self.faults.append(f"{path} of {content[:12]!r} was not refused: {answer[:200]!r}")
        deep = b'{"images":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        self.expect("deep JSON", ask("POST", f"{PREFIX}/predict", deep, "application/json"), 422)
        for body in (b"", b"{}", b"[]", b"null", b'{"images": []}', b'{"images": [{"data": "*"}]}', b"\xff"):
            self.expect(f"JSON {body!r}", ask("POST", f"{PREFIX}/predict", body, "application/json"), 400, 422)

    def _endless(self, path: str, kind: str, length: str, start: bytes, size: int) -> tuple[int | None, bytes]:
        """Send up to `size` bytes, until the server answers."""
        lines = f"POST {path} HTTP/1.1\r\nHost: {self.target.host}\r\nAuthorization: Bearer {TOKEN}\r\n"
        block, sent = bytes(2**20), 0
        with socket.create_connection(self.target.place, timeout=REPLY_SECONDS) as connection:
            connection.sendall(f"{lines}Content-Type: {kind}\r\n{length}\r\n\r\n".encode())
            chunked = "chunked" in length
            try:
                while sent < size:
                    part = (start or block)[: size - sent]
                    start = b""
                    connection.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                    sent += len(part)
                    connection.setblocking(False)
                    try:
                        if connection.recv(1, socket.MSG_PEEK):
                            break
                    except BlockingIOError:
                        pass
                    finally:
                        connection.settimeout(REPLY_SECONDS)
            except OSError:
                pass  # the server has closed its end; the answer may still be there
            return read_answer(connection)

    def slow(self, connections: int) -> None:
        """Connections that send a byte now and then; others must be answered meanwhile, and these closed in the end."""
        whole = self.target.request("POST", f"{PREFIX}/predict", bytes(1000), "application/json")
        parts = {"header": whole[:30], "body": whole[:-900], "nothing": b""}
        held: list[tuple[str, socket.socket]] = []
        started = time.monotonic()
        for number in range(connections):
            what = list(parts)[number % len(parts)]
            connection = socket.create_connection(self.target.place, timeout=REPLY_SECONDS)
            connection.sendall(parts[what])
            held.append((what, connection))
        while held and time.monotonic() - started < 90:
            self.expect("meanwhile", self.target.ask("GET", PREFIX), 200)
            for what, connection in list(held):
                connection.settimeout(0.01)
                try:
                    if what != "nothing":
                        connection.sendall(b"x")
                    over = not connection.recv(4096)
                except TimeoutError:
                    over = False
                except OSError:
                    over = True
                if over:
                    connection.close()
                    held.remove((what, connection))
            time.sleep(1.0)
        self.seen["slow connections closed"] += connections - len(held)
        if held:
            self.faults.append(
                f"{len(held)} slow connections were still open after 90 seconds: {Counter(w for w, _ in held)}"
            )
        for _, connection in held:
            connection.close()

    def mutations(self, count: int) -> None:
        """Valid requests with something changed."""
        templates = list(self._templates())
        for number in range(count):
            content = bytearray(self.random.choice(templates))
            for _ in range(self.random.choice((1, 1, 2, 4, 16))):
                self._mutate(content)
            try:
                status, body = self.target.send(bytes(content), 0.3)
            except TimeoutError:
                self.faults.append(f"mutation {number} was not answered: {bytes(content[:200])!r}")
                continue
            self.seen[f"mutation: {status}"] += 1
            if status is not None and status not in REFUSALS and not 200 <= status < 400:
                self.faults.append(f"mutation {number}: {status}: {bytes(content[:300])!r}: {body[:200]!r}")

    def _templates(self) -> Iterator[bytes]:
        """Requests for every route; none could change the model."""
        request = self.target.request
        kind, body = multipart([("x.png", png(picture(0, 99))), ("y.png", png(picture(1, 99)))])
        yield request("POST", f"{PREFIX}/predict?top=2&neighbours=1", body, kind)
        garbage_kind, garbage = multipart([("x.png", b"no image")], [("class", "new")])
        yield request("POST", f"{PREFIX}/draft/images", garbage, garbage_kind)
        for path in ("", "/classes", "/lessons", "/confusion", "/draft", "/lesson", "/examples/00000000-0"):
            yield request("GET", f"{PREFIX}{path}", Origin=f"http://{self.target.host}")
        for method, path, data in (
            ("POST", "/predict", {"images": [{"name": "x", "data": "iVBORw0KGgo="}], "top": 1}),
            ("PATCH", "/classes/none", {"name": "other"}),
            ("DELETE", "/classes/none", {}),
            ("PATCH", "/draft/images", {"ids": ["0123456789abcdef"], "class": "x"}),
            ("DELETE", "/draft/images", {"ids": ["0123456789abcdef"]}),
            ("POST", "/lesson", {"epochs": 1, "more_of_known": True}),
            ("DELETE", "/lesson?discard=true", {}),
            ("POST", "/undo", {}),
        ):
            yield request(method, f"{PREFIX}{path}", json.dumps(data).encode(), "application/json")

    def _mutate(self, content: bytearray) -> None:
        """Change something at random."""
        draw = self.random
        at = draw.randrange(len(content)) if content else 0
        span = draw.choice((1, 2, 8, 64))
        action = draw.randrange(6)
        if action == 0:
            content[at : at + 1] = bytes([draw.randrange(256)])
        elif action == 1:
            del content[at : at + span]
        elif action == 2:
            content[at:at] = draw.randbytes(span)
        elif action == 3:
            content[at:at] = content[at : at + span] * draw.choice((1, 10, 1000))
        elif action == 4:
            del content[at:]
        else:
            word = draw.choice(
                (b"\r\n", b"\x00", b"../", b"%00", b"-1", b"9" * 30, b"NaN", b'"', b"Content-Length: 7\r\n")
            )
            content[at:at] = word


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print what was answered and the faults; return the exit status."""
    parser = argparse.ArgumentParser(description="attacks on a running server")
    parser.add_argument("--count", type=int, default=1000, help="mutations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--upload", type=int, default=10 * 10**9, help="bytes of the largest uploads")
    parser.add_argument("--quick", action="store_true", help="no slow connections")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="engram-attack-") as name:
        folder = Path(name)
        model, log = folder / "served" / "model", folder / "log"
        model.parent.mkdir()
        make_model(model)
        before = checksums(model.parent)
        with served(model, log) as target:
            attack = Attack(target, options.seed)
            kind, body = multipart([("x.png", png(picture(0, 99)))])
            first = target.ask("POST", f"{PREFIX}/predict?neighbours=1", body, kind)
            memory = target.memory()
            attack.access()
            attack.paths()
            attack.headers()
            attack.uploads(options.upload)
            attack.mutations(options.count)
            if not options.quick:
                attack.slow(60)
            again = target.ask("POST", f"{PREFIX}/predict?neighbours=1", body, kind)
            if first[0] != 200 or first != again:
                attack.faults.append(f"a valid request is answered differently afterwards: {first} and {again}")
            grown = target.memory() - memory
            if grown > MEMORY_BYTES:
                attack.faults.append(f"the server took {grown / 2**20:.0f} MiB more")
            if target.process.poll() is not None:
                attack.faults.append(f"the server ended with status {target.process.returncode}")
        said = log.read_text()
        if "Traceback" in said:
            attack.faults.append(f"the server printed a traceback: {said[-3000:]}")
        after = checksums(model.parent)
        if after != before:
            changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
            attack.faults.append(f"files have changed: {changed[:10]}")
    for what, number in sorted(attack.seen.items()):
        print(f"{number:6} {what}")
    print(
        f"memory of the server: {grown / 2**20:+.0f} MiB; the model is {'unchanged' if after == before else 'changed'}"
    )
    for fault in attack.faults:
        print(f"FAULT {fault}")
    print(f"{len(attack.faults)} faults")
    return 1 if attack.faults else 0


if __name__ == "__main__":
    sys.exit(main())
