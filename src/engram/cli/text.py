"""Consoles, and the words and tables that several commands print."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engram.core.metrics import METRICS

PIPE_WIDTH = 200  # a pipe has no width; tables are as wide as they need to be
NAME_WIDTH = 12  # columns of a table that names have at least; longer ones are folded
NARROWEST = 20  # columns; a smaller number is no width that anyone wants


class _Console(Console):
    """A console that leaves a closed pipe to whoever runs the command."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Terminal:
    """A terminal, which may close: what is written then is lost, and no error. SIGHUP is what says so."""

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


def make_console() -> Console:
    """A console on stdout that prints what it is given, without markup; on a pipe as wide as COLUMNS, or wide."""
    file = cast("TextIO", _Terminal(sys.stdout)) if sys.stdout.isatty() else sys.stdout
    console = _Console(file=file, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = _Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=_pipe_width())
    return console


def _pipe_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) >= NARROWEST else PIPE_WIDTH


def is_live(console: Console) -> bool:
    """Whether something can move on this console."""
    return console.is_terminal and not console.is_dumb_terminal


def percent(value: float | None) -> str:
    """A percentage or a difference of two, one decimal; "-" for None."""
    return "-" if value is None else f"{value:.1f}"


def measures_text(values: Mapping[str, float]) -> str:
    """Percentages by predictor: cnn 51.3, nme 49.0."""
    return ", ".join(f"{name} {percent(value)}" for name, value in values.items())


def duration(seconds: float) -> str:
    """How long something took: 4.2 s, 1:05 or 2:03:04."""
    return f"{seconds:.1f} s" if seconds < 59.95 else clock(seconds)


def clock(seconds: float | None) -> str:
    """Seconds as 0:04, 1:05 or 2:03:04; "-" for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def stage_name(stage: int, stages: int) -> str:
    """ "base", or "stage 3 of 10": increments are counted as the papers do."""
    return "base" if stage == 0 else f"stage {stage} of {stages - 1}"


def count_classes(count: int) -> str:
    """ "1 class", "2 classes"."""
    return f"{count:,} class{'' if count == 1 else 'es'}"


def shorten(names: Sequence[str], width: int = 40) -> str:
    """The names with commas between, cut off with how many more there are where that is too long."""
    shown = ", ".join(names)
    kept = len(names)
    while len(shown) > width and kept > 1:
        kept -= 1
        shown = f"{', '.join(names[:kept])}, +{len(names) - kept}"
    return shown


def print_line(console: Console, text: str) -> None:
    """Prints a line as it is: a path is not broken where the terminal is narrow."""
    console.print(text, soft_wrap=True)


def make_table(columns: Iterable[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table in the plain style of the whole command line; the columns named in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        number = column in right
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints a table; where it would break its names into pieces, closer together, or each row on lines of its own."""
    if not fits(console, table):
        table.padding = (0, 1, 0, 0)
    if fits(console, table):
        console.print(table)
        return
    console.print()
    if table.title is not None:
        console.print(table.title, style=table.title_style)
    heads = [str(column.header).replace("\n", " ") for column in table.columns]
    leading = 1 + sum(1 for _ in takewhile(lambda column: column.justify == "left", table.columns[1:]))
    for row in zip(*(map(str, column.cells) for column in table.columns), strict=True):
        number = f"{heads[0]} " if table.columns[0].justify == "right" and heads[0] else ""
        console.print(number + "  ".join(filter(None, row[:leading])))
        rest = [f"{head} {cell}" for head, cell in zip(heads[leading:], row[leading:], strict=True) if cell.strip("-")]
        if rest:
            console.print(Padding(", ".join(rest), (0, 0, 0, 4)))


def fits(console: Console, table: Table) -> bool:
    """Whether the console is wide enough for the table's numbers and a sensible part of its names."""
    widths: list[int] = []
    for column in table.columns:
        cells = (line for cell in (column.header, *column.cells) for line in str(cell).split("\n"))
        longest = max(map(cell_len, cells))
        widths.append(longest if column.no_wrap else min(longest, NAME_WIDTH))
    between = 1 + table.padding[1] + table.padding[3]
    return 2 + sum(widths) + between * (len(widths) - 1) <= console.width


def card_table(card: Mapping[str, str]) -> Table:
    """The protocol card as two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in card.items():
        table.add_row(label, text)
    return table


def summary_table(result: Mapping[str, Any]) -> Table:
    """What the run came to, by predictor, in percent."""
    predictors = list(result["average_incremental_accuracy"])
    columns = [f"{name} %" for name in predictors]
    table = make_table(["", *columns], right=columns)
    for key in METRICS:
        table.add_row(key.replace("_", " "), *[percent(result[key].get(name)) for name in predictors])
    return table


def summary_line(result: Mapping[str, Any], directory: str | Path | None) -> str:
    """The result in one line."""
    parts = [
        f"{name} {percent(result['average_incremental_accuracy'][name])} on average, "
        f"{percent(result['final_accuracy'][name])} at the end"
        for name in result["average_incremental_accuracy"]
    ]
    place = f" ({directory})" if directory else ""
    return f"{result['recipe']}: {'; '.join(parts)}; {duration(result['seconds'])}{place}"


def bold(text: str) -> Text:
    """The text in bold."""
    return Text(text, style="bold")
