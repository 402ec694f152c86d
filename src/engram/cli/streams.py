"""Standard input, output and error: text that is safe to print, notices, questions, lines as they arrive."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

PAUSE = 0.01  # seconds without input; a program that writes a long list is faster
BLOCK = 2**16  # bytes: the capacity of a pipe


def printable(value: object, keep: str = "") -> str:
    """Return the value as text that a terminal only shows: other characters than those in `keep` are escaped.

    A name of a file or class may contain control characters, escape sequences, marks that reverse the direction of the
    text, or bytes that are not UTF-8.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def tell(text: str) -> None:
    """Print a notice or an error on stderr, as one line that begins with the name of the program."""
    print(f"engram: {printable(text)}", file=sys.stderr)


def confirmed(question: str) -> bool:
    """Ask on the terminal; return whether the answer is yes. Without a terminal, return True."""
    if sys.stdin is None or not sys.stdin.isatty():  # None if it is closed
        return True
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Terminal:
    """A terminal stream. If the terminal was closed, writing to it does nothing; SIGHUP reports the closing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _unless_closed():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _unless_closed():
            self._stream.flush()


@contextmanager
def _unless_closed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


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
