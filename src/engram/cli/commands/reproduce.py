"""`engram reproduce`: the paper's tables and figures, our numbers next to the published ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram.cli.commands.run_common import check_last_stage, check_running, read_images, use_threads
from engram.cli.commands.several import train_all
from engram.cli.options.overrides import images_at, split_seeds, split_values
from engram.cli.options.runs import Reproduce
from engram.cli.paper_plan import CompletedRuns, missing_line, origin_line, print_plan, read_completed
from engram.cli.text import make_console, make_table, print_line
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.data.sources.load import DataConfig
from engram.data.store import ImageStore
from engram.experiment.parallel import plan_members
from engram.experiment.run_config import RunConfig
from engram.report.formatting import count_runs
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
from engram.reproduce.cost import costs
from engram.reproduce.paper import MEASURES, Experiment, Paper, load_paper
from engram.reproduce.paper_page import write_page
from engram.reproduce.paper_tables import against_first, caption, grid, legend, lines

PAGE = "reproduction.html"
COLUMN_GAP = 3  # console columns between two columns of a table
_STYLES = {WITHIN_STD: "green", WITHIN_POINT: "cyan", FURTHER: "yellow", NOT_RUN: "dim"}


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
    return train_all(members, runs, flags, options.at_once, typed, console, lambda _: show(*plan_now()))


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
        print(f"engram: left out {count_runs(count)} of {data.name}: {error}", file=sys.stderr)
    configs = {name: wanted.config for name, wanted in plan.left.items() if wanted.config.data in stores}
    return configs, stores


def _asked(options: Reproduce) -> PaperRequest:
    return PaperRequest(
        rows=split_values("--rows", options.rows) or None,
        columns=split_values("--columns", options.columns) or None,
        orders=split_values("--orders", options.orders) or None,
        seeds=split_seeds(options.seeds),
        data_path=None if options.data is None else images_at(options.data),
        device=options.device,
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
