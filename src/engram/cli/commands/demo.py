"""`engram demo`: compare four ways to learn new classes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engram.cli.commands.run_common import REPORT, check_threads, new_directory, refuse_used, use_threads
from engram.cli.display import follow, make_display
from engram.cli.options.runs import Demo
from engram.cli.signals import Interrupt
from engram.cli.text import bold, make_console, make_table, percent, print_line
from engram.contract.settings import change_training, with_role
from engram.core.errors import EngramError
from engram.core.events import RunFinished
from engram.core.io import typed_path
from engram.data.sources.load import load_store
from engram.experiment.base_cache import StageCache
from engram.experiment.recipes import named_after_changes, recipe
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import run
from engram.methods.defaults import DEMO_METHODS

EPOCHS = 12
# A balanced set fills one or two batches. After ten epochs the newest classes have not recovered from the first steps:
# on held-out images the last two had 6 % instead of 24 % (class order and seed 1).
FINETUNE_EPOCHS = 30
RECIPES = "{method}-mini-b10-s5"
INTRODUCTION = (
    "Ten classes at first, then five stages of two more. Each stage has only the images of its new classes and the "
    "images kept from earlier stages; the test is on all classes seen so far."
)
LEVEL = 0.5  # points; single runs that differ by less are called level


def demo_command(options: Demo, typed: Sequence[str]) -> int:
    """Run `engram demo`."""
    if options.seed < 0:
        raise EngramError(f"the seed must be 0 or more, got {options.seed}")
    check_threads(options.threads)
    use_threads(options.threads)
    place = new_directory("demo", options.quiet) if options.out is None else typed_path(options.out)
    refuse_used(place)
    console = make_console()
    if not options.quiet:
        console.print(INTRODUCTION)
    results = _run_all(options, place, console, shlex.join(["engram", *typed]))
    if isinstance(results, int):
        return results
    console.print(comparison(results))
    console.print(verdict(results))
    from engram.report.page import write_report  # matplotlib takes a second to import

    path = write_report([place / method for method in results], place / REPORT)
    print_line(console, f"report: {path}")
    return 0


def _run_all(options: Demo, place: Path, console: Console, command: str) -> dict[str, dict[str, Any]] | int:
    """Return the result of each method, or the exit status if a run was interrupted."""
    store = load_store(recipe(RECIPES.format(method=next(iter(DEMO_METHODS)))).data)
    cache = StageCache(place / "base")  # all methods have the same base stage
    results: dict[str, dict[str, Any]] = {}
    with Interrupt() as interrupt:
        for number, (method, explanation) in enumerate(DEMO_METHODS.items(), start=1):
            config = demo_config(method, options.seed)
            if not options.quiet:
                console.print()
                explained = explanation.format(kept=config.memory.size)
                console.print(f"{number} of {len(DEMO_METHODS)}  {method}: {explained}", style="bold")
            display = make_display(console, interrupt, quiet=options.quiet)
            events = run(config, store, place / method, stop=interrupt, cache=cache, command=command)
            last = follow(events, display)
            if not isinstance(last, RunFinished):
                again = f" --seed {options.seed}" if options.seed != 1 else ""
                print_line(console, f"interrupted; the runs so far are in {place}. To start again:")
                print_line(console, f"engram demo{again}", "bold")
                return interrupt.status
            results[method] = last.result
    return results


def demo_config(method: str, seed: int) -> RunConfig:
    """Return the recipe with fewer epochs, so that four runs take a few minutes on two cores; its name says so."""
    original = recipe(RECIPES.format(method=method))
    (training,) = with_role(original.settings, "main").values()
    settings = change_training(original.settings, ("main",), epochs=min(EPOCHS, training.epochs))
    if original.memory.budget != "none":
        settings = change_training(settings, ("finetune",), epochs=FINETUNE_EPOCHS)
    config = replace(original, settings=settings, seed=seed, order=str(seed))
    return named_after_changes(original, config)


def comparison(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the accuracy of each method's classifier after each stage, the best in bold."""
    columns = [f"{method} %" for method in results]
    table = make_table(["stage", "classes", *columns], right=["stage", "classes", *columns])
    stages = [result["stages"] for result in results.values()]
    for rows in zip(*stages, strict=True):
        name = "base" if rows[0]["stage"] == 0 else str(rows[0]["stage"])
        table.add_row(name, str(rows[0]["classes"]), *_best_in_bold([row["accuracy"]["cnn"] for row in rows]))
    averages = [result["average_incremental_accuracy"]["cnn"] for result in results.values()]
    table.add_section()
    table.add_row("average", "", *_best_in_bold(averages))
    return table


def _best_in_bold(values: Sequence[float]) -> list[Any]:
    best = max(values)
    return [bold(percent(value)) if value == best else percent(value) for value in values]


def verdict(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a conclusion that claims no more than the numbers of these runs show."""
    average = {method: result["average_incremental_accuracy"]["cnn"] for method, result in results.items()}
    final = [f"{method} {percent(result['final_accuracy']['cnn'])}" for method, result in results.items()]
    *_, other, best = results
    gap = round(average[best], 1) - round(average[other], 1)  # as a reader of the table would subtract
    compared = f"{best} is {abs(gap):.1f} points {'ahead of' if gap > 0 else 'behind'} {other}"
    if abs(gap) < LEVEL:
        compared = f"{best} and {other} are level"
    return (
        f"Averaged over the stages {compared} ({percent(average[best])} and {percent(average[other])}). "
        f"After the last stage: {', '.join(final)}. This is one seed; other seeds give somewhat different numbers."
    )
