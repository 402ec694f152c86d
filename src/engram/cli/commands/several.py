"""`engram run` with several runs: plan them, train them side by side, and print what is left to do."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from engram.cli.commands.run_common import (
    DRY_RUN,
    check_last_stage,
    command_line,
    proceeding,
    read_images,
    shared_stages,
    use_threads,
)
from engram.cli.display import make_display
from engram.cli.main import ELSEWHERE, INTERRUPTED
from engram.cli.options.runs import RUNS, Run, RunningFlags
from engram.cli.result_tables import EndedRuns, print_results
from engram.cli.run_progress import RunsProgress
from engram.cli.signals import Interrupt
from engram.cli.streams import printable, tell
from engram.cli.text import make_console, make_table, print_line, print_table
from engram.core.errors import EngramError, details_note
from engram.core.events import RunBusy, RunFailed, Stopped
from engram.core.io import typed_path
from engram.core.torchrun import is_launched
from engram.data.sources.load import DataConfig, outline_store
from engram.data.store import ImageStore
from engram.experiment.base_cache import StageCache
from engram.experiment.parallel import Member, Workers, plan_members
from engram.experiment.run_config import RunConfig, directory_name
from engram.report.formatting import count_runs
from engram.runs.directory import ERROR
from engram.track import Tracking

STOP = "--stop-after-stage"


def run_several(options: Run, configs: Sequence[RunConfig], typed: Sequence[str], gpus: Sequence[int]) -> int:
    """Run `engram run` with several runs. gpus: see `Workers`."""
    flags, console = options.running, make_console()
    if is_launched():
        raise EngramError(
            "torchrun starts several processes for one run, but this command names several runs; start it without "
            "torchrun, or name one run"
        )
    parent = typed_path(options.out or RUNS)
    silent = flags.quiet or flags.json
    use_threads(flags.threads)
    members, missing = plan_runs(options, configs, console, outlined=options.dry_run)
    check_last_stage(flags, *[member.stages for member in members])
    _warn_of_other_code(members)
    if options.dry_run:
        _print_plan(console, members, shared_stages(flags), flags.json)
        for text in missing:
            tell(text)
        return 0

    def report(last: EndedRuns) -> None:
        if not silent:
            in_order = {member.name: last[member.name] for member in members if member.name in last}
            print_results(console, in_order, parent)

    return train_all(members, parent, flags, options.at_once, typed, console, report, gpus)


def plan_runs(
    options: Run, configs: Sequence[RunConfig], console: Console, outlined: bool
) -> tuple[list[Member], list[str]]:
    """Return the runs, and a sentence for each data set that is not decoded yet.

    outlined: such a data set is not decoded; blank images stand for its own.
    """
    flags, parent = options.running, typed_path(options.out or RUNS)
    missing: list[str] = []

    def read(data: DataConfig) -> ImageStore:
        outline = outline_store(data) if outlined else None
        if outline is None:
            return read_images(data, console, silent=flags.quiet or flags.json)
        if any((parent / directory_name(config)).exists() for config in configs if config.data == data):
            raise EngramError(f"the runs in {parent} cannot be compared with their images: {outline[1]}")
        missing.append(outline[1])
        return outline[0]

    return plan_members(configs, directory=parent, read=read), missing


def train_all(
    members: Sequence[Member],
    parent: Path,
    flags: RunningFlags,
    at_once: int | None,
    typed: Sequence[str],
    console: Console,
    report: Callable[[EndedRuns], None],
    gpus: Sequence[int] = (),
) -> int:
    """Train the runs, call `report` with their last events, print failures and what is left, return the exit status."""
    if flags.threads is None:
        use_threads(_threads_begun_with(members))
    configs = [member.config for member in members]
    command = command_line(typed, configs)
    interrupt, cache = Interrupt(), shared_stages(flags)
    workers = Workers(members, at_once=at_once, command=command, gpus=gpus, **proceeding(flags, interrupt))
    if not flags.quiet and not flags.json:
        spread = f" on {len(gpus)} GPUs" if len(gpus) > 1 else ""
        print_line(console, f"{count_runs(len(members))}, at most {workers.at_once} at a time{spread}, in {parent}")
    progress = RunsProgress(members, None if cache is None else {entry.key for entry in cache.entries()})
    display = make_display(console, interrupt, quiet=flags.quiet, as_json=flags.json, progress=progress)
    last: EndedRuns = {}
    events = Tracking(flags.track).follow_together(workers.events())
    try:
        with interrupt, display:
            for run, event in events:
                last[run] = event
                display.show(event, run)
    except KeyboardInterrupt:
        _quit_at_once()
    finally:
        events.close()  # the runs save themselves, whatever failed here
    report(last)
    print_failures(last, len(members))
    if not flags.json:
        how = "the same command again"
        if flags.stop_after_stage is not None and not interrupt():
            how += f" without {STOP}"
            command = command_line(without_flag(typed, STOP), configs)
        _print_unfinished(console, members, last, f"{how}:", command)
    return exit_status(last, len(members), interrupt)


def without_flag(typed: Sequence[str], flag: str) -> list[str]:
    """Return the typed arguments without a flag and its value."""
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != flag:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def _threads_begun_with(members: Sequence[Member]) -> int | None:
    """Return the CPU threads that incomplete runs began with: with another number the last bits of sums differ."""
    unfinished = [member for member in members if member.progress.state == "incomplete"]
    found = {member.progress.threads for member in unfinished if member.config.device == "cpu"} - {None}
    if len(found) > 1:
        tell(
            "the runs to continue began with different numbers of CPU threads; "
            "the last bits of some will differ from a run that was never stopped"
        )
    return found.pop() if len(found) == 1 else None


def _warn_of_other_code(members: Sequence[Member]) -> None:
    """Print on stderr which finished runs were made with other code of their method; they are not run again."""
    other = [member.name for member in members if member.has_other_code]
    if other:
        what = "1 run is" if len(other) == 1 else f"{len(other)} runs are"
        tell(
            f"{what} done already, but not recorded with the present code of the method; the table and reports "
            f"list different code separately, and another --out runs everything again: {', '.join(other)}"
        )


def _quit_at_once() -> NoReturn:
    """End the process whatever its threads are doing: shutting the interpreter down under torch may crash."""
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, b"engram: quit at once; the same command again continues from the last checkpoints\n")
    os._exit(INTERRUPTED)


def exit_status(last: EndedRuns, count: int, interrupt: Interrupt) -> int:
    """Return the exit status of several runs.

    The signal's if a run was interrupted, 1 after an unexpected error, 2 after another, 4 if another process is doing a
    run, or else 0.
    """
    cut = any(isinstance(event, Stopped) and event.reason == "interrupted" for event in last.values())
    if interrupt() and (cut or len(last) < count):
        return interrupt.status
    failed = [event for event in last.values() if isinstance(event, RunFailed)]
    if failed:
        return 1 if any(event.unexpected for event in failed) else 2
    return ELSEWHERE if any(isinstance(event, RunBusy) for event in last.values()) else 0


def print_failures(last: EndedRuns, count: int) -> None:
    """Print on stderr which runs failed and why, and which runs another process is doing."""
    busy = [run for run, event in last.items() if isinstance(event, RunBusy)]
    if busy:
        tell(
            f"another process is doing {len(busy)} of the {count} runs; "
            f"when it has ended, the same command shows all results: {', '.join(busy)}"
        )
    failed = {run: event for run, event in last.items() if isinstance(event, RunFailed)}
    if failed:
        tell(f"{len(failed)} of {count} runs failed")
    for run, event in failed.items():
        kept = Path(event.directory or "") / ERROR
        where = f"; {details_note(kept)}" if event.unexpected and kept.exists() else ""
        tell(f"{run}: {event.message}{where}")
        if event.traceback is not None and not where:
            sys.stderr.write(printable(event.traceback, keep="\n").rstrip() + "\n")


def _print_unfinished(console: Console, members: Sequence[Member], last: EndedRuns, how: str, command: str) -> None:
    """Print how many runs are not complete without having failed, and how to continue them."""
    stopped = sum(isinstance(event, Stopped) for event in last.values())
    waiting = len(members) - len(last)
    if stopped or waiting:
        parts = [f"{stopped} stopped and saved"] if stopped else []
        parts += [f"{waiting} not begun"] if waiting else []
        print_line(console, f"{', '.join(parts)}; to continue, {how}")
        print_line(console, command, "bold")


def _print_plan(console: Console, members: Sequence[Member], cache: StageCache | None, as_json: bool) -> None:
    """Print the runs, the progress of each, what is left to do, and which base stages are shared."""
    rows = [_plan_row(member) for member in members]
    shared = _shared_bases(members, cache)
    steps = sum(member.steps for member in members)
    if as_json:
        print_line(console, json.dumps({"runs": rows, "shared_bases": shared, "total_steps": steps}))
        return
    table = make_table(["directory", "state", "steps left"], right=["steps left"])
    for row in rows:
        table.add_row(row["directory"], row["state"], f"{row['steps']:,}")
    print_table(console, table)
    for base in shared:
        how = "is in the cache already, for" if base["cached"] else "is trained once for"
        print_line(console, f"one base stage {how} {count_runs(len(base['runs']))}: {', '.join(base['runs'])}")
    counts = Counter(member.progress.state for member in members)
    parts = ", ".join(f"{counts[state]} {state}" for state in ("done", "incomplete", "new") if counts[state])
    total = f"{count_runs(len(members))} ({parts}), {steps:,} steps left, not counting what shared base stages save"
    for line in (total, DRY_RUN):
        print_line(console, line)


def _plan_row(member: Member) -> dict[str, Any]:
    progress = member.progress
    state = progress.state
    if state == "incomplete":
        inside = "" if member.doing is None else f" and in {member.doing}"
        state = f"incomplete, {progress.finished} of {member.stages} stages{inside}"
    return {
        "run": member.name,
        "directory": member.place,
        "state": state,
        "stages": member.stages,
        "stages_finished": progress.finished,
        "steps": member.steps,
        "config": member.config.to_plain(),
    }


def _shared_bases(members: Sequence[Member], cache: StageCache | None) -> list[dict[str, Any]]:
    """List the base stages that several runs need or that the cache has, with their runs."""
    if cache is None:
        return []
    cached = {entry.key for entry in cache.entries()}
    groups: dict[str, list[str]] = {}
    for member in members:
        if member.base_key is not None:
            groups.setdefault(member.base_key, []).append(member.name)
    return [
        {"key": key, "runs": names, "cached": key in cached}
        for key, names in groups.items()
        if len(names) > 1 or key in cached
    ]
