"""Progress of a run that Python started: a bar on a terminal, a bar and a curve in a notebook, otherwise nothing."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBars

from engram.core.events import Event, Progress, RunStarted, StageFinished, Warned
from engram.runs.curve_svg import curve_svg


def show_progress(run: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of a run and show its progress, if somebody can see it. Warnings go with it."""
    # A generator is closed here, not when Python collects it, so that the run directory is released.
    with closing(run) if isinstance(run, Generator) else nullcontext():
        if Console().is_jupyter:
            yield from _in_notebook(run)
            return
        console = Console(stderr=True, highlight=False)
        if console.is_terminal and not console.is_dumb_terminal:
            yield from _on_terminal(run, console)
        else:
            yield from run


def _on_terminal(run: Iterable[Event], console: Console) -> Iterator[Event]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with ProgressBars(*columns, console=console, transient=True, redirect_stdout=False) as bars:
        task = bars.add_task("", total=1.0)
        for event in run:
            if isinstance(event, Progress):
                bars.update(task, completed=event.done, description=_position(event))
            elif isinstance(event, Warned):
                console.print(f"warning: {event.message}", markup=False)
            yield event


def _in_notebook(run: Iterable[Event]) -> Iterator[Event]:
    """Show a cell output that is updated in place. It needs no JavaScript, and stays in a saved notebook."""
    display: Any = importlib.import_module("IPython.display")
    output = display.display(display.HTML(""), display_id=True)
    name, done, doing = "", 0.0, "starting"
    classes: list[int] = []
    curves: dict[str, list[float]] = {}
    warned: list[str] = []
    for event in run:
        if isinstance(event, RunStarted):
            name = event.recipe
        elif isinstance(event, Progress):
            done, doing = event.done, _position(event)
        elif isinstance(event, StageFinished):
            classes.append(event.classes)
            for by, accuracy in event.accuracy.items():
                curves.setdefault(by, []).append(accuracy)
            done, doing = (1.0, "done") if event.stage == event.stages - 1 else (done, doing)
        elif isinstance(event, Warned):
            warned.append(event.message)
        else:
            yield event
            continue
        texts = [f"warning: {message}" for message in dict.fromkeys(warned)]
        bar = f'<progress value="{done:.3f}" max="1"></progress> {done:.0%} <strong>{escape(name)}</strong> '
        lines = "".join(f"<div>{escape(text)}</div>" for text in texts)
        drawn = curve_svg(classes, curves) if classes else ""
        output.update(display.HTML(f"<div>{bar}{escape(doing)}{lines}</div>{drawn}"))
        yield event


def _position(event: Progress) -> str:
    stage = "base" if event.stage == 0 else f"stage {event.stage} of {event.stages - 1}"
    return f"{stage}, {event.phase}" + (f", epoch {event.epoch}/{event.epochs}" if event.epochs else "")
