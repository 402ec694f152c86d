"""Show several runs while they train: a line for each on a terminal, plain lines elsewhere, JSON, or only results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engram.cli.display import PLAIN_SECONDS, AnimatedDisplay, Display, PlainDisplay, choose_display, cut_line
from engram.cli.run_progress import ActiveRun, RunsProgress
from engram.cli.signals import Interrupt
from engram.cli.text import ENDS, clock, end_line, percent
from engram.core.events import Event, RunFailed

MIN_BAR, MAX_BAR = 10, 40  # columns


def make_multi_display(
    console: Console, interrupt: Interrupt, progress: RunsProgress, *, quiet: bool = False, as_json: bool = False
) -> Display:
    """Return the display of several runs that suits the console and the flags."""
    return choose_display(
        console,
        interrupt,
        quiet=quiet,
        as_json=as_json,
        live=lambda: LiveMultiDisplay(console, interrupt, progress),
        plain=lambda: PlainMultiDisplay(console, progress),
    )


class PlainMultiDisplay(PlainDisplay):
    """Prints one line for each stage and each run that has ended, and from time to time the totals."""

    def __init__(self, console: Console, progress: RunsProgress, seconds: float = PLAIN_SECONDS) -> None:
        super().__init__(console, seconds)
        self._progress = progress

    def show(self, event: Event, run: str | None = None) -> None:
        assert run is not None
        self._progress.note(run, event)
        if isinstance(event, ENDS):
            self.print_line(f"{run}: {end_line(event)}")
        super().show(event, run)
        if self.is_due():
            self.print_line(self._progress.summary())


class LiveMultiDisplay(AnimatedDisplay):
    """Runs that have ended as lines that scroll; below them an animated line for each active run, and the totals."""

    def __init__(self, console: Console, interrupt: Interrupt, progress: RunsProgress, refresh: bool = True) -> None:
        super().__init__(console, interrupt, refresh, per_second=4)
        self._progress = progress

    def show(self, event: Event, run: str | None = None) -> None:
        assert run is not None
        self._progress.note(run, event)
        if isinstance(event, ENDS):
            style = "red" if isinstance(event, RunFailed) else ""
            self.console.print(Text(f"{run}: {end_line(event)}", style=style))
        elif self.is_new_warning(event):
            self.console.print(Text(f"{run}: warning: {event.message}", style="yellow"))

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


def shorten_name(name: str, width: int) -> str:
    """Shorten a run's name to a number of columns: cut the end of the recipe, but keep order and seed."""
    if len(name) <= width:
        return name
    at = name.rfind("-order")
    tail = name[at:] if at > 0 and len(name) - at < width - 3 else name[len(name) - max(0, width // 2) :]
    return (name[: max(0, width - len(tail) - 1)] + "…" + tail)[: max(0, width)]
