"""`engram reproduce`: the paper's tables and figures, with ours beside the published numbers."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engram.cli.commands.common import check_last_stage, check_running, print_line, read_images, use_threads
from engram.cli.commands.several import Last, work_through
from engram.cli.options import Reproduce
from engram.cli.overrides import listed, listed_seeds
from engram.cli.text import make_console, make_table
from engram.config import RunConfig
from engram.data.load import DataConfig
from engram.data.store import ImageStore
from engram.errors import EngramError
from engram.files import typed_path
from engram.report.words import join
from engram.reproduce.cells import FURTHER, NOT_RUN, WITHIN_POINT, WITHIN_STD, Measured, measure
from engram.reproduce.cost import Cost, costs, this_hardware
from engram.reproduce.page import headline, remarks, write_page
from engram.reproduce.paper import MEASURES, Experiment, Paper, load_paper
from engram.reproduce.plan import Asked, Plan, make_plan
from engram.reproduce.records import Record
from engram.reproduce.store import SUFFIX, is_ours, merge, read_results
from engram.reproduce.text import LEGEND, caption, grid, lines
from engram.rundir import find_runs, processor_name
from engram.together import plan_members
from engram.together.workers import ON_CPU, ON_CUDA

RESULTS = Path("results")
NO_RESULTS = "none"  # --results: the runs of --out alone
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
    if page.suffix.lower() not in (".html", ".htm"):
        raise EngramError(f"the page cannot be written to {page}: give --page a file name that ends in .html")
    paper = load_paper(None if options.paper is None else typed_path(options.paper))
    experiments, asked = paper.find(options.what), _asked(options)

    def plan_now() -> tuple[Plan, Known]:
        known = known_records(options.results, runs)
        return make_plan(experiments, known.records, asked), known

    plan, known = plan_now()
    if asked.data_path is not None and not any(w.config.data.path for w in plan.runs.values()):
        raise EngramError("the images of these experiments come with the package; leave --data out")
    if options.dry_run:
        print_plan(console, plan, costs(plan, known.records, runs), known, options)
        return 0

    def show(plan: Plan, known: Known) -> None:
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

    use_threads(flags.threads)
    configs, stores = with_images(plan, lambda data: read_images(data, console, silent=flags.quiet or flags.json))
    members = plan_members(configs, directory=runs, read=stores.__getitem__)
    check_last_stage(flags, *[member.stages for member in members])
    return work_through(members, runs, flags, options.at_once, typed, console, tell)


def with_images(
    plan: Plan, read: Callable[[DataConfig], ImageStore]
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
        print(f"engram: left out {count} runs of {data.name}: {error}", file=sys.stderr)
    configs = {name: wanted.config for name, wanted in plan.left.items() if wanted.config.data in stores}
    return configs, stores


def _asked(options: Reproduce) -> Asked:
    path = None
    if options.data is not None:
        place = typed_path(options.data)
        if not place.exists():
            raise EngramError(f"there is no file or folder {options.data}; --data should say where the images are")
        path = str(place.resolve())
    return Asked(
        rows=listed("--rows", options.rows) or None,
        columns=listed("--columns", options.columns) or None,
        orders=listed("--orders", options.orders) or None,
        seeds=listed_seeds(options.seeds),
        data_path=path,
        device=options.device,
        precision=None if options.precision == "auto" else options.precision,
    )


@dataclass(frozen=True)
class Known:
    """Every complete run that counts. places: by a record's source, where it was looked for; runs: that of --out."""

    records: list[Record]
    places: dict[str, Path]
    runs: Path


def known_records(results: str | None, runs: Path) -> Known:
    """The complete runs in the results and in the directory of runs; a damaged file is refused by its name.

    results: None takes what the folder of that name has; it may be somebody else's, whose files are left out.
    """
    places = [typed_path(results)] if results not in (None, NO_RESULTS) else []
    for file in sorted(RESULTS.glob(f"*{SUFFIX}")) if results is None else ():
        if is_ours(file):
            places.append(file)
        else:
            print(f"engram: left out {file}: it holds no results of engram (--results names others)", file=sys.stderr)
    if runs.is_dir() and find_runs(runs):
        places.append(runs)
    found = [(record, place) for place in places for record in read_results([place]).records]
    return Known(merge(record for record, _ in found), {record.source: place for record, place in found}, runs)


def origins(plan: Plan, known: Known) -> dict[Path, int]:
    """How many of the runs that are done come from which place."""
    done = {
        wanted.name: known.places[record.source]
        for cell in plan.cells
        for wanted, record in zip(cell.wanted, cell.found, strict=True)
        if record is not None and wanted.name not in plan.left
    }
    return dict(Counter(done.values()))


def origin_line(plan: Plan, known: Known) -> str:
    """Where the runs that are done come from; empty where none is."""
    counts = origins(plan, known)
    here = counts.pop(known.runs, 0)
    if not counts:
        return f"done: {here} in {known.runs}" if here else ""
    before = f"{sum(counts.values())} measured before ({', '.join(map(str, counts))})"
    return f"done: {before}, {here} in {known.runs}; --results none counts the latter alone"


# What there is to do.


def print_plan(console: Console, plan: Plan, estimates: Sequence[Cost], known: Known, options: Reproduce) -> None:
    """Prints which runs the experiments need, how many are done, and what the rest would take."""
    here = this_hardware(options.device)
    if options.running.json:
        print_line(console, json.dumps(plan_json(plan, estimates, known, here)))
        return
    table = make_table(["", "cells", "runs", "done", "no recipe yet"], ["cells", "runs", "done", "no recipe yet"])
    for experiment in plan.experiments:
        cells = plan.of(experiment)
        names = {wanted.name for cell in cells for wanted in cell.wanted}
        done = len(names) - len({wanted.name for cell in cells for wanted in cell.left})
        lacking = sum(bool(cell.missing) for cell in cells)
        table.add_row(caption(experiment), str(len(cells)), str(len(names)), str(done), str(lacking) if lacking else "")
    console.print(table)
    console.print(_runs_table(plan))
    missing = list(dict.fromkeys(re.sub(r"-b\d+-s\d+$", "", cell.missing) for cell in plan.cells if cell.missing))
    if missing:
        print_line(console, f"no recipe yet: {', '.join(missing)}")
    total, left = len(plan.runs), len(plan.left)
    print_line(console, f"{total} runs, each counted once: {total - left} done, {left} to do")
    for text in filter(None, (_bare_line(plan), origin_line(plan, known))):
        print_line(console, text)
    at_once = options.at_once or (ON_CPU if here == processor_name() else ON_CUDA)
    for text in cost_lines(estimates, here, left, min(at_once, left)):
        print_line(console, text)
    print_line(console, "this was a dry run: nothing was written")


def _bare_line(plan: Plan) -> str:
    """Which of the runs to do count as done in other tables; empty where none does."""
    cells = [cell for cell in plan.cells if cell.bare]
    if not cells:
        return ""
    names = {wanted.name for cell in cells for wanted in cell.bare}
    shown = join(dict.fromkeys(cell.experiment.heading for cell in cells))
    return f"{len(names)} of those to do were run before and kept no importance, which {shown} shows"


def _runs_table(plan: Plan) -> Table:
    """A line for each recipe with its changes: class orders and seeds, those done, and what needs it."""
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
    """What the runs to do would take, on every kind of hardware that was measured, this one first.

    at_once: how many this command would do at a time here.
    """
    if not left:
        return []
    ordered = sorted(estimates, key=lambda cost: cost.hardware != here)
    lines = (
        []
        if any(cost.hardware == here for cost in estimates)
        else [f"{here} (here): no measurement of such runs on this hardware"]
    )
    for cost in ordered:
        name = f"{cost.hardware}{' (here)' if cost.hardware == here else ''}"
        lacking = [f"{count} run{'s' if count > 1 else ''} {why}" for why, count in cost.uncounted.items()]
        if cost.seconds is None:
            lines.append(f"{name}: no estimate of {', '.join(lacking)}")
            continue
        beside = "one at a time" if cost.at_once == 1 else f"up to {cost.at_once} side by side"
        text = f"{name}: about {_long(cost.seconds)}, "
        text += f"from {cost.measured} measured run{'s' if cost.measured > 1 else ''}, {beside}"
        if cost.hardware == here and at_once != cost.at_once:
            text += f" (this command would do {at_once} at a time: --at-once)"
        text += "".join(f"; without {runs}" for runs in lacking)
        if cost.unmeasured:
            text += f"; not measured there and taken to cost the same: {', '.join(cost.unmeasured)}"
        lines.append(text)
    return lines


def _long(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes} min ({minutes / 60:.1f} h)"


def plan_json(plan: Plan, estimates: Sequence[Cost], known: Known, here: str) -> dict[str, Any]:
    """The plan for programs."""
    return {
        "runs": [
            {"run": name, "recipe": wanted.config.recipe, "order": wanted.config.order, "seed": wanted.config.seed}
            | {"done": name not in plan.left}
            for name, wanted in plan.runs.items()
        ],
        "done": len(plan.runs) - len(plan.left),
        "done_in": {str(place): count for place, count in origins(plan, known).items()},
        "left": len(plan.left),
        "no_recipe": list(dict.fromkeys(cell.missing for cell in plan.cells if cell.missing)),
        "hardware": here,
        "minutes": {cost.hardware: cost.seconds / 60 for cost in estimates if cost.seconds is not None},
    }


# What came of it.


def print_results(console: Console, paper: Paper, plan: Plan, known: Known, page: Path, quiet: bool) -> None:
    """Prints each table with ours beside the paper's, where the runs are from, and where the page is."""
    cells = {id(experiment): [measure(cell) for cell in plan.of(experiment)] for experiment in plan.experiments}
    if not quiet:
        for experiment in plan.experiments:
            for table in results_tables(experiment, cells[id(experiment)], console.width):
                console.print(table)
            for text in filter(None, (experiment.note, *remarks(paper, cells[id(experiment)]))):
                console.print(text, style="dim")
        console.print(LEGEND, style="dim")
    if origin := origin_line(plan, known):
        print_line(console, origin)
    print_line(console, headline([cell for group in cells.values() for cell in group]))
    print_line(console, str(page))


def results_tables(experiment: Experiment, cells: Sequence[Measured], width: int) -> list[Table]:
    """The experiment's table: in each cell ours, the paper's, and the difference with its mark.

    Where it is wider than the console its columns are spread over several tables, each with all rows.
    """
    rows = [(label, [_cell(cell) for cell in row]) for label, row in grid(experiment, cells)]
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


def _cell(measured: Measured) -> Text:
    texts = lines(measured)
    if measured.ours is None:
        texts[0] = measured.why
    return Text("\n".join(texts), style=_STYLES.get(measured.mark, ""))


def cells_json(plan: Plan) -> list[dict[str, Any]]:
    """Every cell for programs: ours and the paper's numbers, unrounded; null where there is none."""
    found: list[dict[str, Any]] = []
    for cell in plan.cells:
        measured = measure(cell)
        ours, published = measured.ours, cell.published
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
                "mark": measured.mark,
                "why": measured.why or None,
            }
        )
    return found
