"""What the tests of the server share: a server in a thread, requests, uploads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from engram.serve.children import ChildOptions
from engram.serve.limits import Limits
from engram.serve.server import ModelServer, ServerOptions
from model_helpers import pictures, png

CPU = ChildOptions("cpu", 1)


def client(address: str, token: str | None = None) -> httpx.Client:
    """A client of the API at an address."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=f"{address}api/v1", headers=headers, timeout=60, trust_env=False)


@contextmanager
def serving(
    *paths: Path, child: ChildOptions = CPU, limits: Limits | None = None, **options: Any
) -> Iterator[httpx.Client]:
    """A server of these models in a thread, and a client of it."""
    server = ModelServer(paths, ServerOptions(child=child, limits=limits or Limits(), **options))
    ready, problems = threading.Event(), []

    def run() -> None:
        try:
            server.run(ready.set)
        except BaseException as error:
            problems.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        if problems:
            raise problems[0]
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        with client(address, server.token) as found:
            yield found
    finally:
        server.stop()
        thread.join(90)
        assert not thread.is_alive()


def files(*contents: bytes, **named: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    """The files of an upload."""
    numbered = [(f"{number}.png", content) for number, content in enumerate(contents)]
    return [("images", each) for each in [*numbered, *named.items()]]


def images_of(name: str, count: int, seed: int = 3) -> list[bytes]:
    """Image files of a class."""
    return [png(image) for image in pictures([name], count, seed, 16)[0]]


def add(api: httpx.Client, model: str, name: str, count: int, seed: int = 3) -> dict[str, Any]:
    """Put images of a class into the draft."""
    given = files(*images_of(name, count, seed))
    answer = api.post(f"/models/{model}/draft/images", data={"class": name}, files=given)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lesson_until(
    api: httpx.Client, model: str, done: Callable[[Mapping[str, Any]], bool], seconds: float = 60
) -> dict[str, Any]:
    """The state of the lesson once it is as asked for."""
    end = time.monotonic() + seconds
    while True:
        found = api.get(f"/models/{model}/lesson").json()
        if done(found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.02)


def ended(found: Mapping[str, Any]) -> bool:
    """Whether a lesson does not run."""
    return found["state"] != "running"


def events(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream."""
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
