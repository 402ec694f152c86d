"""Run the server: open the models, bind the address, and end in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from engram.core.errors import EngramError, option
from engram.serve.app import make_app
from engram.serve.children import ChildOptions
from engram.serve.counters import Metrics
from engram.serve.guard import Access, Guard, is_loopback
from engram.serve.http_connection import connection_type
from engram.serve.limits import Limits
from engram.serve.served_model import ServedModel, unique_names

SHORTEST_TOKEN = 16
END_SECONDS = 5  # for answers that are being sent when the server ends


@dataclass(frozen=True)
class ServerOptions:
    """How to serve.

    port: 0 is a free one. token: None makes one if the address needs it. names: further names for the Host header.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    names: tuple[str, ...] = ()
    child: ChildOptions = field(default_factory=ChildOptions)
    limits: Limits = field(default_factory=Limits)


class ModelServer:
    """A server of models.

    address: of the page, with the port. token: what requests must send, or None.
    """

    def __init__(self, paths: Sequence[Path], options: ServerOptions) -> None:
        limits, token = options.limits, options.token
        if token is not None and not (len(token) >= SHORTEST_TOKEN and token.isascii() and token.isprintable()):
            raise EngramError(f"{option('token')} must have at least {SHORTEST_TOKEN} printable ASCII characters")
        if token is None and not is_loopback(options.host):
            token = secrets.token_urlsafe(24)
        self.token = token
        names = unique_names(paths)
        self._models = [ServedModel(name, path, limits, options.child) for name, path in zip(names, paths, strict=True)]
        self._listener = _bind(options.host, options.port)
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.address = f"http://{host}:{self._listener.getsockname()[1]}/"
        metrics = Metrics()
        access = Access(options.host, options.names, token)
        app = Guard(make_app(self._models, limits, metrics), access, limits, metrics)
        self._config = uvicorn.Config(
            app,
            http=connection_type(limits),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=max(1, int(limits.header_seconds)),
            timeout_graceful_shutdown=END_SECONDS,
        )
        self._server: uvicorn.Server | None = None

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until `stop`, or until a signal. ready: called once the server answers."""
        opened: list[ServedModel] = []
        try:
            for model in self._models:
                model.open()
                opened.append(model)
            self._server = _Server(self._config, self._models, ready)
            self._server.run(sockets=[self._listener])
        finally:
            self._listener.close()
            for model in opened:
                model.close()

    def stop(self) -> None:
        """End the server, from any thread."""
        if self._server is not None:
            self._server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; refuse one that cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EngramError(
            f"the address {host} cannot be used ({error.strerror}); choose another {option('host')}"
        ) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise EngramError(
            f"port {port} of {host} cannot be used ({error.strerror}); choose another {option('port')}"
        ) from None
    return bound


class _Server(uvicorn.Server):
    """Says when it answers; when it ends, it lets lessons save and ends the streams of clients first."""

    def __init__(self, config: uvicorn.Config, models: Sequence[ServedModel], ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._models, self._ready = models, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = [asyncio.to_thread(model.lessons.close) for model in self._models]
        await asyncio.gather(*closing, super().shutdown(sockets))
