"""The HTTP connection of the server: uvicorn's, with limits on a header's time and size, and refusals in JSON.

The header and the body of an answer are sent together: each sending costs as much as everything else that is done for
an answer, and more while other threads compute.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engram.serve.limits import Limits


class JoinedWrites:
    """A transport that sends what is written in one turn of the event loop at once."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data soon."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


def connection_type(limits: Limits) -> type[asyncio.Protocol]:
    """Return the class of connections with these limits."""

    class Connection(HttpToolsProtocol):
        """Closes a connection whose header takes too long, and answers what is not HTTP once, with status 400."""

        _deadline: asyncio.TimerHandle | None = None
        _in_header = False
        _unread = 0  # bytes since the parser last gave a whole header or a part of a body; it holds them

        def connection_made(self, transport: Any) -> None:
            super().connection_made(JoinedWrites(transport, self.loop))  # pyright: ignore[reportArgumentType]
            self._wait_for_header()

        def data_received(self, data: bytes) -> None:
            cycle = self.cycle
            if self._deadline is None and (cycle is None or cycle.response_complete):
                self._wait_for_header()
            if self._unread > limits.header_bytes:
                self.send_400_response("")
                return
            self._unread += len(data)
            super().data_received(data)
            if self.cycle is not cycle:  # a header has come
                self._forget_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_deadline()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._in_header = True
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_header:  # and not behind a chunked body
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_header, self._unread = False, 0
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > limits.header_bytes:
                raise ValueError("the header is too long")  # for the parser, which makes an error of its own of it
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unread = 0
            super().on_body(body)

        def send_400_response(self, msg: str) -> None:
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                if not cycle.more_body:  # what follows a whole request: that is answered first
                    cycle.keep_alive = False
                    self.flow.pause_reading()
                    return
                cycle.disconnected = True  # no other answer
                cycle.message_event.set()
                if cycle.response_started or self.pipeline:
                    self.transport.close()
                    return
            content = json.dumps({"error": "this is not a valid HTTP request"}).encode()
            head = f"HTTP/1.1 400 {HTTPStatus.BAD_REQUEST.phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + content)
            self.transport.close()

        def _wait_for_header(self) -> None:
            self._deadline = self.loop.call_later(limits.header_seconds, self._too_slow)

        def _forget_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            self._deadline = None
            if not self.transport.is_closing():
                self.transport.close()

    return Connection
