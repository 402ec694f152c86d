"""`engram reproduce`: the paper's tables and figures, our numbers next to the published ones, and what is missing."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram.cli.commands.run_common import (
    DRY_RUN,
    check_last_stage,
    check_running,
    choose_gpus,
    read_images,
    use_threads,
)
from engram.cli.commands.several import train_all
from engram.cli.options.overrides import images_at, split_seeds, split_values
from engram.cli.options.runs import Reproduce
from engram.cli.streams import tell
from engram.cli.text import make_console, make_table, print_line, print_table
from engram.contract import OWN_METHODS
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.core.provenance import processor_name
from engram.data.sources.load import DataConfig
from engram.data.store import ImageStore
from engram.experiment.learner_config import kind_of_device
from engram.experiment.parallel import ON_CPU, ON_CUDA, plan_members
from engram.experiment.run_config import RunConfig
from engram.report.formatting import count_runs, join
from engram.report.html_page import check_page_path
from engram.reproduce.cell_plan import PaperPlan, PaperRequest, make_plan, refuse_edited
from engram.reproduce.cells import (
    FURTHER,
    NOT_RUN,
    WITHIN_POINT,
    WITHIN_STD,
    Measured,
    effect_of,
    headline,
    measure,
    remarks,
)
from engram.reproduce.cost import Cost, costs, this_hardware
from engram.reproduce.paper import MEASURES, Experiment, Paper, load_paper
from engram.reproduce.paper_page import write_page
from engram.reproduce.paper_tables import against_first, caption, grid, legend, lines
from engram.reproduce.records import Record
from engram.reproduce.results_files import SUFFIX, is_ours, merge, read_results
from engram.runs.directory import find_runs

PAGE = "reproduction.html"
COLUMN_GAP = 3  # console columns between two columns of a table
_STYLES = {WITHIN_STD: "green", WITHIN_POINT: "cyan", FURTHER: "yellow", NOT_RUN: "dim"}
RESULTS = Path("results")
NO_RESULTS = "none"  # value of --results: count only the runs in --out


def reproduce_command(options: Reproduce, typed: Sequence[str]) -> int:
    """Run `engram reproduce`."""
    flags = options.running
    check_running(flags, options.at_once)
    if options.dry_run and options.no_run:
        raise EngramError("--dry-run and --no-run exclude each other; give only one of them")
    console, runs = make_console(), typed_path(options.out)
    page = runs / PAGE if options.page is None else typed_path(options.page)
    check_page_path(page)
    paper = load_paper(None if options.paper is None else typed_path(options.paper))
    experiments, asked = paper.find(options.what), _asked(options)

    def plan_now() -> tuple[PaperPlan, CompletedRuns]:
        completed = read_completed(options.results, runs)
        return make_plan(experiments, completed.records, asked), completed

    plan, completed = plan_now()
    if asked.data_path is not None and not any(wanted.config.data.path for wanted in plan.runs.values()):
        raise EngramError("the images of these experiments are part of the package; leave --data out")
    if options.dry_run:
        print_plan(console, plan, costs(plan, completed.records, runs), completed, options)
        return 0

    def show(plan: PaperPlan, completed: CompletedRuns) -> None:
        write_page(page, paper, plan)
        if not flags.json:
            _print_results(console, paper, plan, completed, page, flags.quiet)

    if options.no_run or not plan.left:
        if flags.json:
            print_line(console, json.dumps(cells_json(plan)))
        show(plan, completed)
        return 0
    refuse_edited(plan)
    use_threads(flags.threads)
    configs, stores = with_images(plan, lambda data: read_images(data, console, silent=flags.quiet or flags.json))
    members = plan_members(configs, directory=runs, read=stores.__getitem__)
    check_last_stage(flags, *[member.stages for member in members])
    gpus = choose_gpus(flags, options.device)
    return train_all(members, runs, flags, options.at_once, typed, console, lambda _: show(*plan_now()), gpus)


def with_images(
    plan: PaperPlan, read: Callable[[DataConfig], ImageStore]
) -> tuple[dict[str, RunConfig], dict[DataConfig, ImageStore]]:
    """Return the runs to do whose images are available, and the images; print which data sets are left out.

    If no images are available, the first error is raised.
    """
    stores: dict[DataConfig, ImageStore] = {}
    refused: dict[DataConfig, EngramError] = {}
    for data in dict.fromkeys(wanted.config.data for wanted in plan.left.values()):
        try:
            stores[data] = read(data)
        except EngramError as error:
            refused[data] = error
    if not stores:
        raise next(iter(refused.values()))
    for data, error in refused.items():
        count = sum(wanted.config.data == data for wanted in plan.left.values())
        tell(f"left out {count_runs(count)} of {data.name}: {error}")
    configs = {name: wanted.config for name, wanted in plan.left.items() if wanted.config.data in stores}
    return configs, stores


def _asked(options: Reproduce) -> PaperRequest:
    return PaperRequest(
        rows=split_values("--rows", options.rows) or None,
        columns=split_values("--columns", options.columns) or None,
        orders=split_values("--orders", options.orders) or None,
        seeds=split_seeds(options.seeds),
        data_path=None if options.data is None else images_at(options.data),
        device=None if options.device is None else kind_of_device(options.device),
        precision=None if options.precision == "auto" else options.precision,
    )


def _print_results(
    console: Console, paper: Paper, plan: PaperPlan, completed: CompletedRuns, page: Path, quiet: bool
) -> None:
    """Print each table, where the runs come from, and where the page is."""
    cells = {id(experiment): [measure(cell) for cell in plan.of(experiment)] for experiment in plan.experiments}
    if not quiet:
        for experiment in plan.experiments:
            for table in results_tables(experiment, cells[id(experiment)], console.width):
                console.print(table)
            for text in filter(None, (experiment.note, *remarks(paper, cells[id(experiment)]))):
                console.print(text, style="dim")
        console.print(legend(cell for group in cells.values() for cell in group), style="dim")
    for text in filter(None, (missing_line(plan), origin_line(plan, completed))):
        print_line(console, text)
    print_line(console, headline([cell for group in cells.values() for cell in group]))
    print_line(console, str(page))


def results_tables(experiment: Experiment, cells: Sequence[Measured], width: int) -> list[Table]:
    """Return the experiment's table: in each cell our number, the paper's, and the difference with its mark.

    If it is wider than the console, its columns are split into several tables, each with all rows.
    """
    found = grid(experiment, cells)
    _, firsts = found[0]
    rows = [(label, [_cell(*pair) for pair in zip(row, firsts, strict=True)]) for label, row in found]
    labels = [column.label for column in experiment.columns]
    widths = [
        max(len(label), *(len(line) for _, row in rows for line in row[i].plain.splitlines())) + COLUMN_GAP
        for i, label in enumerate(labels)
    ]
    available = width - max(len(label) for label, _ in rows) - COLUMN_GAP
    groups: list[list[int]] = [[]]
    for i, needed in enumerate(widths):
        if groups[-1] and sum(widths[j] for j in groups[-1]) + needed > available:
            groups.append([])
        groups[-1].append(i)
    tables: list[Table] = []
    for number, group in enumerate(groups):
        names = [labels[i] for i in group]
        title = f"{caption(experiment)} ({MEASURES[experiment.measure]})" if number == 0 else None
        table = make_table(["", *names], right=["", *names], title=title)
        table.columns[0].justify = "left"
        for label, row in rows:
            table.add_row(label, *(row[i] for i in group))
            table.add_section()
        tables.append(table)
    return tables


def _cell(measured: Measured, first: Measured) -> Text:
    texts = [*lines(measured), *filter(None, [against_first(measured, first)])]
    if measured.ours is None:
        texts[0] = measured.why
    return Text("\n".join(texts), style=_STYLES.get(measured.mark, ""))


def cells_json(plan: PaperPlan) -> list[dict[str, Any]]:
    """Return every cell as plain data: our numbers and the paper's, unrounded, or None."""
    found: list[dict[str, Any]] = []
    for cell in plan.cells:
        measured = measure(cell)
        first = next(other for other in plan.of(cell.experiment) if other.column is cell.column)
        found.append(
            {
                "experiment": cell.experiment.name,
                "row": cell.row.label,
                "column": cell.column.label,
                "measure": cell.experiment.measure,
                "predictor": cell.predictor,
                "published": _numbers(cell.published, "mean", "std"),
                "ours": _numbers(measured.ours, "mean", "std", "n"),
                "difference": measured.difference,
                "effect": _numbers(effect_of(cell, first), "mean", "std", "n"),
                "mark": measured.mark,
                "why": measured.why or None,
            }
        )
    return found


def _numbers(value: object, *names: str) -> dict[str, Any] | None:
    return None if value is None else {name: getattr(value, name) for name in names}


@dataclass(frozen=True)
class CompletedRuns:
    """Every complete run that counts. places: file or directory of each record, by its source. runs: that of --out."""

    records: list[Record]
    places: dict[str, Path]
    runs: Path


def read_completed(results: str | None, runs: Path) -> CompletedRuns:
    """Read the complete runs in the results and in the directory of runs.

    results: the value of --results. None reads the folder "results" if it exists; files in it that are not engram's
    are left out.
    """
    places = [typed_path(results)] if results not in (None, NO_RESULTS) else []
    for file in sorted(RESULTS.glob(f"*{SUFFIX}")) if results is None else ():
        if is_ours(file):
            places.append(file)
        else:
            tell(f"left out {file}: it has no results of engram (--results names others)")
    if runs.is_dir() and find_runs(runs):
        places.append(runs)
    found = [(record, place) for place in places for record in read_results([place]).records]
    places_by_source = {record.source: place for record, place in found}
    return CompletedRuns(merge(record for record, _ in found), places_by_source, runs)


def origins(plan: PaperPlan, completed: CompletedRuns) -> dict[Path, int]:
    """Count the finished runs by the place that they come from."""
    done = {
        wanted.name: completed.places[record.source]
        for cell in plan.cells
        for wanted, record in zip(cell.wanted, cell.found, strict=True)
        if record is not None and wanted.name not in plan.left
    }
    return dict(Counter(done.values()))


def origin_line(plan: PaperPlan, completed: CompletedRuns) -> str:
    """Return where the finished runs come from; empty if there are none."""
    counts = origins(plan, completed)
    here = counts.pop(completed.runs, 0)
    if not counts:
        return f"done: {here} in {completed.runs}" if here else ""
    before = f"{sum(counts.values())} measured before ({', '.join(map(str, counts))})"
    return f"done: {before}, {here} in {completed.runs}; --results none counts only the latter"


def print_plan(
    console: Console, plan: PaperPlan, estimates: Sequence[Cost], completed: CompletedRuns, options: Reproduce
) -> None:
    """Print which runs the experiments need, how many are done, and how long the rest would take."""
    here = this_hardware(options.device and kind_of_device(options.device))
    if options.running.json:
        print_line(console, json.dumps(plan_json(plan, estimates, completed, here)))
        return
    table = make_table(["", "cells", "runs", "done", "no recipe yet"], ["cells", "runs", "done", "no recipe yet"])
    for experiment in plan.experiments:
        cells = plan.of(experiment)
        names = {wanted.name for cell in cells for wanted in cell.wanted}
        done = len(names) - len({wanted.name for cell in cells for wanted in cell.left})
        lacking = sum(bool(cell.missing) for cell in cells)
        table.add_row(caption(experiment), str(len(cells)), str(len(names)), str(done), str(lacking) if lacking else "")
    print_table(console, table)
    print_table(console, _runs_table(plan))
    total, left = len(plan.runs), len(plan.left)
    counted = f"{count_runs(total)}, each counted once: {total - left} done, {left} to do"
    at_once = options.at_once or (ON_CPU if here == processor_name() else ON_CUDA)
    texts = [missing_line(plan), counted, _bare_line(plan), origin_line(plan, completed)]
    texts += cost_lines(estimates, here, left, min(at_once, left))
    for text in filter(None, [*texts, DRY_RUN]):
        print_line(console, text)


def _bare_line(plan: PaperPlan) -> str:
    """Return how many of the runs to do count as done in other tables; empty if none does."""
    cells = [cell for cell in plan.cells if cell.bare]
    if not cells:
        return ""
    names = {wanted.name for cell in cells for wanted in cell.bare}
    shown = join(dict.fromkeys(cell.experiment.heading for cell in cells))
    return f"{len(names)} of those to do were run before without saving the importance that {shown} shows"


def _runs_table(plan: PaperPlan) -> Table:
    """Return the number of runs, of finished runs, and the experiments that need them, by recipe and its changes."""
    table = make_table(["recipe", "runs", "done", "for"], ["runs", "done"])
    users: dict[str, dict[str, None]] = {}
    names: dict[str, list[str]] = {}
    for cell in plan.cells:
        for wanted in cell.wanted:
            label = wanted.config.recipe + ("" if wanted.config.precision == "auto" else f" {wanted.config.precision}")
            users.setdefault(label, {})[cell.experiment.heading] = None
            names.setdefault(label, []).append(wanted.name)
    for label, each in names.items():
        unique = set(each)
        table.add_row(label, str(len(unique)), str(len(unique - set(plan.left))), ", ".join(users[label]))
    return table


def cost_lines(estimates: Sequence[Cost], here: str, left: int, at_once: int) -> list[str]:
    """Return how long the runs to do would take on each hardware that was measured, this one first.

    at_once: how many this command would do at a time here.
    """
    if not left:
        return []
    ordered = sorted(estimates, key=lambda cost: cost.hardware != here)
    lines: list[str] = []
    if not any(cost.hardware == here for cost in estimates):
        lines.append(f"{here} (here): no measurement of such runs on this hardware")
    for cost in ordered:
        name = f"{cost.hardware}{' (here)' if cost.hardware == here else ''}"
        lacking = [f"{count} run{'s' if count > 1 else ''} {why}" for why, count in cost.uncounted.items()]
        if cost.seconds is None:
            lines.append(f"{name}: no estimate of {', '.join(lacking)}")
            continue
        together = "one at a time" if cost.at_once == 1 else f"up to {cost.at_once} side by side"
        text = f"{name}: about {_minutes(cost.seconds)}, "
        text += f"from {cost.measured} measured run{'s' if cost.measured > 1 else ''}, {together}"
        if cost.hardware == here and at_once != cost.at_once:
            text += f" (this command would do {at_once} at a time: --at-once)"
        text += "".join(f"; without {runs}" for runs in lacking)
        if cost.unmeasured:
            text += f"; not measured there and assumed to cost the same: {', '.join(cost.unmeasured)}"
        lines.append(text)
    return lines


def _minutes(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes} min ({minutes / 60:.1f} h)"


def missing_line(plan: PaperPlan) -> str:
    """Return the beginnings of the recipes that the plan needs and that do not exist; empty if all exist."""
    missing = list(dict.fromkeys(re.sub(r"-b\d+-s\d+$", "", cell.missing) for cell in plan.cells if cell.missing))
    return f"no recipe yet: {', '.join(missing)} {OWN_METHODS}" if missing else ""


def plan_json(plan: PaperPlan, estimates: Sequence[Cost], completed: CompletedRuns, here: str) -> dict[str, Any]:
    """Return the plan as plain data."""
    return {
        "runs": [
            {"run": name, "recipe": wanted.config.recipe, "order": wanted.config.order, "seed": wanted.config.seed}
            | {"done": name not in plan.left}
            for name, wanted in plan.runs.items()
        ],
        "done": len(plan.runs) - len(plan.left),
        "done_in": {str(place): count for place, count in origins(plan, completed).items()},
        "left": len(plan.left),
        "no_recipe": list(dict.fromkeys(cell.missing for cell in plan.cells if cell.missing)),
        "hardware": here,
        "minutes": {cost.hardware: cost.seconds / 60 for cost in estimates if cost.seconds is not None},
    }
