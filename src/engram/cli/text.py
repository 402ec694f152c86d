"""Consoles, and the lines, words and tables that several commands print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, TextIO, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBars
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from engram.cli.streams import Terminal, printable
from engram.core import events
from engram.core.metrics import METRICS, TASK_METRICS

PIPE_WIDTH = 200  # columns; a pipe has no width, and tables get the width they need
NAME_WIDTH = 12  # columns that names get at least in a table; longer names are folded
MIN_WIDTH = 20  # columns; a smaller COLUMNS is ignored
ENDS = (events.RunFinished, events.RunSkipped, events.RunBusy, events.RunFailed, events.Stopped)
WORK = {
    "kernels": "compiling kernels",
    "importance": "finishing the stage",
    "exemplars": "choosing exemplars",
    "evaluate": "evaluating",
}
PHASES = {"main": "training", "balance": "fine-tuning", "correct": "correcting the bias"}


class _SafeConsole(Console):
    """A console that escapes all text, and raises an error if its pipe is closed, for the command line to handle."""

    def render_str(self, text: str, **how: Any) -> Text:  # so that widths are those of the escaped text
        return super().render_str(printable(text, keep="\n"), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            safe = segment.control is not None or segment.text.isprintable()
            yield segment if safe else segment._replace(text=printable(segment.text, keep="\n"))

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console on stdout or stderr without markup; on a pipe it has COLUMNS columns, or many."""
    stream = sys.stderr if stderr else sys.stdout
    width = None
    if stream.isatty():
        stream = cast("TextIO", Terminal(stream))
    else:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) >= MIN_WIDTH else PIPE_WIDTH
    return _SafeConsole(file=stream, width=width, quiet=quiet, markup=False, highlight=False, emoji=False)


def is_live(console: Console) -> bool:
    """Whether the console can show an animation."""
    return console.is_terminal and not console.is_dumb_terminal


def bar(console: Console, what: str, *columns: ProgressColumn) -> ProgressBars:
    """Return a progress bar that disappears at the end, and shows nothing on a console that is not live.

    columns: what to show between the bar and the remaining time; without any, how many are done.
    """
    shown = (TextColumn(what, markup=False), BarColumn(), *(columns or [MofNCompleteColumn()]), TimeRemainingColumn())
    # Lines printed meanwhile stay on stdout.
    return ProgressBars(*shown, console=console, transient=True, disable=not is_live(console), redirect_stdout=False)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print one line without wrapping it, so that a path stays whole on a narrow terminal."""
    console.print(Text(printable(text), style=style), soft_wrap=True)


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


def count_images(count: int) -> str:
    """Return "1 image", "2 images"."""
    return f"{count:,} image{'' if count == 1 else 's'}"


def back_to(undo: dict[str, Any]) -> str:
    """Describe the state that undo restores. undo: entry of `read_manifest`."""
    return f"back to lesson {undo['lesson']}, {count_classes(undo['classes'])}, of {undo['date'][:10]}"


def more_steps(steps: int) -> str:
    """Say how many more changes can be undone; empty if none."""
    return f"; {steps} more change{'' if steps == 1 else 's'} can be undone" if steps else ""


def shorten(names: Sequence[str], width: int = 40) -> str:
    """Join names with commas; if that is too long, leave out the last ones and add how many."""
    shown = ", ".join(names)
    kept = len(names)
    while len(shown) > width and kept > 1:
        kept -= 1
        shown = f"{', '.join(names[:kept])}, +{len(names) - kept}"
    return shown


class _Table(Table):
    """A table that escapes line breaks in names too; a cell with several lines is a Text."""

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        super().add_row(*[printable(cell) if isinstance(cell, str) else cell for cell in cells], **how)


def make_table(columns: Iterable[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table in the style of the command line; the columns in `right` hold numbers."""
    table = _Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
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


def print_indented(console: Console, text: str, columns: int = 4) -> None:
    """Print an indented paragraph."""
    console.print(Padding(printable(text), (0, 0, 0, columns)))


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
        table.add_row(label, printable(text))
    return table


def summary_table(result: Mapping[str, Any]) -> Table:
    """Return the metrics of a run by predictor, in percent."""
    predictors = list(result["average_incremental_accuracy"])
    columns = [f"{name} %" for name in predictors]
    table = make_table(["", *columns], right=columns)
    for key in (*METRICS, *filter(result.get, TASK_METRICS)):
        table.add_row(key.replace("_", " "), *[percent(result[key].get(name)) for name in predictors])
    return table


def start_line(event: events.RunStarted) -> str:
    """Return which run this is, its number of stages and its directory."""
    increments = event.stages - 1
    stages = f"base and {increments} stage{'s' if increments > 1 else ''}" if increments else "only the base"
    verb = "continuing " if event.resumed else ""
    place = f", in {event.directory}" if event.directory else ""
    return f"{verb}{event.recipe}: {stages}{place}"


def base_line(event: events.BaseReused | events.BaseAwaited) -> str:
    """Return that another run trained the base stage, or is training it."""
    if isinstance(event, events.BaseAwaited):
        return f"waiting for the base stage of {event.holder}"
    return f"base: trained by another run, from {event.path} (--no-cache trains it again)"


def loss_text(terms: dict[str, float]) -> str:
    """Return the loss and, if it has several, its terms."""
    text = f"loss {sum(terms.values()):.3f}"
    if len(terms) > 1:
        text += " (" + ", ".join(f"{name} {value:.3f}" for name, value in terms.items()) + ")"
    return text


def stage_or_lesson(event: events.StageStarted | events.Progress, lesson: int | None) -> str:
    """Return the name of a run's stage, or of the lesson."""
    return stage_name(event.stage, event.stages) if lesson is None else f"lesson {lesson}"


def phase_text(phase: str, lesson: int | None) -> str:
    """Return the phase as methods name it, or in plain words in a lesson."""
    return phase if lesson is None else PHASES.get(phase, phase)


def doing_text(event: events.Event, lesson: int | None = None) -> str | None:
    """Return what a run does from an event on; None if the event does not say it."""
    if isinstance(event, events.StageStarted):
        return f"{len(event.new_classes)} new class{'es' if len(event.new_classes) > 1 else ''}"
    if isinstance(event, events.PhaseStarted):
        return phase_text(event.phase, lesson)
    if isinstance(event, events.Working):
        return WORK.get(event.what, event.what)
    if isinstance(event, events.BaseAwaited):
        return base_line(event)
    return event.reason if isinstance(event, events.Stopped) else None


def progress_line(event: events.Progress, lesson: int | None = None) -> str:
    """Return the progress of training in one line."""
    loss = f"{loss_text(event.terms)}, " if event.epochs else ""
    return (
        f"{stage_or_lesson(event, lesson)}, {position_text(event, lesson, ', ')}, {loss}"
        f"{event.images_per_second:,.0f} images/s, {event.done:.0%} done, {clock(event.seconds_left)} left"
    )


def position_text(event: events.Progress, lesson: int | None, separator: str) -> str:
    """Return the phase and where in it the training is; in a pass without epochs, the images done."""
    phase = phase_text(event.phase, lesson)
    if not event.epochs:
        return f"{phase} of {event.step} of {event.steps} images"
    return f"{phase}{separator}epoch {event.epoch}/{event.epochs}"


def end_line(event: events.RunFinished | events.RunSkipped | events.RunBusy | events.RunFailed | events.Stopped) -> str:
    """Return how a run ended, in one line."""
    if isinstance(event, events.RunBusy):
        return "left to another process, which is doing it now"
    if isinstance(event, events.RunFailed):
        return f"failed: {event.message}"
    if isinstance(event, events.Stopped):
        how = "saved, interrupted in" if event.reason == "interrupted" else "stopped after"
        return f"{how} {stage_name(event.stage, event.stages)}"
    result = event.result
    already = "done already; " if isinstance(event, events.RunSkipped) else ""
    return (
        f"{already}average {measures_text(result['average_incremental_accuracy'])}; "
        f"final {measures_text(result['final_accuracy'])}; {duration(result['seconds'])}"
    )


def summary_line(event: events.RunFinished) -> str:
    """Return recipe, result and directory of a run in one line."""
    place = f" ({event.directory})" if event.directory else ""
    return f"{event.result['recipe']}: {end_line(event)}{place}"


def bold(text: str) -> Text:
    """Return the text in bold."""
    return Text(text, style="bold")
