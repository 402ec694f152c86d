"""Show a run while it trains: animated on a terminal, plain lines elsewhere, JSON for programs, or only warnings.

Displays receive events and cannot influence the run. multi_display.py has those of several runs.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, nullcontext
from typing import Self, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engram.cli.signals import SAVING, Interrupt
from engram.cli.text import bold, clock, duration, end_line, is_live, measures_text, percent, stage_name
from engram.core.events import (
    BaseAwaited,
    BaseReused,
    Event,
    PhaseStarted,
    Progress,
    RunFinished,
    RunSkipped,
    RunStarted,
    StageFinished,
    StageStarted,
    Stopped,
    Warned,
    Working,
)

PLAIN_SECONDS = 30.0
WORK = {
    "kernels": "compiling kernels",
    "importance": "finishing the stage",
    "exemplars": "choosing exemplars",
    "evaluate": "evaluating",
}
PHASES = {"main": "training", "balance": "fine-tuning", "correct": "correcting the bias"}


class Display(ABC):
    """Shows events. A context manager: leaving it ends the animation, if there is one."""

    def __init__(self) -> None:
        self._warnings: set[str] = set()

    @abstractmethod
    def show(self, event: Event, run: str | None = None) -> None:
        """Show an event. run: the name of its run, if there are several."""

    def is_new_warning(self, event: Event) -> TypeGuard[Warned]:
        """Whether this is a warning that was not shown yet; each is shown once."""
        if not isinstance(event, Warned) or event.message in self._warnings:
            return False
        self._warnings.add(event.message)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def follow(events: Iterable[Event], display: Display) -> Event:
    """Show all events and return the last."""
    last: Event | None = None
    # A generator is closed here, not when Python collects it, so that the run directory is released.
    with display, closing(events) if isinstance(events, Generator) else nullcontext():
        for last in events:
            display.show(last)
    assert last is not None, "a run has at least one event"
    return last


def make_display(
    console: Console, interrupt: Interrupt, *, quiet: bool = False, as_json: bool = False, lesson: int | None = None
) -> Display:
    """Return the display that suits the console and the flags. lesson: its number, if this is a lesson of a model."""
    return choose_display(
        console,
        interrupt,
        quiet=quiet,
        as_json=as_json,
        live=lambda: LiveDisplay(console, interrupt, lesson=lesson),
        plain=lambda: PlainDisplay(console, lesson=lesson),
    )


def choose_display(
    console: Console,
    interrupt: Interrupt,
    *,
    quiet: bool,
    as_json: bool,
    live: Callable[[], Display],
    plain: Callable[[], Display],
) -> Display:
    """Return the display that suits the console and the flags, and set whether the interrupt announces itself."""
    animated = is_live(console) and not quiet and not as_json
    interrupt.announce = not animated
    if as_json:
        return JsonDisplay(console)
    if quiet:
        return QuietDisplay(console)
    return live() if animated else plain()


class LineDisplay(Display):
    """Prints lines, each at once."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._file = console.file
        self._printed = time.monotonic()

    def print_line(self, line: str) -> None:
        """Print a line and note the time."""
        self._file.write(line + "\n")
        self._file.flush()
        self._printed = time.monotonic()


class JsonDisplay(LineDisplay):
    """Prints one line of JSON for each event."""

    def show(self, event: Event, run: str | None = None) -> None:
        self.print_line(json.dumps(event.to_json() if run is None else {"run": run, **event.to_json()}))


class QuietDisplay(LineDisplay):
    """Prints only warnings, on stderr; of several runs also one line for each that is finished."""

    def show(self, event: Event, run: str | None = None) -> None:
        if self.is_new_warning(event):
            print(f"engram: {_prefix(run)}{event.message}", file=sys.stderr)
        if run is not None and isinstance(event, (RunFinished, RunSkipped)):
            self.print_line(f"{run}: {end_line(event)}")


class PlainDisplay(LineDisplay):
    """Prints one line for each stage, and from time to time one about the progress, without control characters."""

    def __init__(self, console: Console, seconds: float = PLAIN_SECONDS, lesson: int | None = None) -> None:
        super().__init__(console)
        self._seconds = seconds
        self._lesson = lesson

    def show(self, event: Event, run: str | None = None) -> None:
        if isinstance(event, RunStarted) and run is None:
            self.print_line(start_line(event))
        elif isinstance(event, Progress) and run is None and self.is_due():
            self.print_line(progress_line(event, self._lesson))
        elif isinstance(event, StageFinished):
            self.print_line(
                f"{_prefix(run)}{stage_name(event.stage, event.stages)}: {event.classes} classes, "
                f"{measures_text(event.accuracy)}; average {measures_text(event.average)}; {duration(event.seconds)}"
            )
        elif isinstance(event, (BaseReused, BaseAwaited)):
            self.print_line(_prefix(run) + base_line(event))
        elif self.is_new_warning(event):
            self.print_line(f"{_prefix(run)}warning: {event.message}")

    def is_due(self) -> bool:
        """Whether nothing was printed for some time."""
        return time.monotonic() - self._printed >= self._seconds


def _prefix(run: str | None) -> str:
    return "" if run is None else f"{run}: "


def start_line(event: RunStarted) -> str:
    """Return which run this is, its number of stages and its directory."""
    increments = event.stages - 1
    stages = f"base and {increments} stage{'s' if increments > 1 else ''}" if increments else "only the base"
    verb = "continuing " if event.resumed else ""
    place = f", in {event.directory}" if event.directory else ""
    return f"{verb}{event.recipe}: {stages}{place}"


def base_line(event: BaseReused | BaseAwaited) -> str:
    """Return that another run trained the base stage, or is training it."""
    if isinstance(event, BaseAwaited):
        return f"waiting for the base stage of {event.holder}"
    return f"base: trained by another run, from {event.path} (--no-cache trains it again)"


def loss_text(terms: dict[str, float]) -> str:
    """Return the loss and, if it has several, its terms."""
    text = f"loss {sum(terms.values()):.3f}"
    if len(terms) > 1:
        text += " (" + ", ".join(f"{name} {value:.3f}" for name, value in terms.items()) + ")"
    return text


def stage_or_lesson(event: StageStarted | Progress, lesson: int | None) -> str:
    """Return the name of a run's stage, or of the lesson."""
    return stage_name(event.stage, event.stages) if lesson is None else f"lesson {lesson}"


def phase_text(phase: str, lesson: int | None) -> str:
    """Return the phase as methods name it, or in plain words in a lesson."""
    return phase if lesson is None else PHASES.get(phase, phase)


def progress_line(event: Progress, lesson: int | None = None) -> str:
    """Return the progress of training in one line."""
    return (
        f"{stage_or_lesson(event, lesson)}, {phase_text(event.phase, lesson)}, epoch {event.epoch}/{event.epochs}, "
        f"{loss_text(event.terms)}, {event.images_per_second:,.0f} images/s, {event.done:.0%} done, "
        f"{clock(event.seconds_left)} left"
    )


class AnimatedDisplay(Display):
    """Keeps some lines at the bottom of a terminal up to date; everything else scrolls above them."""

    def __init__(self, console: Console, interrupt: Interrupt, refresh: bool, per_second: int) -> None:
        super().__init__()
        self.console = console
        self._interrupt = interrupt
        self._refresh = refresh
        self._per_second = per_second
        self._live: Live | None = None

    @abstractmethod
    def render(self) -> RenderableType:
        """Return the animated lines."""

    def saving_line(self) -> list[Text]:
        """Return a line that says that the run is being saved, if it was interrupted."""
        return [cut_line(SAVING, "bold yellow")] if self._interrupt() else []

    def __enter__(self) -> Self:
        # Its thread keeps the lines moving between events, unless refresh is false.
        self._live = Live(
            console=self.console,
            get_renderable=self.render,
            auto_refresh=self._refresh,
            refresh_per_second=self._per_second,
            transient=True,
        )
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._live is not None
        self._live.stop()


def cut_line(text: str, style: str = "") -> Text:
    """Return a line that is cut at the right edge of the terminal."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


class LiveDisplay(AnimatedDisplay):
    """Finished stages as rows of a table that scrolls; below them progress bar, stage, phase and speed."""

    def __init__(self, console: Console, interrupt: Interrupt, refresh: bool = True, lesson: int | None = None) -> None:
        super().__init__(console, interrupt, refresh, per_second=8)
        self._lesson = lesson
        self._progress: Progress | None = None
        self._stage = "reading"
        self._doing = ""
        self._done = 0.0
        self._left: float | None = None
        self._columns: list[tuple[str, int]] = []

    def show(self, event: Event, run: str | None = None) -> None:
        if isinstance(event, Progress):
            self._stage = stage_or_lesson(event, self._lesson)
            self._progress, self._done, self._left = event, event.done, event.seconds_left
        elif isinstance(event, RunStarted):
            self.console.print(bold(start_line(event)))
        elif isinstance(event, StageStarted):
            count = len(event.new_classes)
            self._stage = stage_or_lesson(event, self._lesson)
            self._do(f"{count} new class{'es' if count > 1 else ''}")
        elif isinstance(event, PhaseStarted):
            self._do(phase_text(event.phase, self._lesson))
        elif isinstance(event, Working):
            self._do(WORK.get(event.what, event.what))
        elif isinstance(event, BaseAwaited):
            self._do(base_line(event))
        elif isinstance(event, Stopped):
            self._do(event.reason)
        elif isinstance(event, StageFinished):
            self._print_row(event)
        elif isinstance(event, BaseReused):
            self.console.print(Text(base_line(event), style="dim"))
        elif self.is_new_warning(event):
            self.console.print(Text(f"warning: {event.message}", style="yellow"))

    def _do(self, what: str) -> None:
        self._doing, self._progress = what, None

    def _print_row(self, event: StageFinished) -> None:
        cells = row_cells(event)
        if not self._columns:
            self._columns = fit_columns(cells, self.console.width)
            header = "  ".join(title.rjust(width) for title, width in self._columns)
            self.console.print(Text(header, style="dim", no_wrap=True, overflow="crop"))
        line = "  ".join(cells.get(title, "-").rjust(width) for title, width in self._columns)
        self.console.print(Text(line, no_wrap=True, overflow="crop"))

    def render(self) -> Group:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_column(justify="right", no_wrap=True)
        left = "" if self._left is None else f"{clock(self._left)} left"
        bar.add_row(ProgressBar(total=1.0, completed=self._done), f"{self._done:.0%}", left)
        doing, speed = self._doing, ""
        if (now := self._progress) is not None:
            phase = phase_text(now.phase, self._lesson)
            doing = f"{phase}  epoch {now.epoch}/{now.epochs}  step {now.step}/{now.steps}"
            speed = f"{now.images_per_second:,.0f} images/s  {loss_text(now.terms)}"
        # Always three lines: an area that grows and shrinks flickers.
        (last,) = self.saving_line() or [cut_line(speed)]
        return Group(bar, cut_line(f"{self._stage}  {doing}".rstrip()), last)


def row_cells(event: StageFinished) -> dict[str, str]:
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
