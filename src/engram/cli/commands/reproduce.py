"""`engram reproduce`: the paper's tables and figures, with ours beside the published numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram.cli.commands.run_common import check_last_stage, check_running, print_line, read_images, use_threads
from engram.cli.commands.several import Last, work_through
from engram.cli.completed_runs import Known, known_records, origin_line
from engram.cli.options.overrides import images_at, listed, listed_seeds
from engram.cli.options.runs import Reproduce
from engram.cli.paper_plan import missing_line, print_plan
from engram.cli.text import make_console, make_table
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.data.sources.load import DataConfig
from engram.data.store import ImageStore
from engram.experiment.parallel import plan_members
from engram.experiment.run_config import RunConfig
from engram.report.formatting import count_runs
from engram.report.html_page import check_page_path
from engram.reproduce.cell_plan import PaperPlan, PaperRequest, make_plan, refuse_edited
from engram.reproduce.cells import FURTHER, NOT_RUN, WITHIN_POINT, WITHIN_STD, Measured, effect_of, measure
from engram.reproduce.cost import costs
from engram.reproduce.paper import MEASURES, Experiment, Paper, load_paper
from engram.reproduce.paper_page import headline, remarks, write_page
from engram.reproduce.paper_tables import against_first, caption, grid, legend, lines

PAGE = "reproduction.html"
GAP = 3  # columns of the console between two of a table
_STYLES = {WITHIN_STD: "green", WITHIN_POINT: "cyan", FURTHER: "yellow", NOT_RUN: "dim"}


def reproduce_command(options: Reproduce, typed: Sequence[str]) -> int:
    """The exit status of `engram reproduce`."""
    flags = options.running
    check_running(flags)
    if options.dry_run and options.no_run:
        raise EngramError("--dry-run and --no-run exclude each other; give one of them")
    if options.at_once is not None and options.at_once < 1:
        raise EngramError(f"--at-once must be at least 1, got {options.at_once}")
    console, runs = make_console(), typed_path(options.out)
    page = runs / PAGE if options.page is None else typed_path(options.page)
    check_page_path(page)
    paper = load_paper(None if options.paper is None else typed_path(options.paper))
    experiments, asked = paper.find(options.what), _asked(options)

    def plan_now() -> tuple[PaperPlan, Known]:
        known = known_records(options.results, runs)
        return make_plan(experiments, known.records, asked), known

    plan, known = plan_now()
    if asked.data_path is not None and not any(w.config.data.path for w in plan.runs.values()):
        raise EngramError("the images of these experiments come with the package; leave --data out")
    if options.dry_run:
        print_plan(console, plan, costs(plan, known.records, runs), known, options)
        return 0

    def show(plan: PaperPlan, known: Known) -> None:
        write_page(page, paper, plan)
        if not flags.json:
            print_results(console, paper, plan, known, page, flags.quiet)

    if options.no_run or not plan.left:
        if flags.json:
            print_line(console, json.dumps(cells_json(plan)))
        show(plan, known)
        return 0

    def tell(last: Last) -> None:
        del last
        show(*plan_now())

    refuse_edited(plan)
    use_threads(flags.threads)
    configs, stores = with_images(plan, lambda data: read_images(data, console, silent=flags.quiet or flags.json))
    members = plan_members(configs, directory=runs, read=stores.__getitem__)
    check_last_stage(flags, *[member.stages for member in members])
    return work_through(members, runs, flags, options.at_once, typed, console, tell)


def with_images(
    plan: PaperPlan, read: Callable[[DataConfig], ImageStore]
) -> tuple[dict[str, RunConfig], dict[DataConfig, ImageStore]]:
    """The runs to do whose images are here, and the images; the others are left out by name of their data set.

    Where that leaves nothing to do, the first of what was wrong is raised.
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
        rows=listed("--rows", options.rows) or None,
        columns=listed("--columns", options.columns) or None,
        orders=listed("--orders", options.orders) or None,
        seeds=listed_seeds(options.seeds),
        data_path=None if options.data is None else images_at(options.data),
        device=options.device,
        precision=None if options.precision == "auto" else options.precision,
    )


def print_results(console: Console, paper: Paper, plan: PaperPlan, known: Known, page: Path, quiet: bool) -> None:
    """Prints each table with ours beside the paper's, where the runs are from, and where the page is."""
    cells = {id(experiment): [measure(cell) for cell in plan.of(experiment)] for experiment in plan.experiments}
    if not quiet:
        for experiment in plan.experiments:
            for table in results_tables(experiment, cells[id(experiment)], console.width):
                console.print(table)
            for text in filter(None, (experiment.note, *remarks(paper, cells[id(experiment)]))):
                console.print(text, style="dim")
        console.print(legend(cell for group in cells.values() for cell in group), style="dim")
    for text in filter(None, (missing_line(plan), origin_line(plan, known))):
        print_line(console, text)
    print_line(console, headline([cell for group in cells.values() for cell in group]))
    print_line(console, str(page))


def results_tables(experiment: Experiment, cells: Sequence[Measured], width: int) -> list[Table]:
    """The experiment's table: in each cell ours, the paper's, and the difference with its mark.

    Where it is wider than the console its columns are spread over several tables, each with all rows.
    """
    found = grid(experiment, cells)
    _, firsts = found[0]
    rows = [(label, [_cell(*pair) for pair in zip(row, firsts, strict=True)]) for label, row in found]
    labels = [column.label for column in experiment.columns]
    widths = [
        max(len(label), *(len(line) for _, row in rows for line in row[i].plain.splitlines())) + GAP
        for i, label in enumerate(labels)
    ]
    room = width - max(len(label) for label, _ in rows) - GAP
    groups: list[list[int]] = [[]]
    for i, needed in enumerate(widths):
        if groups[-1] and sum(widths[j] for j in groups[-1]) + needed > room:
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
    """Every cell for programs: ours and the paper's numbers, unrounded; null where there is none."""
    found: list[dict[str, Any]] = []
    for cell in plan.cells:
        measured = measure(cell)
        ours, published = measured.ours, cell.published
        first = next(other for other in plan.of(cell.experiment) if other.column is cell.column)
        against = effect_of(cell, first)
        found.append(
            {
                "experiment": cell.experiment.name,
                "row": cell.row.label,
                "column": cell.column.label,
                "measure": cell.experiment.measure,
                "predictor": cell.predictor,
                "published": None if published is None else {"mean": published.mean, "std": published.std},
                "ours": None if ours is None else {"mean": ours.mean, "std": ours.std, "n": ours.n},
                "difference": measured.difference,
                "effect": None if against is None else {"mean": against.mean, "std": against.std, "n": against.n},
                "mark": measured.mark,
                "why": measured.why or None,
            }
        )
    return found
