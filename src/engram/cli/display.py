"""Show runs while they train: animated on a terminal, plain lines elsewhere, JSON for programs, or only warnings.

Displays receive events and cannot influence a run.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Self, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engram.cli.run_progress import ActiveRun, RunsProgress
from engram.cli.signals import SAVING, Interrupt
from engram.cli.streams import printable, tell
from engram.cli.text import (
    ENDS,
    base_line,
    clock,
    doing_text,
    duration,
    end_line,
    is_live,
    loss_text,
    measures_text,
    percent,
    position_text,
    print_line,
    progress_line,
    stage_name,
    stage_or_lesson,
    start_line,
)
from engram.core import events

PLAIN_SECONDS = 30.0
MIN_BAR, MAX_BAR = 10, 40  # columns


class Display(ABC):
    """Shows events. A context manager: leaving it ends the animation, if there is one."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._warnings: set[str] = set()

    @abstractmethod
    def show(self, event: events.Event, run: str | None = None) -> None:
        """Show an event. run: the name of its run, if there are several."""

    def print(self, text: str, run: str | None = None, style: str = "") -> None:
        """Print a line, which begins with the run if there are several."""
        print_line(self.console, _of(run) + text, style)

    def print_warning(self, event: events.Event, run: str | None) -> None:
        """Print a warning that was not printed before; other events print nothing."""
        if self.is_new_warning(event):
            self.print(f"warning: {event.message}", run, "yellow")

    def is_new_warning(self, event: events.Event) -> TypeGuard[events.Warned]:
        """Whether this is a warning that was not shown yet; each is shown once."""
        if not isinstance(event, events.Warned) or event.message in self._warnings:
            return False
        self._warnings.add(event.message)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _of(run: str | None) -> str:
    return "" if run is None else f"{run}: "


def follow(run: Iterable[events.Event], display: Display) -> events.Event:
    """Show all events and return the last."""
    last: events.Event | None = None
    # A generator is closed here, not when Python collects it, so that the run directory is released.
    with display, closing(run) if isinstance(run, Generator) else nullcontext():
        for last in run:
            display.show(last)
    assert last is not None, "a run has at least one event"
    return last


def make_display(
    console: Console,
    interrupt: Interrupt,
    *,
    quiet: bool = False,
    as_json: bool = False,
    lesson: int | None = None,
    progress: RunsProgress | None = None,
) -> Display:
    """Return the display that suits the console and the flags, and set whether the interrupt announces itself.

    lesson: its number, if this is a lesson of a model. progress: of several runs.
    """
    animated = is_live(console) and not quiet and not as_json
    interrupt.announce = not animated
    if as_json:
        return JsonDisplay(console)
    if quiet:
        return QuietDisplay(console)
    if not animated:
        return PlainDisplay(console, lesson=lesson, progress=progress)
    if progress is not None:
        return LiveMultiDisplay(console, interrupt, progress)
    return LiveDisplay(console, interrupt, lesson=lesson)


class JsonDisplay(Display):
    """Prints one line of JSON for each event."""

    def show(self, event: events.Event, run: str | None = None) -> None:
        line = event.to_json() if run is None else {"run": run, **event.to_json()}
        self.print(json.dumps(line, allow_nan=False))  # NaN is not JSON


class QuietDisplay(Display):
    """Prints only warnings, on stderr; of several runs also one line for each that is finished."""

    def show(self, event: events.Event, run: str | None = None) -> None:
        if self.is_new_warning(event):
            tell(_of(run) + event.message)
        if run is not None and isinstance(event, (events.RunFinished, events.RunSkipped)):
            self.print(end_line(event), run)


class PlainDisplay(Display):
    """Prints a line for each stage, of several runs for each that has ended, and from time to time the progress."""

    def __init__(
        self,
        console: Console,
        seconds: float = PLAIN_SECONDS,
        lesson: int | None = None,
        progress: RunsProgress | None = None,
    ) -> None:
        super().__init__(console)
        self._seconds, self._lesson, self._progress = seconds, lesson, progress
        self._printed = time.monotonic()

    def print(self, text: str, run: str | None = None, style: str = "") -> None:
        super().print(text, run, style)
        self._printed = time.monotonic()

    def show(self, event: events.Event, run: str | None = None) -> None:
        if self._progress is not None and run is not None:
            self._progress.note(run, event)
        if isinstance(event, events.RunStarted) and run is None:
            self.print(start_line(event))
        elif isinstance(event, events.StageFinished):
            self.print(
                f"{stage_name(event.stage, event.stages)}: {event.classes} classes, "
                f"{measures_text(event.accuracy)}; average {measures_text(event.average)}; {duration(event.seconds)}",
                run,
            )
        elif isinstance(event, (events.BaseReused, events.BaseAwaited)):
            self.print(base_line(event), run)
        elif isinstance(event, events.ImagesPlaced):
            self.print(event.message, run)
        elif isinstance(event, ENDS) and run is not None:
            self.print(end_line(event), run)
        self.print_warning(event, run)
        if time.monotonic() - self._printed >= self._seconds:
            if self._progress is not None:
                self.print(self._progress.summary())
            elif isinstance(event, events.Progress):
                self.print(progress_line(event, self._lesson))


class AnimatedDisplay(Display):
    """Keeps some lines at the bottom of a terminal up to date; everything else scrolls above them."""

    def __init__(self, console: Console, interrupt: Interrupt, refresh: bool, per_second: int) -> None:
        super().__init__(console)
        self._interrupt = interrupt
        # Its thread keeps the lines moving between events, unless refresh is false.
        self._live = Live(
            console=console,
            get_renderable=self.render,
            auto_refresh=refresh,
            refresh_per_second=per_second,
            transient=True,
        )

    @abstractmethod
    def render(self) -> RenderableType:
        """Return the animated lines."""

    def saving_line(self) -> list[Text]:
        """Return a line that says that the run is being saved, if it was interrupted."""
        return [cut_line(SAVING, "bold yellow")] if self._interrupt() else []

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()


def cut_line(text: str, style: str = "") -> Text:
    """Return a line that is cut at the right edge of the terminal."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


class LiveDisplay(AnimatedDisplay):
    """Finished stages as rows of a table that scrolls; below them progress bar, stage, phase and speed."""

    def __init__(self, console: Console, interrupt: Interrupt, refresh: bool = True, lesson: int | None = None) -> None:
        self._lesson = lesson
        self._stage, self._doing, self._speed = "reading", "", ""
        self._done = 0.0
        self._left: float | None = None
        self._columns: list[tuple[str, int]] = []
        super().__init__(console, interrupt, refresh, per_second=8)

    def show(self, event: events.Event, run: str | None = None) -> None:
        if isinstance(event, (events.StageStarted, events.Progress)):
            self._stage = stage_or_lesson(event, self._lesson)
        if (doing := doing_text(event, self._lesson)) is not None:
            self._doing, self._speed = doing, ""
        elif isinstance(event, events.Progress):
            self._doing = position_text(event, self._lesson, "  ")
            self._speed = f"{event.images_per_second:,.0f} images/s"
            if event.epochs:
                self._doing += f"  step {event.step}/{event.steps}"
                self._speed += f"  {loss_text(event.terms)}"
            self._done, self._left = event.done, event.seconds_left
        elif isinstance(event, events.RunStarted):
            self.print(start_line(event), style="bold")
        elif isinstance(event, events.StageFinished):
            self._print_row(event)
        elif isinstance(event, events.BaseReused):
            self.print(base_line(event), style="dim")
        elif isinstance(event, events.ImagesPlaced):
            self.print(event.message, style="dim")
        self.print_warning(event, run)

    def _print_row(self, event: events.StageFinished) -> None:
        cells = row_cells(event)
        if not self._columns:
            self._columns = fit_columns(cells, self.console.width)
            self.print("  ".join(title.rjust(width) for title, width in self._columns), style="dim")
        self.print("  ".join(cells.get(title, "-").rjust(width) for title, width in self._columns))

    def render(self) -> Group:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_column(justify="right", no_wrap=True)
        left = "" if self._left is None else f"{clock(self._left)} left"
        bar.add_row(ProgressBar(total=1.0, completed=self._done), f"{self._done:.0%}", left)
        # Always three lines: an area that grows and shrinks flickers.
        (last,) = self.saving_line() or [cut_line(self._speed)]
        return Group(bar, cut_line(f"{self._stage}  {self._doing}".rstrip()), last)


class LiveMultiDisplay(AnimatedDisplay):
    """Runs that have ended as lines that scroll; below them an animated line for each active run, and the totals."""

    def __init__(self, console: Console, interrupt: Interrupt, progress: RunsProgress, refresh: bool = True) -> None:
        self._progress = progress
        super().__init__(console, interrupt, refresh, per_second=4)

    def show(self, event: events.Event, run: str | None = None) -> None:
        assert run is not None
        self._progress.note(run, event)
        if isinstance(event, ENDS):
            self.print(end_line(event), run, "red" if isinstance(event, events.RunFailed) else "")
        self.print_warning(event, run)

    def render(self) -> Group:
        runs = sorted(self._progress.active(), key=lambda run: run.holder is not None)  # those that wait come last
        lines = max(1, self.console.height - 3)  # without the totals, the line that says "saving", and the cursor
        hidden = len(runs) - lines + 1 if len(runs) > lines else 0
        shown = runs[: len(runs) - hidden]
        below = [
            cut_line(f"{run.member.name}: waiting for the base stage of {Path(run.holder).name}", "dim")
            for run in shown
            if run.holder is not None
        ]
        below += [cut_line(f"and {hidden} more at work")] if hidden else []
        training = self._table([run for run in shown if run.holder is None])
        return Group(training, *below, *self.saving_line(), cut_line(self._progress.summary(), "bold"))

    def _table(self, runs: Sequence[ActiveRun]) -> Table:
        """Return a table with name, stage, phase, progress bar, accuracy and time left of the runs that train."""
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        for _ in range(5):
            table.add_column(justify="right", no_wrap=True)
        cells = [
            (
                "base" if run.stage == 0 else f"{run.stage}/{run.stages - 1}",
                run.doing,
                percent(run.accuracy),
                clock(run.left),
            )
            for run in runs
        ]
        widths = [max((len(row[i]) for row in cells), default=0) for i in range(4)]
        columns = self.console.width - sum(widths) - 5  # for the name and the bar
        longest = max((len(run.member.name) for run in runs), default=0)
        bar = max(MIN_BAR, min(MAX_BAR, columns - longest))
        for run, (stage, doing, accuracy, left) in zip(runs, cells, strict=True):
            name = shorten_name(run.member.name, columns - bar)
            table.add_row(name, stage, doing, ProgressBar(1.0, run.done, width=bar), accuracy, left)
        return table


def row_cells(event: events.StageFinished) -> dict[str, str]:
    """Return the cells of a finished stage by column."""
    cells = {"stage": "base" if event.stage == 0 else str(event.stage), "classes": str(event.classes)}
    cells |= {f"{name} %": percent(value) for name, value in event.accuracy.items()}
    several = len(event.average) > 1
    cells |= {f"{name} average" if several else "average": percent(value) for name, value in event.average.items()}
    return cells | {"seconds": f"{event.seconds:.1f}"}


def fit_columns(cells: dict[str, str], width: int) -> list[tuple[str, int]]:
    """Return the columns that fit into the width, each with its own width; the least important are dropped first."""
    columns = {title: max(len(title), 6 if title != "stage" else 5) for title in cells}
    expendable = ["seconds", *reversed([title for title in cells if title.endswith("average")]), "classes"]
    for title in expendable:
        if sum(columns.values()) + 2 * (len(columns) - 1) <= width:
            break
        del columns[title]
    return list(columns.items())


def shorten_name(name: str, width: int) -> str:
    """Shorten a run's name to a number of columns: cut the end of the recipe, but keep order and seed."""
    if len(name) <= width:
        return name
    at = name.rfind("-order")
    tail = name[at:] if at > 0 and len(name) - at < width - 3 else name[len(name) - max(0, width // 2) :]
    return (name[: max(0, width - len(tail) - 1)] + "…" + tail)[: max(0, width)]
