"""Shared by the commands that train: checks of flags, reading images, where a run goes, following it, how it ended."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from engram.cli.display import follow, make_display
from engram.cli.options.runs import RUNS, RunningFlags
from engram.cli.signals import Interrupt
from engram.cli.streams import tell
from engram.cli.text import bar, end_line, is_live, print_line, print_table, summary_line, summary_table
from engram.core.errors import EngramError
from engram.core.events import Event, RunFinished, Stopped
from engram.core.io import writing
from engram.core.plugins import VARIABLE
from engram.core.processes import leave_processes
from engram.core.torchrun import is_launched, launched_rank
from engram.data.sources.load import FOLDERS, DataConfig, load_store
from engram.data.store import ImageStore
from engram.experiment.base_cache import StageCache, user_cache
from engram.experiment.learner_config import kind_of_device
from engram.experiment.run_config import RunConfig
from engram.runs.directory import CHECKPOINT, ERROR, MANIFEST, RESULT, free_directory, is_running, is_used
from engram.runs.reader import MAX_THREADS, read_manifest, read_result
from engram.track import Tracking

DRY_RUN = "this was a dry run: nothing was written"
REPORT = "report.html"  # the last file that a demo writes
NO_STAGE = "no stage finished"


def check_running(flags: RunningFlags, at_once: int | None = None) -> None:
    """Refuse impossible values before anything is read."""
    if flags.quiet and flags.json:
        raise EngramError("--quiet and --json exclude each other; give only one of them")
    if flags.stop_after_stage is not None and flags.stop_after_stage < 0:
        raise EngramError(f"--stop-after-stage must be 0 (the base) or more, got {flags.stop_after_stage}")
    if flags.checkpoint_minutes < 0:
        raise EngramError(f"--checkpoint-minutes must be 0 or more, got {flags.checkpoint_minutes:g}")
    check_threads(flags.threads)
    Tracking(flags.track)  # refuses what cannot be meant
    if at_once is not None and at_once < 1:
        raise EngramError(f"--at-once must be at least 1, got {at_once}")


def check_last_stage(flags: RunningFlags, *stages: int) -> None:
    """Refuse to stop after a stage that no run has. stages: the number of stages of each run, base included."""
    asked, most = flags.stop_after_stage, max(stages, default=0)
    if asked is not None and asked >= most > 0:
        which = "the run" if len(stages) == 1 else "the longest of the runs"
        raise EngramError(
            f"--stop-after-stage {asked} is beyond the last stage: {which} has {most} stages, 0 (the base) to "
            f"{most - 1}; give one of these, or leave it out"
        )


def check_threads(threads: int | None) -> None:
    """Refuse less than one thread, and numbers at which OpenMP ends the program without a message."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise EngramError(f"--threads must be at least 1 and at most {MAX_THREADS}, got {threads}")


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads of torch, if a number is given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def choose_gpus(flags: RunningFlags, device: str | None = None) -> tuple[int, ...]:
    """Return the GPUs that --devices or --device cuda:N names; none if they name none."""
    given, name = flags.devices, "--devices"
    if device is not None and device != kind_of_device(device):
        if given is not None:
            raise EngramError(f"--device {device} and --devices {given} exclude each other; give only one of them")
        given, name = device.partition(":")[2], "--device cuda:N"
    if given is None:
        return ()
    numbers = [each.strip() for each in given.split(",")]
    if not all(each.isdecimal() for each in numbers) or len(set(numbers)) < len(numbers):
        raise EngramError(f"{name} takes numbers of GPUs, each once, such as 0,1; got {given!r:.60}")
    if device == "cpu":
        raise EngramError(f"--devices {given} are GPUs, and --device cpu uses none; give only one of them")
    if is_launched():
        raise EngramError(f"torchrun gives each process its GPU; leave out {name} (CUDA_VISIBLE_DEVICES limits them)")
    import torch

    count = torch.cuda.device_count()
    if wrong := [each for each in numbers if int(each) >= count]:
        here = f"this machine has {count}, numbered from 0" if count else "no CUDA device is available here"
        raise EngramError(f"there is no GPU {wrong[0]}: {here}")
    return tuple(map(int, numbers))


def use_one_gpu(gpus: Sequence[int]) -> None:
    """Make the GPU that was chosen the one of this process, for a single run."""
    if len(gpus) > 1:
        raise EngramError(
            f"one run uses one GPU, got {len(gpus)}; 'torchrun --nproc-per-node {len(gpus)} -m engram run ...' shares "
            "a run among several (docs/scale.md)"
        )
    if gpus:
        import torch

        torch.cuda.set_device(gpus[0])


def command_line(typed: Sequence[str], configs: Iterable[RunConfig]) -> str:
    """Return the typed command, with ENGRAM_METHODS in front if a method or a backbone comes from there."""
    line, given = shlex.join(["engram", *typed]), os.environ.get(VARIABLE, "").strip()
    outside = given and any(config.code_versions() for config in configs)
    return f"{VARIABLE}={shlex.quote(given)} {line}" if outside else line


def shared_stages(flags: RunningFlags) -> StageCache | None:
    """Return the cache of trained base stages, or None with --no-cache."""
    return None if flags.no_cache else user_cache()


def proceeding(flags: RunningFlags, interrupt: Interrupt) -> dict[str, Any]:
    """Return how runs proceed, as arguments of the functions that run them."""
    kept = {name: getattr(flags, name) for name in ("stop_after_stage", "checkpoint_minutes", "images")}
    return {**kept, "stop": interrupt, "cache": shared_stages(flags)}


def refuse_used(path: Path) -> None:
    """Refuse a file or a directory that is not empty, before the images are read."""
    with writing(path):
        used = is_used(path)
    if used:
        how = "is not empty" if path.is_dir() else "is a file"
        hint = f"'engram resume {path}' continues its run, or " if (path / MANIFEST).exists() else ""
        raise EngramError(f"{path} exists and {how}; {hint}choose another directory with --out")


def read_images(data: DataConfig, console: Console, silent: bool) -> ImageStore:
    """Read the images of a run, with a progress bar for a folder on a terminal."""
    if silent or not is_live(console):
        return load_store(data, notice=None if silent else tell)
    if data.name not in FOLDERS:
        with console.status(f"reading {data.name}"):
            return load_store(data)
    with bar(console, "reading images") as progress:
        task = progress.add_task("", total=None)
        return load_store(data, lambda done, total: progress.update(task, completed=done, total=total), tell)


def follow_run(
    events: Iterable[Event], console: Console, interrupt: Interrupt, flags: RunningFlags, place: Path
) -> int:
    """Show a run's events, print how it ended, and return the exit status.

    Of several processes, only the first shows something.
    """
    if launched_rank() > 0:
        return _follow_silently(events, interrupt)
    display = make_display(console, interrupt, quiet=flags.quiet, as_json=flags.json)
    try:
        with interrupt:
            last = follow(Tracking(flags.track).follow(events), display)
    except KeyboardInterrupt:
        saved = (place / CHECKPOINT).parent.is_dir()
        rest = f"'engram resume {place}' continues from the last checkpoint" if saved else "nothing was saved yet"
        raise KeyboardInterrupt(f"quit at once; {rest}") from None
    leave_processes()
    if isinstance(last, RunFinished):
        if not flags.json:
            print_finished(console, last, flags.quiet)
        return 0
    assert isinstance(last, Stopped), f"a run ends finished or stopped, not with {last.name}"
    if not flags.json:
        print_line(console, f"{end_line(last)}; to continue:")
        print_line(console, f"engram resume {shlex.quote(str(last.directory))}", "bold")
    return interrupt.status if interrupt() and last.reason == "interrupted" else 0


def _follow_silently(events: Iterable[Event], interrupt: Interrupt) -> int:
    interrupt.announce, last = False, None
    with interrupt:
        for event in events:
            last = event
    leave_processes()
    is_interrupted = isinstance(last, Stopped) and last.reason == "interrupted"
    return interrupt.status if interrupt() and is_interrupted else 0


def print_finished(console: Console, last: RunFinished, quiet: bool) -> None:
    """Print the result of a run, where its files are and what to do next; with quiet, only one line."""
    if quiet:
        print_line(console, summary_line(last))
        return
    print_table(console, summary_table(last.result))
    print_line(console, f"files in {last.directory}")
    print_line(console, f"next: engram report {shlex.quote(str(last.directory))}")


def run_status(path: Path, total: int, done: int) -> str:
    """Return the state of a run in a few words. total, done: its stages."""
    if done == total:
        return "finished"
    if is_running(path):
        return "running"
    has_failed = (path / ERROR).exists()
    if not done:
        return "failed in the base" if has_failed else NO_STAGE
    return f"{'failed' if has_failed else 'stopped'} after {'the base' if done == 1 else f'stage {done - 1}'}"


def new_directory(name: str, silent: bool) -> Path:
    """Return a free directory of that name under runs/, numbered if needed; print what is in the one before it."""
    place = free_directory(Path(RUNS), name)
    if place.name != name and not silent:
        number = int(place.name.removeprefix(f"{name}-")) - 1
        before = Path(RUNS) / (name if number == 1 else f"{name}-{number}")
        tell(f"{_describe(before)}; this one goes to {place}")
    return place


def _describe(place: Path) -> str:
    """Return what is in a directory, and how to continue a run that is not finished."""
    if any(place.glob(f"*/{MANIFEST}")):
        return f"the demo in {place} {'is finished' if (place / REPORT).exists() else 'was stopped'}"
    try:
        manifest = read_manifest(place)
        finished = len(read_result(place, manifest).stages) if (place / RESULT).exists() else 0
        status = run_status(place, len(manifest.stage_sizes), finished)
    except EngramError:
        return f"there is something in {place} already"
    if status in ("finished", "running"):
        return f"the run in {place} is {status}"
    how = "has not finished a stage" if status == NO_STAGE else status
    return f"the run in {place} {how} ('engram resume {place}' continues it)"
