"""What a run looks like while it goes: live on a terminal, plain lines elsewhere, JSON for programs, or nothing.

Displays consume events and have no way to influence the run.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engram.cli.signals import SAVING, Interrupt
from engram.cli.text import clock, duration, is_live, measures_text, percent, stage_name
from engram.core.events import (
    BaseAwaited,
    BaseReused,
    Event,
    PhaseStarted,
    Progress,
    RunStarted,
    StageFinished,
    StageStarted,
    Stopped,
    Warned,
    Working,
)


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


PLAIN_SECONDS = 30.0
WORK = {
    "kernels": "compiling kernels for these images (kept for the next time)",
    "importance": "finishing the stage (importance and the like)",
    "exemplars": "choosing exemplars",
    "evaluate": "evaluating on images it has not learned from",
}
PHASES = {"main": "training", "balance": "fine-tuning", "correct": "correcting the bias"}


class Display(Screen, ABC):
    """Shows events; used as a context, which ends what moves."""

    @abstractmethod
    def show(self, event: Event) -> None:
        """Takes note of an event."""


def follow(events: Iterable[Event], display: Display) -> Event:
    """The last of the events, all of them shown."""
    last: Event | None = None
    with display:
        if isinstance(events, Generator):
            # Closed here, not when Python gets to it, so that the run directory is released.
            with closing(events):
                last = _show_all(events, display)
        else:
            last = _show_all(iter(events), display)
    assert last is not None, "a run has at least one event"
    return last


def _show_all(events: Iterator[Event], display: Display) -> Event | None:
    last = None
    for last in events:
        display.show(last)
    return last


def make_display(
    console: Console, interrupt: Interrupt, *, quiet: bool = False, as_json: bool = False, lesson: int | None = None
) -> Display:
    """The display that suits the console and the flags; tells the interrupt who announces it.

    lesson: the number of the lesson that this is, where it is one and no run.
    """
    interrupt.announce = True
    if as_json:
        return JsonDisplay(console)
    if quiet:
        return QuietDisplay()
    if is_live(console):
        interrupt.announce = False
        return LiveDisplay(console, interrupt, lesson=lesson)
    return PlainDisplay(console, lesson=lesson)


class Unsaid:
    """Tells what was said before, so that a warning that comes again is shown once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def is_new(self, message: str) -> bool:
        """Whether it was not said yet; from here on it was."""
        is_new = message not in self._said
        self._said.add(message)
        return is_new


class QuietDisplay(Display):
    """Shows warnings alone, on stderr, each once."""

    def __init__(self) -> None:
        self._warnings = Unsaid()

    def show(self, event: Event) -> None:
        if isinstance(event, Warned) and self._warnings.is_new(event.message):
            print(f"engram: {event.message}", file=sys.stderr)


class JsonDisplay(Display):
    """One line of JSON for each event."""

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def show(self, event: Event) -> None:
        self._file.write(json.dumps(event.to_json()) + "\n")
        self._file.flush()


class PlainDisplay(Display):
    """Lines without control characters: one a stage, and now and then one on how far it is."""

    def __init__(self, console: Console, seconds: float = PLAIN_SECONDS, lesson: int | None = None) -> None:
        self._file = console.file
        self._seconds = seconds
        self._lesson = lesson
        self._said = time.monotonic()
        self._warnings = Unsaid()

    def show(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._say(start_line(event))
        elif isinstance(event, Progress):
            if time.monotonic() - self._said >= self._seconds:
                self._say(progress_line(event, self._lesson))
        elif isinstance(event, StageFinished):
            self._say(
                f"{stage_name(event.stage, event.stages)}: {event.classes} classes, {measures_text(event.accuracy)}; "
                f"average {measures_text(event.average)}; {duration(event.seconds)}"
            )
        elif isinstance(event, BaseReused):
            self._say(reused_line(event))
        elif isinstance(event, BaseAwaited):
            self._say(awaited_line(event))
        elif isinstance(event, Warned) and self._warnings.is_new(event.message):
            self._say(f"warning: {event.message}")

    def _say(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
        self._said = time.monotonic()


def start_line(event: RunStarted) -> str:
    """Which run this is and where its files are."""
    increments = event.stages - 1
    stages = "the base alone" if not increments else f"base and {increments} stage{'s' if increments > 1 else ''}"
    verb = "going on with " if event.resumed else ""
    place = f", in {event.directory}" if event.directory else ""
    return f"{verb}{event.recipe}: {stages}{place}"


def reused_line(event: BaseReused) -> str:
    """That the base stage was not trained, and where it came from."""
    return f"base: as an earlier run trained it, from {event.path} (--no-cache trains it anew)"


def awaited_line(event: BaseAwaited) -> str:
    """That the base stage is being trained by another run."""
    return f"waiting for the base stage of {event.holder}"


def loss_text(terms: dict[str, float]) -> str:
    """The loss and, where it has several, its terms."""
    text = f"loss {sum(terms.values()):.3f}"
    if len(terms) > 1:
        text += " (" + ", ".join(f"{name} {value:.3f}" for name, value in terms.items()) + ")"
    return text


def where_text(event: StageStarted | Progress, lesson: int | None) -> str:
    """The stage of a run, or the lesson."""
    return stage_name(event.stage, event.stages) if lesson is None else f"lesson {lesson}"


def phase_text(phase: str, lesson: int | None) -> str:
    """The phase as methods call it, or in a lesson as people do."""
    return phase if lesson is None else PHASES.get(phase, phase)


def progress_line(event: Progress, lesson: int | None = None) -> str:
    """Where training stands, in one line."""
    return (
        f"{where_text(event, lesson)}, {phase_text(event.phase, lesson)}, epoch {event.epoch}/{event.epochs}, "
        f"{loss_text(event.terms)}, {event.images_per_second:,.0f} images/s, {event.done:.0%} done, "
        f"{clock(event.seconds_left)} left"
    )


class LiveDisplay(Display):
    """Finished stages as rows of a table that scrolls; below them a few lines that move: how far, where, how fast."""

    def __init__(self, console: Console, interrupt: Interrupt, refresh: bool = True, lesson: int | None = None) -> None:
        self.console = console
        self._lesson = lesson
        self._interrupt = interrupt
        self._progress: Progress | None = None
        self._where = "reading"
        self._doing = ""
        self._done = 0.0
        self._left: float | None = None
        self._columns: list[tuple[str, int]] = []
        self._warnings = Unsaid()
        # Its own thread keeps the bar moving while the run is between events.
        self.move(console, self.render, refresh, per_second=8)

    def show(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.console.print(Text(start_line(event), style="bold"))
        elif isinstance(event, StageStarted):
            count = len(event.new_classes)
            self._where = where_text(event, self._lesson)
            self._doing = f"{count} new class{'es' if count > 1 else ''}"
            self._progress = None
        elif isinstance(event, PhaseStarted):
            self._doing, self._progress = phase_text(event.phase, self._lesson), None
        elif isinstance(event, Progress):
            self._where = where_text(event, self._lesson)
            self._progress, self._done, self._left = event, event.done, event.seconds_left
        elif isinstance(event, Working):
            self._doing, self._progress = WORK.get(event.what, event.what), None
        elif isinstance(event, BaseAwaited):
            self._doing, self._progress = awaited_line(event), None
        elif isinstance(event, StageFinished):
            self._print_row(event)
        elif isinstance(event, Stopped):
            self._doing, self._progress = event.reason, None
        elif isinstance(event, BaseReused):
            self.console.print(Text(reused_line(event), style="dim"))
        elif isinstance(event, Warned) and self._warnings.is_new(event.message):
            self.console.print(Text(f"warning: {event.message}", style="yellow"))

    def _print_row(self, event: StageFinished) -> None:
        cells = row_cells(event)
        if not self._columns:
            self._columns = fit_columns(cells, self.console.width)
            header = "  ".join(title.rjust(width) for title, width in self._columns)
            self.console.print(Text(header, style="dim", no_wrap=True, overflow="crop"))
        line = "  ".join(cells.get(title, "-").rjust(width) for title, width in self._columns)
        self.console.print(Text(line, no_wrap=True, overflow="crop"))

    def render(self) -> Group:
        """The lines that move."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_column(justify="right", no_wrap=True)
        left = "" if self._left is None else f"{clock(self._left)} left"
        bar.add_row(ProgressBar(total=1.0, completed=self._done), f"{self._done:.0%}", left)
        # Always three lines: an area that grows and shrinks flickers.
        below = moving_line("")
        if self._interrupt():
            below = moving_line(SAVING, "bold yellow")
        elif self._progress is not None:
            below = moving_line(f"{self._progress.images_per_second:,.0f} images/s  {loss_text(self._progress.terms)}")
        return Group(bar, moving_line(self._where_text()), below)

    def _where_text(self) -> str:
        now = self._progress
        if now is None:
            return f"{self._where}  {self._doing}".rstrip()
        phase = phase_text(now.phase, self._lesson)
        return f"{self._where}  {phase}  epoch {now.epoch}/{now.epochs}  step {now.step}/{now.steps}"


def row_cells(event: StageFinished) -> dict[str, str]:
    """The row of a finished stage, by column."""
    cells = {"stage": "base" if event.stage == 0 else str(event.stage), "classes": str(event.classes)}
    cells |= {f"{name} %": percent(value) for name, value in event.accuracy.items()}
    several = len(event.average) > 1
    cells |= {f"{name} average" if several else "average": percent(value) for name, value in event.average.items()}
    return cells | {"seconds": f"{event.seconds:.1f}"}


def fit_columns(cells: dict[str, str], width: int) -> list[tuple[str, int]]:
    """The columns that fit into the width and the width of each, in order; what matters least goes first."""
    columns = {title: max(len(title), 6 if title != "stage" else 5) for title in cells}
    expendable = ["seconds", *reversed([title for title in cells if title.endswith("average")]), "classes"]
    for title in expendable:
        if sum(columns.values()) + 2 * (len(columns) - 1) <= width:
            break
        del columns[title]
    return list(columns.items())
