"""What several runs look like while they go: a board with a line for each on a terminal, plain lines elsewhere, JSON.

Like displays of one run, boards consume events and have no way to influence the runs.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engram.cli.display import PLAIN_SECONDS, Screen, Unsaid, moving_line
from engram.cli.run_progress import Line, Tally
from engram.cli.signals import SAVING, Interrupt
from engram.cli.text import clock, duration, is_live, measures_text, percent, stage_name
from engram.core.events import (
    BaseAwaited,
    BaseReused,
    Event,
    RunFailed,
    RunFinished,
    RunSkipped,
    StageFinished,
    Stopped,
    Warned,
)

BAR, LONGEST_BAR = 10, 40  # columns


class Board(Screen, ABC):
    """Shows the events of several runs; used as a context, which ends what moves."""

    @abstractmethod
    def show(self, run: str, event: Event) -> None:
        """Takes note of an event of a run."""


def make_board(
    console: Console, interrupt: Interrupt, tally: Tally, *, quiet: bool = False, as_json: bool = False
) -> Board:
    """The board that suits the console and the flags; tells the interrupt who announces it."""
    interrupt.announce = True
    if as_json:
        return JsonBoard(console)
    if quiet:
        return QuietBoard(console)
    if is_live(console):
        interrupt.announce = False
        return LiveBoard(console, interrupt, tally)
    return PlainBoard(console, tally)


class JsonBoard(Board):
    """One line of JSON for each event, with the name of its run."""

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def show(self, run: str, event: Event) -> None:
        self._file.write(json.dumps({"run": run, **event.to_json()}) + "\n")
        self._file.flush()


class QuietBoard(Board):
    """One line for each run that has ended well, and warnings on stderr."""

    def __init__(self, console: Console) -> None:
        self._file = console.file
        self._warnings = Unsaid()

    def show(self, run: str, event: Event) -> None:
        if isinstance(event, Warned) and self._warnings.is_new(event.message):
            print(f"engram: {run}: {event.message}", file=sys.stderr)
        if isinstance(event, (RunFinished, RunSkipped)):
            self._file.write(end_line(run, event) + "\n")
            self._file.flush()


class PlainBoard(Board):
    """Lines without control characters: one for each stage and each run that has ended, and now and then the totals."""

    def __init__(self, console: Console, tally: Tally, seconds: float = PLAIN_SECONDS) -> None:
        self._file = console.file
        self._tally = tally
        self._seconds = seconds
        self._said = time.monotonic()
        self._warnings = Unsaid()

    def show(self, run: str, event: Event) -> None:
        self._tally.note(run, event)
        if isinstance(event, (RunFinished, RunSkipped, RunFailed, Stopped)):
            self._say(end_line(run, event))
        elif isinstance(event, StageFinished):
            accuracy = measures_text(event.accuracy)
            self._say(
                f"{run}: {stage_name(event.stage, event.stages)}: {event.classes} classes, {accuracy}; "
                f"{duration(event.seconds)}"
            )
        elif isinstance(event, BaseReused):
            self._say(f"{run}: base: as another run trained it")
        elif isinstance(event, BaseAwaited):
            self._say(f"{run}: {_awaiting(event.holder)}")
        elif isinstance(event, Warned) and self._warnings.is_new(event.message):
            self._say(f"{run}: warning: {event.message}")
        elif time.monotonic() - self._said >= self._seconds:
            self._say(self._tally.text())

    def _say(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
        self._said = time.monotonic()


def end_line(run: str, event: RunFinished | RunSkipped | RunFailed | Stopped) -> str:
    """How a run ended, in one line."""
    if isinstance(event, RunFailed):
        return f"{run}: failed: {event.message}"
    if isinstance(event, Stopped):
        how = "saved, interrupted in" if event.reason == "interrupted" else "stopped after"
        return f"{run}: {how} {stage_name(event.stage, event.stages)}"
    result = event.result
    already = "done already; " if isinstance(event, RunSkipped) else ""
    return (
        f"{run}: {already}average {measures_text(result['average_incremental_accuracy'])}; "
        f"final {measures_text(result['final_accuracy'])}; {duration(result['seconds'])}"
    )


class LiveBoard(Board):
    """Runs that have ended as lines that scroll; below them a line that moves for each at work, and the totals."""

    def __init__(self, console: Console, interrupt: Interrupt, tally: Tally, refresh: bool = True) -> None:
        self.console = console
        self._interrupt = interrupt
        self._tally = tally
        self._warnings = Unsaid()
        self.move(console, self.render, refresh, per_second=4)

    def show(self, run: str, event: Event) -> None:
        self._tally.note(run, event)
        if isinstance(event, (RunFinished, RunSkipped, RunFailed, Stopped)):
            style = "red" if isinstance(event, RunFailed) else ""
            self.console.print(Text(end_line(run, event), style=style))
        elif isinstance(event, Warned) and self._warnings.is_new(event.message):
            self.console.print(Text(f"{run}: warning: {event.message}", style="yellow"))

    def render(self) -> Group:
        """The lines that move."""
        lines = sorted(self._tally.active(), key=lambda line: line.holder is not None)  # those that wait come last
        room = max(1, self.console.height - 3)  # of the totals, what may be below, and the cursor
        hidden = len(lines) - room + 1 if len(lines) > room else 0
        shown = lines[: len(lines) - hidden]
        waiting = [line for line in shown if line.holder is not None]
        below = [moving_line(f"{line.member.name}: {_awaiting(line.holder or '')}", "dim") for line in waiting]
        below += [moving_line(f"and {hidden} more at work")] if hidden else []
        if self._interrupt():
            below.append(moving_line(SAVING, "bold yellow"))
        at_work = self._table([line for line in shown if line.holder is None])
        return Group(at_work, *below, moving_line(self._tally.text(), "bold"))

    def _table(self, lines: Sequence[Line]) -> Table:
        """A row for each run that trains."""
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        for _ in range(5):
            table.add_column(justify="right", no_wrap=True)
        cells = [_cells(line) for line in lines]
        widths = [max((len(row[i]) for row in cells), default=0) for i in range(4)]
        room = self.console.width - sum(widths) - 5  # for the name and the bar
        longest = max((len(line.member.name) for line in lines), default=0)
        bar = max(BAR, min(LONGEST_BAR, room - longest))
        for line, row in zip(lines, cells, strict=True):
            where, doing, accuracy, left = row
            name = shorten_name(line.member.name, room - bar)
            table.add_row(name, where, doing, ProgressBar(1.0, line.done, width=bar), accuracy, left)
        return table


def _cells(line: Line) -> tuple[str, str, str, str]:
    """Where a run is, what it does there, its accuracy so far, and the time left."""
    where = "base" if line.stage == 0 else f"{line.stage}/{line.stages - 1}"
    return where, line.doing, percent(line.accuracy), clock(line.left)


def _awaiting(holder: str) -> str:
    """That the base stage is being trained by another run, which is named by its directory alone."""
    return f"waiting for the base stage of {Path(holder).name}"


def shorten_name(name: str, width: int) -> str:
    """A run's name in so many columns: what is cut is at the end of the recipe, not order and seed."""
    if len(name) <= width:
        return name
    at = name.rfind("-order")
    tail = name[at:] if at > 0 and len(name) - at < width - 3 else name[len(name) - max(0, width // 2) :]
    return (name[: max(0, width - len(tail) - 1)] + "…" + tail)[: max(0, width)]
