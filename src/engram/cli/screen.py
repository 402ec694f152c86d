"""What the displays of one run and the boards of several have in common: a context, in which lines may move."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text


class Screen:
    """Used as a context, which begins and ends what moves; nothing moves by default."""

    _live: Live | None = None

    def move(self, console: Console, render: Callable[[], RenderableType], refresh: bool, per_second: int) -> None:
        """Has the lines that `render` gives move; a thread keeps them at it, unless `refresh` is false."""
        self._live = Live(
            console=console,
            get_renderable=render,
            auto_refresh=refresh,
            refresh_per_second=per_second,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def moving_line(text: str, style: str = "") -> Text:
    """A line that is cut where the terminal ends."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
