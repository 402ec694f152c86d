"""Lines of standard input as they arrive, so that whoever writes them can wait for answers."""

from __future__ import annotations

import io
import os
import select
from collections.abc import Iterable, Iterator

PAUSE = 0.01  # seconds with nothing to read; a program that is writing a long list goes on sooner
BLOCK = 2**16  # bytes: what a pipe holds


def arriving_lines(stream: Iterable[str]) -> Iterator[str | None]:
    """The lines as they come, and None whenever the next is not there yet; of what is no stream of bytes the lines."""
    if not isinstance(stream, io.TextIOWrapper):
        yield from stream
        return
    rest = b""
    while True:
        if not select.select([stream], [], [], PAUSE)[0]:
            yield None
        some = stream.buffer.read1(BLOCK)  # what is there
        *lines, rest = (rest + some).split(b"\n")
        yield from map(os.fsdecode, lines)
        if not some:
            break
    if rest:
        yield os.fsdecode(rest)
