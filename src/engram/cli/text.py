"""Consoles, and the words and tables that several commands print."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, TextIO, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engram.core.events import RunBusy, RunFailed, RunFinished, RunSkipped, Stopped
from engram.core.metrics import METRICS

PIPE_WIDTH = 200  # columns; a pipe has no width, and tables get the width they need
NAME_WIDTH = 12  # columns that names get at least in a table; longer names are folded
MIN_WIDTH = 20  # columns; a smaller COLUMNS is ignored
ENDS = (RunFinished, RunSkipped, RunBusy, RunFailed, Stopped)


class _Console(Console):
    """A console that raises an error if its pipe is closed, for the command line to handle."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Terminal:
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


def make_console() -> Console:
    """Return a console on stdout without markup; on a pipe it has COLUMNS columns, or many."""
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) >= MIN_WIDTH else PIPE_WIDTH
    file = cast("TextIO", _Terminal(sys.stdout)) if sys.stdout.isatty() else sys.stdout
    console = _Console(file=file, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = _Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width)
    return console


def is_live(console: Console) -> bool:
    """Whether the console can show an animation."""
    return console.is_terminal and not console.is_dumb_terminal


def percent(value: float | None) -> str:
    """Format a percentage, or a difference of two, with one decimal; "-" for None."""
    return "-" if value is None else f"{value:.1f}"


def measures_text(values: Mapping[str, float]) -> str:
    """Format percentages by predictor: cnn 51.3, nme 49.0."""
    return ", ".join(f"{name} {percent(value)}" for name, value in values.items())


def duration(seconds: float) -> str:
    """Format how long something took: 4.2 s, 1:05 or 2:03:04."""
    return f"{seconds:.1f} s" if seconds < 59.95 else clock(seconds)


def clock(seconds: float | None) -> str:
    """Format seconds as 0:04, 1:05 or 2:03:04; "-" for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def stage_name(stage: int, stages: int) -> str:
    """Return "base", or "stage 3 of 10": the base is not counted, as in the papers."""
    return "base" if stage == 0 else f"stage {stage} of {stages - 1}"


def count_classes(count: int) -> str:
    """Return "1 class", "2 classes"."""
    return f"{count:,} class{'' if count == 1 else 'es'}"


def shorten(names: Sequence[str], width: int = 40) -> str:
    """Join names with commas; if that is too long, leave out the last ones and add how many."""
    shown = ", ".join(names)
    kept = len(names)
    while len(shown) > width and kept > 1:
        kept -= 1
        shown = f"{', '.join(names[:kept])}, +{len(names) - kept}"
    return shown


def print_line(console: Console, text: str) -> None:
    """Print a line without wrapping it, so that a path stays whole on a narrow terminal."""
    console.print(text, soft_wrap=True)


def make_table(columns: Iterable[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table in the style of the command line; the columns in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        number = column in right
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table; if the console is too narrow, with less padding, or each row on separate lines."""
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
            print_indented(console, ", ".join(rest))


def print_indented(console: Console, text: str) -> None:
    """Print an indented paragraph."""
    console.print(Padding(text, (0, 0, 0, 4)))


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
    """Return a protocol card as a table of two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in card.items():
        table.add_row(label, text)
    return table


def summary_table(result: Mapping[str, Any]) -> Table:
    """Return the metrics of a run by predictor, in percent."""
    predictors = list(result["average_incremental_accuracy"])
    columns = [f"{name} %" for name in predictors]
    table = make_table(["", *columns], right=columns)
    for key in METRICS:
        table.add_row(key.replace("_", " "), *[percent(result[key].get(name)) for name in predictors])
    return table


def end_line(event: RunFinished | RunSkipped | RunBusy | RunFailed | Stopped) -> str:
    """Return how a run ended, in one line."""
    if isinstance(event, RunBusy):
        return "left to another process, which is doing it now"
    if isinstance(event, RunFailed):
        return f"failed: {event.message}"
    if isinstance(event, Stopped):
        how = "saved, interrupted in" if event.reason == "interrupted" else "stopped after"
        return f"{how} {stage_name(event.stage, event.stages)}"
    result = event.result
    already = "done already; " if isinstance(event, RunSkipped) else ""
    return (
        f"{already}average {measures_text(result['average_incremental_accuracy'])}; "
        f"final {measures_text(result['final_accuracy'])}; {duration(result['seconds'])}"
    )


def summary_line(event: RunFinished) -> str:
    """Return recipe, result and directory of a run in one line."""
    place = f" ({event.directory})" if event.directory else ""
    return f"{event.result['recipe']}: {end_line(event)}{place}"


def bold(text: str) -> Text:
    """Return the text in bold."""
    return Text(text, style="bold")
