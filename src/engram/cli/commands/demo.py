"""`engram demo`: three ways of meeting new classes, side by side."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engram.cli.commands.run_common import check_threads, print_line, refuse_used, use_threads
from engram.cli.commands.run_paths import REPORT, new_directory
from engram.cli.display import follow, make_display
from engram.cli.options.runs import Demo
from engram.cli.signals import Interrupt
from engram.cli.text import bold, make_console, make_table, percent
from engram.core.errors import EngramError
from engram.core.events import RunFinished
from engram.core.io import typed_path
from engram.data.sources.load import load_store
from engram.experiment.base_cache import StageCache
from engram.experiment.recipes import recipe
from engram.experiment.run_config import RunConfig
from engram.experiment.runner import run

EPOCHS = 12
RECIPES = "{method}-mini-b10-s5"
WAYS = {
    "naive": "trains on the new images alone: no memory, no distillation",
    "replay": "keeps {kept} images of each old class and trains on them too",
    "afc": "keeps the same {kept}, and holds on to the features that mattered",
}
INTRODUCTION = (
    "Ten classes at first, then five stages of two more. At each stage only the images of its new classes are there, "
    "and those that were kept; the test is on every class seen so far."
)
LEVEL = 0.5  # points; a smaller difference between single runs is not worth a claim


def demo_command(options: Demo, typed: Sequence[str]) -> int:
    """The exit status of `engram demo`."""
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

    path = write_report([place / method for method in WAYS], place / REPORT)
    print_line(console, f"report: {path}")
    return 0


def _run_all(options: Demo, place: Path, console: Console, command: str) -> dict[str, dict[str, Any]] | int:
    """The result of each way, or the exit status where it was interrupted."""
    store = load_store(recipe(RECIPES.format(method="naive")).data)
    cache = StageCache(place / "base")  # the three have the same base stage
    results: dict[str, dict[str, Any]] = {}
    with Interrupt() as interrupt:
        for number, (method, explanation) in enumerate(WAYS.items(), start=1):
            config = demo_config(method, options.seed)
            if not options.quiet:
                console.print()
                console.print(bold(f"{number} of {len(WAYS)}  {method}: {explanation.format(kept=config.memory.size)}"))
            display = make_display(console, interrupt, quiet=options.quiet)
            events = run(config, store, place / method, stop=interrupt, cache=cache, command=command)
            last = follow(events, display)
            if not isinstance(last, RunFinished):
                again = f" --seed {options.seed}" if options.seed != 1 else ""
                print_line(console, f"interrupted; the runs so far are in {place}. To start again:")
                console.print(bold(f"engram demo{again}"))
                return interrupt.status
            results[method] = last.result
    return results


def demo_config(method: str, seed: int) -> RunConfig:
    """The recipe with a few epochs less, so that three runs take about a minute on two cores; its name says so."""
    config = recipe(RECIPES.format(method=method))
    epochs = min(EPOCHS, config.settings.train.epochs)  # pyright: ignore[reportAttributeAccessIssue]
    name = f"{config.recipe} (train.epochs={epochs})"
    return replace(config.with_settings(train__epochs=epochs), seed=seed, order=str(seed), recipe=name)


def comparison(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """The three runs side by side: accuracy of the classifier after each stage, the best in bold."""
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
    """A verdict that says no more than the numbers of these runs do."""
    average = {method: result["average_incremental_accuracy"]["cnn"] for method, result in results.items()}
    final = {method: result["final_accuracy"]["cnn"] for method, result in results.items()}
    gap = round(average["afc"], 1) - round(average["replay"], 1)  # as the reader would subtract them
    if abs(gap) < LEVEL:
        compared = "AFC and replay are level"
    else:
        compared = f"AFC is {abs(gap):.1f} points {'ahead of' if gap > 0 else 'behind'} replay"
    return (
        f"Averaged over the stages {compared} ({percent(average['afc'])} and {percent(average['replay'])}); "
        f"at the end naive is at {percent(final['naive'])}, replay at {percent(final['replay'])} and AFC at "
        f"{percent(final['afc'])}. This is one seed; others differ somewhat."
    )
