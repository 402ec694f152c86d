"""Read lines of standard input as they arrive, so that the program that writes them can wait for answers."""

from __future__ import annotations

import io
import os
import select
from collections.abc import Iterable, Iterator

PAUSE = 0.01  # seconds without input; a program that writes a long list is faster
BLOCK = 2**16  # bytes: the capacity of a pipe


def arriving_lines(stream: Iterable[str]) -> Iterator[str | None]:
    """Yield the lines, and None each time the next one has not arrived yet. Other iterables yield only their lines."""
    if not isinstance(stream, io.TextIOWrapper):
        yield from stream
        return
    rest = b""
    while True:
        if not select.select([stream], [], [], PAUSE)[0]:
            yield None
        some = stream.buffer.read1(BLOCK)  # what has arrived
        *lines, rest = (rest + some).split(b"\n")
        yield from map(os.fsdecode, lines)
        if not some:
            break
    if rest:
        yield os.fsdecode(rest)
