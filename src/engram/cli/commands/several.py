"""`engram run` with several runs: what there is to do, following it, and what it came to."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from engram.cli.commands.run_common import (
    check_last_stage,
    command_line,
    print_line,
    read_images,
    shared_stages,
    tell_missing,
    use_threads,
)
from engram.cli.commands.run_paths import RUNS
from engram.cli.main import INTERRUPTED
from engram.cli.multi_display import make_board
from engram.cli.options.runs import Run, RunningFlags
from engram.cli.run_progress import Tally
from engram.cli.signals import Interrupt
from engram.cli.text import bold, clock, make_console, make_table, percent, print_table
from engram.core.errors import DETAILS, EngramError
from engram.core.events import Event, RunFailed, RunFinished, RunSkipped, Stopped, read_events
from engram.core.io import typed_path
from engram.core.metrics import Estimate, estimate, paired
from engram.data.sources.load import DataConfig, outline_store
from engram.data.store import ImageStore
from engram.experiment.base_cache import StageCache
from engram.experiment.parallel import Member, Workers, plan_members
from engram.experiment.run_config import RunConfig, directory_name
from engram.report.formatting import count_runs
from engram.runs.directory import ERROR, EVENTS, UNKNOWN_CODE
from engram.runs.reader import read_manifest

STOP = "--stop-after-stage"

Last = dict[str, Event]  # the last event of each run that began, by its name


def run_several(options: Run, configs: Sequence[RunConfig], typed: Sequence[str]) -> int:
    """The exit status of `engram run` with several runs."""
    flags, console = options.running, make_console()
    parent = RUNS if options.out is None else typed_path(options.out)
    silent = flags.quiet or flags.json
    use_threads(flags.threads)
    missing: list[DataConfig] = []

    def read(data: DataConfig) -> ImageStore:
        # Where there are runs already, they are compared with the images, which must be there then.
        begun = any((parent / directory_name(config)).exists() for config in configs if config.data == data)
        outline = outline_store(data) if options.dry_run and not begun else None
        missing.extend([] if outline is None else [data])
        return outline or read_images(data, console, silent=silent)

    members = plan_members(configs, directory=parent, read=read)
    check_last_stage(flags, *[member.stages for member in members])
    tell_other_code(members)
    if options.dry_run:
        print_plan(console, members, shared_stages(flags), flags.json)
        for data in missing:
            tell_missing(data)
        return 0

    def tell(last: Last) -> None:
        if not silent:
            tell_results(console, {member.name: last[member.name] for member in members if member.name in last}, parent)

    return work_through(members, parent, flags, options.at_once, typed, console, tell)


def work_through(
    members: Sequence[Member],
    parent: Path,
    flags: RunningFlags,
    at_once: int | None,
    typed: Sequence[str],
    console: Console,
    tell: Callable[[Last], None],
) -> int:
    """The exit status of doing the runs; `tell` says what they came to, this what failed and what is left to do."""
    silent = flags.quiet or flags.json
    if flags.threads is None:
        use_threads(threads_begun_with(members))
    methods = {member.config.method for member in members}
    command = command_line(typed, methods)
    interrupt, cache = Interrupt(), shared_stages(flags)
    workers = Workers(
        members,
        at_once=at_once,
        stop=interrupt,
        stop_after_stage=flags.stop_after_stage,
        checkpoint_minutes=flags.checkpoint_minutes,
        cache=cache,
        command=command,
    )
    if not silent:
        print_line(console, f"{count_runs(len(members))}, at most {workers.at_once} at a time, in {parent}")
    bases = None if cache is None else {entry.key for entry in cache.entries()}
    board = make_board(console, interrupt, Tally(members, bases), quiet=flags.quiet, as_json=flags.json)
    last: Last = {}
    events = workers.events()
    try:
        with interrupt, board:
            for run, event in events:
                last[run] = event
                board.show(run, event)
    except KeyboardInterrupt:
        _quit_at_once()
    finally:
        events.close()  # whatever went wrong here, the runs save themselves
    tell(last)
    tell_failures(last, len(members))
    if not flags.json:
        how = "the same command again"
        if flags.stop_after_stage is not None and not interrupt():
            how += f" without {STOP}"
            command = command_line(without_flag(typed, STOP), methods)
        tell_unfinished(console, members, last, f"{how}:", command)
    return exit_status(last, len(members), interrupt)


def without_flag(typed: Sequence[str], flag: str) -> list[str]:
    """What was typed, less a flag and its value."""
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != flag:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def threads_begun_with(members: Sequence[Member]) -> int | None:
    """The CPU threads that the runs to go on with began with: with another number sums differ in their last bits."""
    unfinished = [member for member in members if member.progress.state == "incomplete"]
    found = {member.progress.threads for member in unfinished if member.config.device == "cpu"} - {None}
    if len(found) > 1:
        print(
            "engram: the runs to go on with began with different numbers of CPU threads; "
            "the last bits of some will differ from a run that was never stopped",
            file=sys.stderr,
        )
    return found.pop() if len(found) == 1 else None


def tell_other_code(members: Sequence[Member]) -> None:
    """Says which runs are done already with other code of their method than it has now, which nothing runs anew."""
    other = [member.name for member in members if member.has_other_code]
    if other:
        what = "run is done already and not" if len(other) == 1 else "runs are done already and not"
        print(
            f"engram: {len(other)} {what} on record with the code that the method has now; the table and reports keep "
            f"what differs in it apart, and another --out runs all of it anew: {', '.join(other)}",
            file=sys.stderr,
        )


def _quit_at_once() -> NoReturn:
    """Ends the process, whatever its threads are doing: an interpreter that goes down under torch may crash."""
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, b"engram: quit at once; the same command again goes on from the last checkpoints\n")
    os._exit(INTERRUPTED)


def exit_status(last: Last, count: int, interrupt: Interrupt) -> int:
    """0 where all went well; the signal's where one cut something off; else 1 for an unexpected error, 2 for others."""
    cut = any(isinstance(event, Stopped) and event.reason == "interrupted" for event in last.values())
    if interrupt() and (cut or len(last) < count):
        return interrupt.status
    failed = [event for event in last.values() if isinstance(event, RunFailed)]
    return 0 if not failed else 1 if any(event.unexpected for event in failed) else 2


def tell_results(console: Console, last: Last, parent: Path) -> None:
    """Prints what the complete runs came to, and what to do with them."""
    complete = [event for event in last.values() if isinstance(event, (RunFinished, RunSkipped))]
    results = results_of(complete)
    if results:
        print_table(console, results_table(results))
        if (differences := differences_table(results)) is not None:
            print_table(console, differences)
        reused = sum(map(_took_over_base, complete))
        if reused:
            print_line(console, f"time: without the base stage in {reused} of {len(results)} runs, which took it over")
        print_line(console, f"next: engram report {shlex.quote(str(parent))}")


def results_of(complete: Sequence[RunFinished | RunSkipped]) -> list[dict[str, Any]]:
    """The results of the runs; of a recipe whose runs have different code of its method, the name says which."""
    kinds = [(event.result["recipe"], _code(event)) for event in complete]
    codes = Counter(recipe for recipe, _ in set(kinds))
    return [
        event.result if codes[recipe] == 1 else {**event.result, "recipe": f"{recipe} [code {code}]"}
        for event, (recipe, code) in zip(complete, kinds, strict=True)
    ]


def _code(event: RunFinished | RunSkipped) -> str:
    """The code of the run's method, as it is on record."""
    with suppress(EngramError):
        return read_manifest(Path(event.directory or "")).method_code or UNKNOWN_CODE
    return UNKNOWN_CODE


def _took_over_base(event: RunFinished | RunSkipped) -> bool:
    """Whether the run's base stage was trained by another, so that its time is not in this one's."""
    with suppress(OSError):
        kinds = (found.get("event") for found in read_events(Path(event.directory or "") / EVENTS))
        return next((kind for kind in kinds if kind in ("base_reused", "stage_finished")), None) == "base_reused"
    return False


def results_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """For each recipe the number of runs, mean and spread of the accuracies in percent, and the time in all."""
    columns = _accuracy_columns(results)
    headings = [f"{heading} %" for heading in columns]
    table = make_table(["recipe", "n", *headings, "time"], right=["n", *headings, "time"])
    table.padding = (0, 1, 0, 0)  # so that two predictors fit into 80 columns
    for recipe, runs in _by_recipe(results).items():
        cells = [estimate([run[key][name] for run in runs if name in run[key]]) for key, name in columns.values()]
        table.add_row(recipe, str(len(runs)), *map(spread, cells), clock(sum(run["seconds"] for run in runs)))
    return table


def differences_table(results: Sequence[Mapping[str, Any]]) -> Table | None:
    """For each recipe its accuracies less the first's, over the n pairs of runs with the same class order and seed.

    Recipes with other data or stages than the first stay out of it. None where no recipe has two pairs.
    """
    (first, base), *others = _by_recipe(results).items()
    columns = _accuracy_columns(base)
    table = make_table([f"less {first}, run by run", "n", *columns], right=["n", *columns])
    table.padding = (0, 1, 0, 0)
    for recipe, runs in others:
        found = [paired(_by_draw(runs, *column), _by_draw(base, *column)) for column in columns.values()]
        pairs = max((value.n for value in found if value is not None), default=0)
        if pairs > 1 and _way(runs[0]) == _way(base[0]):
            table.add_row(recipe, str(pairs), *map(spread, found))
    return table if table.row_count else None


def _accuracy_columns(results: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """The columns of accuracies by their headings: each the name of a metric and a predictor."""
    predictors = list(dict.fromkeys(name for result in results for name in result["final_accuracy"]))
    measures = {"average_incremental_accuracy": "average", "final_accuracy": "final"}
    return {f"{label}\n{name}": (key, name) for key, label in measures.items() for name in predictors}


def _by_recipe(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault(result["recipe"], []).append(result)
    return groups


def _by_draw(runs: Sequence[Mapping[str, Any]], key: str, name: str) -> dict[object, float | None]:
    return {(run["order"], run["seed"]): run[key].get(name) for run in runs}


def _way(run: Mapping[str, Any]) -> object:
    """The images and how they were split into stages."""
    return run["dataset"], [stage["classes"] for stage in run["stages"]]


def spread(value: Estimate | None) -> str:
    """Mean and sample standard deviation, where there are two or more; "-" for none."""
    if value is None:
        return "-"
    return percent(value.mean) if value.std is None else f"{percent(value.mean)} ± {percent(value.std)}"


def tell_failures(last: Last, count: int) -> None:
    """Says on stderr which runs failed and why."""
    failed = {run: event for run, event in last.items() if isinstance(event, RunFailed)}
    if not failed:
        return
    lines = [f"engram: {len(failed)} of {count} runs failed"]
    for run, event in failed.items():
        kept = Path(event.directory or "") / ERROR
        where = f"; {DETAILS}{kept}" if event.unexpected and kept.exists() else ""
        lines.append(f"engram: {run}: {event.message}{where}")
        if event.traceback is not None and not where:
            lines.append(event.traceback.rstrip())
    print("\n".join(lines), file=sys.stderr)


def tell_unfinished(console: Console, members: Sequence[Member], last: Last, how: str, command: str) -> None:
    """Says how many runs are not complete without having failed, and how to go on with them."""
    stopped = sum(isinstance(event, Stopped) for event in last.values())
    waiting = len(members) - len(last)
    if stopped or waiting:
        parts = [f"{stopped} stopped and saved"] if stopped else []
        parts += [f"{waiting} not begun"] if waiting else []
        print_line(console, f"{', '.join(parts)}; to go on, {how}")
        console.print(bold(command), soft_wrap=True)


def print_plan(console: Console, members: Sequence[Member], cache: StageCache | None, as_json: bool) -> None:
    """Prints which runs there are, how far each is, what is left to do, and which base stages are shared."""
    rows = [_plan_row(member) for member in members]
    shared = shared_bases(members, cache)
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
    print_line(
        console, f"{count_runs(len(members))} ({parts}), {steps:,} steps left, before what shared base stages save"
    )
    print_line(console, "this was a dry run: nothing was written")


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


def shared_bases(members: Sequence[Member], cache: StageCache | None) -> list[dict[str, Any]]:
    """The base stages that several of the runs need, or that the cache has: the runs, and whether it has them."""
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
