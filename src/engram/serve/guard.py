"""Checks of every request: Host, Origin, token, the size and pace of its body; and the headers of answers."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.serve.counters import Metrics
from engram.serve.limits import Limits, Refused

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
}
_ENCODED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
LOOPBACK = ("localhost", "127.0.0.1", "::1")
API, PREFIX = "/api/", "/api/v1"
HEALTH = f"{PREFIX}/health"
# Of the rest of a body after its answer: many clients read no answer before they have sent everything.
DRAIN_SECONDS, DRAIN_IDLE_SECONDS, DRAIN_BYTES = 5.0, 1.0, 16 * 2**20


@dataclass(frozen=True)
class Access:
    """Who may use the server.

    host: the address it is bound to. names: further names that requests may be addressed to, such as a proxy's.
    token: needed by every request but the page's files and /health; None needs none.
    """

    host: str
    names: Collection[str] = ()
    token: str | None = None

    def knows_host(self, given: str) -> bool:
        """Whether a request with this Host header is meant for this server, and not for a name made to look like it."""
        name = _host_name(given)
        if name is None:
            return False
        if name in LOOPBACK or name == self.host.lower() or name in {each.lower() for each in self.names}:
            return True
        if not _is_any(self.host):
            return False
        # Bound to every address: an address cannot be made to point elsewhere, a name can.
        return _is_address(name) or name == socket.gethostname().lower()


def _host_name(header: str) -> str | None:
    """Return the name in a Host header, without the port; None if it is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        name, closed, rest = text[1:].partition("]")
        if not closed or not _is_address(name):
            return None
        port = rest
    else:
        name, _, digits = text.partition(":")
        port = text[len(name) :]
        del digits
    if port and not (port.startswith(":") and port[1:].isascii() and port[1:].isdigit()):
        return None
    return name or None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_any(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class Guard:
    """ASGI middleware that refuses what is not allowed, bounds bodies, adds headers, and counts requests."""

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, metrics: Metrics) -> None:
        self._app, self._access, self._limits, self._metrics = app, access, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        body = _Body(receive, self._limits, scope)
        status, closing = 500, False

        async def answer(message: Message) -> None:
            nonlocal status, closing
            if message["type"] == "http.response.start":
                status = message["status"]
                given = message.get("headers", [])
                have = {name.lower() for name, _ in given}
                extra = [header for header in _ENCODED if header[0] not in have]
                if b"cache-control" not in have:  # a new version's page must not meet old files of it
                    extra.append((b"cache-control", b"no-store" if scope["path"].startswith(API) else b"no-cache"))
                if not body.is_read:  # whatever else comes belongs to this request, so nothing can follow it
                    closing = True
                    extra.append((b"connection", b"close"))
                message = {**message, "headers": [*given, *extra]}
            elif closing and not message.get("more_body", False):
                await send({**message, "more_body": True})  # the client can read all of it now
                await body.drain()  # closing before the client has sent everything could lose it the answer
                message = {"type": "http.response.body"}
            await send(message)

        try:
            self._check(scope)
            body.check_announced()
            await self._app(scope, body.receive, answer)
        except Refused as refusal:
            await _refuse(answer, refusal)
        finally:
            self._metrics.request(_method(scope), _route(scope, status), status, time.perf_counter() - started)

    def _check(self, scope: Scope) -> None:
        """Refuse a request that is not for this server, comes from another page, or has no token."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not self._access.knows_host(hosts[0]):
            raise Refused(
                421, "this server does not answer under that name; use its address, or start it with --allow-host"
            )
        origins = headers.get("origin", [])
        if len(origins) > 1 or (origins and not _same_origin(origins[0], hosts[0])):
            raise Refused(403, "requests from other pages are refused")
        site = headers.get("sec-fetch-site", ["none"])[0]
        is_page = not scope["path"].startswith(API) and scope["method"] in ("GET", "HEAD")
        if site not in ("same-origin", "none") and not is_page:
            raise Refused(403, "requests from other pages are refused")
        if self._access.token is not None and _needs_token(scope["path"]):
            given = headers.get("authorization", [""])
            kind, _, token = given[0].partition(" ")
            right = hmac.compare_digest(token.strip().encode(), self._access.token.encode())
            if len(given) != 1 or kind.lower() != "bearer" or not right:
                raise Refused(
                    401,
                    "this needs the server's token: send 'Authorization: Bearer TOKEN'",
                    {"WWW-Authenticate": "Bearer"},
                )


def _needs_token(path: str) -> bool:
    return (path.startswith(API) or path == "/metrics") and path != HEALTH


def _same_origin(origin: str, host: str) -> bool:
    scheme, separator, place = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and place.lower() == host.strip().lower()


def _route(scope: Scope, status: int) -> str:
    """Return the route with its placeholders, so that the number of names is limited."""
    path = getattr(scope.get("route"), "path", None)
    if path is None:
        return "page" if status < 400 else "none"
    return path if path.startswith(API) or not scope["path"].startswith(API) else f"{PREFIX}{path}"


def _method(scope: Scope) -> str:
    method = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "PATCH", "DELETE", "PUT", "OPTIONS") else "other"


def _body_limit(scope: Scope, limits: Limits) -> int:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    if kinds and kinds[0].lower().startswith(b"multipart/"):
        return limits.request_bytes
    return limits.json_bytes if scope["path"].endswith("/predict") else limits.json_other


async def _refuse(send: Send, refusal: Refused) -> None:
    content = json.dumps({"error": refusal.detail}).encode()
    extra = [(name.lower().encode(), value.encode()) for name, value in (refusal.headers or {}).items()]
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), *extra]
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class _Body:
    """The body of a request while it arrives: bounded in bytes, in pauses and in time."""

    def __init__(self, receive: Receive, limits: Limits, scope: Scope) -> None:
        self._receive, self._limits, self._most = receive, limits, _body_limit(scope, limits)
        headers = dict(scope["headers"])
        self._announced = int(headers.get(b"content-length", b"0"))  # the parser has checked it
        self._size = 0
        self._started: float | None = None
        self.is_read = not self._announced and b"transfer-encoding" not in headers

    def check_announced(self) -> None:
        """Refuse a body that is too large by what its header says."""
        if self._announced > self._most:
            raise self._too_large()

    async def receive(self) -> Message:
        if self.is_read:
            return await self._receive()  # waits for the client to go
        now = time.monotonic()
        self._started = self._started or now
        end = self._started + self._limits.body_seconds + self._size / self._limits.slowest
        message = await self._next(min(self._limits.idle_seconds, end - now))
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            raise self._too_large()
        return message

    def _too_large(self) -> Refused:
        return Refused(413, f"the request is larger than the {_amount(self._most)} allowed; send less at a time")

    async def _next(self, seconds: float) -> Message:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                message = await self._receive()
        except TimeoutError:
            raise Refused(408, "the request arrived too slowly") from None
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.is_read = True
        return message

    async def drain(self) -> None:
        """Read and forget a bounded part of the rest."""
        end, drained = time.monotonic() + DRAIN_SECONDS, 0
        try:
            while not self.is_read and drained < DRAIN_BYTES:
                message = await self._next(min(DRAIN_IDLE_SECONDS, end - time.monotonic()))
                drained += len(message.get("body", b""))
        except Refused:
            return


def _amount(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size} bytes"


def describe(problem: Any) -> str:
    """Return one sentence about the first mistake that pydantic found in a request."""
    errors = problem.errors()
    if not errors:
        return "the request is not valid"
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return f"{place or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:200]}"
