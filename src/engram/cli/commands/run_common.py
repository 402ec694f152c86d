"""What the commands that train have in common: reading the images, following the run, saying how it ended."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engram.cli.display import follow, make_display
from engram.cli.options.runs import RunningFlags
from engram.cli.plugins import VARIABLE
from engram.cli.signals import Interrupt
from engram.cli.text import bold, is_live, print_line, print_table, stage_name, summary_line, summary_table
from engram.core.errors import EngramError
from engram.core.events import Event, RunFinished, Stopped
from engram.core.io import writing
from engram.data.sources.load import FOLDERS, DataConfig, load_store
from engram.data.store import ImageStore
from engram.experiment.base_cache import StageCache, user_cache
from engram.methods import find_method
from engram.runs.directory import MANIFEST, is_used

THREADS_MOST = 1024


def check_running(flags: RunningFlags) -> None:
    """Refuses values that make no sense, before anything is read."""
    if flags.quiet and flags.json:
        raise EngramError("--quiet and --json exclude each other; give one of them")
    if flags.stop_after_stage is not None and flags.stop_after_stage < 0:
        raise EngramError(f"--stop-after-stage must be 0 (the base) or more, got {flags.stop_after_stage}")
    if flags.checkpoint_minutes < 0:
        raise EngramError(f"--checkpoint-minutes must be 0 or more, got {flags.checkpoint_minutes:g}")
    check_threads(flags.threads)


def check_last_stage(flags: RunningFlags, *stages: int) -> None:
    """Refuses to stop after a stage that none of the runs has; stages: how many each has, with the base."""
    asked, most = flags.stop_after_stage, max(stages, default=0)
    if asked is not None and asked >= most > 0:
        whose = "the run has" if len(stages) == 1 else "the longest of the runs has"
        raise EngramError(
            f"--stop-after-stage {asked} is beyond the last stage: {whose} {most} stages, 0 (the base) to {most - 1}; "
            "give one of these, or leave it out"
        )


def check_threads(threads: int | None) -> None:
    """Refuses less than one, and more than a system gives a program: OpenMP ends it without a word then."""
    if threads is not None and not 1 <= threads <= THREADS_MOST:
        raise EngramError(f"--threads must be at least 1 and at most {THREADS_MOST}, got {threads}")


def use_threads(threads: int | None) -> None:
    """Limits the CPU threads of torch, where a number is given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def command_line(typed: Sequence[str], methods: Iterable[str]) -> str:
    """What was typed, with ENGRAM_METHODS before it where that is how one of the methods came."""
    line, given = shlex.join(["engram", *typed]), os.environ.get(VARIABLE, "").strip()
    outside = given and any(find_method(name).versions for name in methods)
    return f"{VARIABLE}={shlex.quote(given)} {line}" if outside else line


def shared_stages(flags: RunningFlags) -> StageCache | None:
    """The cache of trained base stages, unless it is not wanted."""
    return None if flags.no_cache else user_cache()


def refuse_used(path: Path) -> None:
    """Refuses a directory that holds something, or a file, before the images are read rather than after."""
    with writing(path):
        used = is_used(path)
    if used:
        how = "is not empty" if path.is_dir() else "is a file"
        hint = f"'engram resume {path}' goes on with it, or " if (path / MANIFEST).exists() else ""
        raise EngramError(f"{path} exists and {how}; {hint}choose another directory with --out")


def read_images(data: DataConfig, console: Console, silent: bool) -> ImageStore:
    """The images of a run; a folder is read with a progress bar where there is a terminal."""
    if silent or not is_live(console):
        return load_store(data)
    if data.name not in FOLDERS:
        with console.status(f"reading {data.name}"):
            return load_store(data)
    columns = (TextColumn("reading images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        return load_store(data, lambda done, total: progress.update(task, completed=done, total=total))


def tell_missing(data: DataConfig) -> None:
    """Says on stderr that a plan was made without the images."""
    print(f"engram: {data.name} is not here yet; 'engram prepare {data.name}' fetches it", file=sys.stderr)


def carry_out(events: Iterable[Event], console: Console, interrupt: Interrupt, flags: RunningFlags, place: Path) -> int:
    """The exit status of a run whose events are followed to the end; says how it ended."""
    display = make_display(console, interrupt, quiet=flags.quiet, as_json=flags.json)
    try:
        with interrupt:
            last = follow(events, display)
    except KeyboardInterrupt:
        saved = (place / "checkpoint").is_dir()
        rest = f"'engram resume {place}' goes on from the last checkpoint" if saved else "nothing was saved yet"
        raise KeyboardInterrupt(f"quit at once; {rest}") from None
    if isinstance(last, RunFinished):
        if not flags.json:
            tell_finished(console, last, flags.quiet)
        return 0
    assert isinstance(last, Stopped), f"a run ends finished or stopped, not with {last.name}"
    if not flags.json:
        tell_stopped(console, last)
    return interrupt.status if interrupt() and last.reason == "interrupted" else 0


def tell_finished(console: Console, last: RunFinished, quiet: bool) -> None:
    """Prints what a run came to: a table, where its files are and what to do with them, or one line."""
    if quiet:
        print_line(console, summary_line(last.result, last.directory))
        return
    print_table(console, summary_table(last.result))
    print_line(console, f"files in {last.directory}")
    print_line(console, f"next: engram report {shlex.quote(str(last.directory))}")


def tell_stopped(console: Console, last: Stopped) -> None:
    """Prints where a run stopped and how to go on."""
    where = stage_name(last.stage, last.stages)
    how = "saved, interrupted in" if last.reason == "interrupted" else "stopped after"
    print_line(console, f"{how} {where}; to go on:")
    console.print(bold(f"engram resume {shlex.quote(str(last.directory))}"), soft_wrap=True)
