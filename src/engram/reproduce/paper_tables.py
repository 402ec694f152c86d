"""The tables of a paper as Markdown and CSV, and docs/reproduction.md, which is made only from the results.

The page does not depend on which methods this version has.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engram.core.metrics import Estimate
from engram.report.formatting import ACCURACY_WORDS, count_runs, csv_text, decimal, join, signed, spread
from engram.reproduce.cell_plan import PaperRequest, make_plan
from engram.reproduce.cells import (
    FURTHER,
    MARKS,
    NOT_RUN,
    UNPUBLISHED,
    WITHIN_POINT,
    WITHIN_STD,
    Measured,
    each_once,
    effect,
    effect_of,
    headline,
    measure_all,
    predictor_of,
    records_of,
    remarks,
)
from engram.reproduce.paper import MEASURES, Experiment, Paper
from engram.reproduce.records import Record

_MARKED = (
    f"{MARKS[WITHIN_STD]} {WITHIN_STD} of the paper's mean, {MARKS[WITHIN_POINT]} {WITHIN_POINT} of it, "
    f"{MARKS[FURTHER]} {FURTHER}"
)
_JUDGED = (WITHIN_STD, WITHIN_POINT, FURTHER)
COMMAND = "engram results page docs/reproduction.md results"
_OURS = "ours is mean ± sample standard deviation over n runs (class orders and seeds)"


def legend(cells: Iterable[Measured]) -> str:
    """Explain the marks (if there are published numbers) and our numbers."""
    return f"{_MARKED}; {_OURS}" if any(cell.cell.published for cell in cells) else _OURS


def count(measured: Measured) -> str:
    """'n = 3', or 'n = 2 of 3' if there are fewer runs than class orders in the experiment."""
    orders = len(measured.cell.experiment.orders)
    return f"n = {measured.n}" if measured.n >= orders else f"n = {measured.n} of {orders}"


def lines(measured: Measured) -> list[str]:
    """Return the lines of a cell: ours and n, the paper's, the difference and its mark; or why there is no number."""
    if not measured.in_paper:
        return [measured.why]
    paper = [] if measured.cell.published is None else [f"paper {spread(measured.cell.published)}"]
    if measured.ours is None:
        return [measured.lacking, *paper]
    found = [f"{spread(measured.ours)} ({count(measured)})", *paper]
    if measured.difference is not None:
        found.append(f"{signed(measured.difference)} {MARKS[measured.mark]}")
    return found


def against_first(measured: Measured, first: Measured) -> str:
    """'−1.41 against the first row' in a table of effects; empty in other tables, or without pairs of runs.

    first: the cell of the first row in the same column.
    """
    value = effect_of(measured.cell, first.cell)
    if value is None:
        return ""
    pairs = "" if value.n == measured.n else f" (n = {value.n})"
    return f"{signed(value.mean)} against the first row{pairs}"


def grid(experiment: Experiment, cells: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    """Return the cells of an experiment row by row, with the label of each row."""
    width = len(experiment.columns)
    return [(row.label, list(cells[i * width : (i + 1) * width])) for i, row in enumerate(experiment.rows)]


def caption(experiment: Experiment) -> str:
    """'Table 1: CIFAR-100, ...'."""
    return f"{experiment.heading}: {experiment.title}"


def markdown_table(experiment: Experiment, cells: Sequence[Measured]) -> str:
    """Return the experiment's table, with ours, the paper's and the difference in every cell."""
    rows = [
        [_escape(label), *("<br>".join(map(_escape, lines(cell))) for cell in row)]
        for label, row in grid(experiment, cells)
    ]
    return markdown_rows(["", *(column.label for column in experiment.columns)], rows)


def markdown_effects(experiment: Experiment, cells: Sequence[Measured]) -> str:
    """Return the difference of each row to the first, over pairs of runs with the same class order and seed."""
    (_, bases), *others = grid(experiment, cells)
    rows = [[_escape(experiment.rows[0].label), *(_absolute(cell) for cell in bases)]]
    for label, row in others:
        effects = [effect(base.cell, cell.cell) for base, cell in zip(bases, row, strict=True)]
        rows.append([_escape(label), *("not measured yet" if e is None else _effect(e) for e in effects)])
    return markdown_rows(["", *(column.label for column in experiment.columns)], rows)


def _absolute(cell: Measured) -> str:
    return "not measured yet" if cell.ours is None else f"{spread(cell.ours)} ({count(cell)})"


def _effect(value: Estimate) -> str:
    text = signed(value.mean) if value.std is None else f"{signed(value.mean)} ± {decimal(value.std)}"
    return f"{text} points (n = {value.n})"


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the cells of the rows are Markdown."""
    bar = ["---"] * len(header)
    return "".join(f"| {' | '.join(row)} |\n" for row in [list(map(_escape, header)), bar, *rows])


def _escape(text: str) -> str:
    """Escape characters that Markdown would interpret."""
    return text.replace("|", "\\|").replace("*", "\\*")


def markdown(experiment: Experiment, cells: Sequence[Measured]) -> str:
    """Return a Markdown section about one experiment."""
    table = (markdown_effects if experiment.kind == "effects" else markdown_table)(experiment, cells)
    note = f"\n{experiment.note}\n" if experiment.note else ""
    return f"## {caption(experiment)}\n\n{MEASURES[experiment.measure].capitalize()}.\n\n{table}{note}"


CSV_COLUMNS = (
    *("experiment", "row", "column", "measure", "predictor", "recipe", "orders_and_seeds", "paper_mean", "paper_std"),
    *("mean", "std", "n", "wanted", "difference", "mark", "why", "hardware", "commits"),
)


def csv_table(cells: Sequence[Measured]) -> str:
    """Return one CSV row per cell, numbers unrounded."""
    return csv_text(CSV_COLUMNS, (_csv_row(cell) for cell in cells))


def _csv_row(measured: Measured) -> list[object]:
    cell, ours, paper = measured.cell, measured.ours, measured.cell.published
    records = cell.records
    recipe = cell.wanted[0].config.recipe if cell.wanted else cell.experiment.spec(cell.row, cell.column).recipe
    return [
        cell.experiment.name,
        cell.row.label,
        cell.column.label,
        cell.experiment.measure,
        predictor_of(measured),
        recipe,
        " ".join(f"{record.order.name}/{record.seed}" for record in records),
        *((paper.mean, paper.std) if paper else (None, None)),
        *((ours.mean, ours.std) if ours else (None, None)),
        measured.n,
        len(cell.wanted),
        measured.difference,
        "" if measured.mark == UNPUBLISHED else measured.mark,
        measured.why,
        "; ".join(dict.fromkeys(record.machine for record in records)),
        "; ".join(dict.fromkeys(record.commit for record in records)),
    ]


@dataclass(frozen=True)
class RunBatch:
    """Runs of one recipe on one machine with the same versions. orders: class orders and seeds; seconds: of a run."""

    recipe: str
    hardware: str
    torch: str
    commit: str
    orders: str
    seconds: str


def run_batches(records: Sequence[Record]) -> list[RunBatch]:
    """Group runs by recipe, machine and versions."""
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        hardware = f"{record.machine}, {record.precision}"
        key = (record.recipe, hardware, f"torch {record.versions.get('torch', '?')}", record.commit)
        groups.setdefault(key, []).append(record)
    batches: list[RunBatch] = []
    for (recipe, hardware, torch, commit), runs in groups.items():
        seconds = [run.result.seconds for run in runs]
        shortest, longest = decimal(min(seconds), 0), decimal(max(seconds), 0)
        text = shortest if len(runs) == 1 else f"{shortest} to {longest}"
        orders = ", ".join(f"{run.order.name}/{run.seed}" for run in runs)
        batches.append(RunBatch(recipe, hardware, torch, commit, orders, text))
    return batches


def document(paper: Paper, records: Sequence[Record], command: str = COMMAND, file: str | None = None) -> str:
    """Return the page. command: what makes it. file: path of the paper; None is the paper in this package."""
    seeds = sorted({record.seed for record in records}) or [1]
    plan = make_plan(list(paper.experiments.values()), records, PaperRequest(seeds=seeds))
    cells = measure_all(plan)
    tables = [experiment for experiment in plan.experiments if experiment.kind != "effects"]
    effects = [experiment for experiment in plan.experiments if experiment.kind == "effects"]
    parts = [
        _opening(paper, cells, command, file),
        _overview(tables, cells),
        _reproduces(cells),
        _does_not(paper, tables, cells),
        *(_effects(paper, experiment, cells, file) for experiment in effects),
        *(_section(experiment, cells, file) for experiment in tables),
        _provenance(records_of(plan.cells), records),
    ]
    return "\n".join(part for part in parts if part)


def _of(experiment: Experiment, cells: Sequence[Measured]) -> list[Measured]:
    return [cell for cell in cells if cell.cell.experiment is experiment]


def _opening(paper: Paper, cells: Sequence[Measured], command: str, file: str | None) -> str:
    checked = "; a test checks that it is what this command gives" if command == COMMAND else ""
    place = "[`results/`](../results/README.md)" if command == COMMAND else "a file of results"
    starred = any(cell.cell.row.label.endswith("*") for cell in cells)
    star = "A star marks rows for which the paper's authors ran other people's code again. " if starred else ""
    repeated = """If a table repeats a number without its standard deviation, the one in the other table is used;
without any, only the limit of one point counts.
"""
    if not any(cell.cell.published for cell in cells):
        repeated = ""
    return f"""# Reproduction

{paper.title}. {headline(cells)}

Made by `{command}`{checked}.
{_reproduce(next(iter(paper.experiments)), file)} runs what is missing; `engram results merge` adds it to {place}.
The paper's numbers never replace ours: cells without runs are marked "not run".

{legend(cells)}.
{ACCURACY_WORDS}
{star}{repeated}"""


def _reproduce(name: str, file: str | None) -> str:
    """The command that runs the missing runs of an experiment."""
    return f"`engram reproduce {name}{'' if file is None else f' --paper {shlex.quote(file)}'}`"


def _overview(tables: Sequence[Experiment], cells: Sequence[Measured]) -> str:
    rows: list[list[str]] = []
    for experiment in tables:
        published = [cell for cell in _of(experiment, cells) if cell.cell.published is not None]
        marks = Counter(cell.mark for cell in published)
        counts = [len(published), len(published) - marks[NOT_RUN], *(marks[mark] for mark in _JUDGED)]
        if published:
            rows.append([caption(experiment), *map(str, counts)])
    return markdown_rows(["", "published", "ours", *(MARKS[mark] for mark in _JUDGED)], rows)


def _reproduces(cells: Sequence[Measured]) -> str:
    text = "\n".join(_named(cells, (WITHIN_STD, WITHIN_POINT))) or "Nothing yet."
    return f"## What reproduces\n\nWithin the paper's standard deviation, or one point:\n\n{text}\n"


def _does_not(paper: Paper, tables: Sequence[Experiment], cells: Sequence[Measured]) -> str:
    why = [
        f"- {experiment.heading}: {text}".replace("\n\n", "\n\n    ")
        for experiment in tables
        for text in remarks(paper, _of(experiment, cells))
    ]
    known = f"\nWhy, as far as known:\n\n{(chr(10) * 2).join(why)}\n" if why else ""
    text = "\n".join(_named(cells, (FURTHER,))) or "Nothing that was measured."
    return f"## What does not\n\nFurther off than one point and the paper's standard deviation:\n\n{text}\n{known}"


def _named(cells: Sequence[Measured], marks: Sequence[str]) -> list[str]:
    """Return a line for each row of a table with such marks; a number that several tables repeat is listed once."""
    found: dict[tuple[str, str], list[str]] = {}
    for group in each_once(cells):
        results: dict[str, list[Measured]] = {}  # one, unless the tables have different runs
        for measured in group:
            if measured.difference is not None and measured.mark in marks:
                results.setdefault(signed(measured.difference), []).append(measured)
        for difference, (first, *others) in results.items():
            where = (first.cell.experiment.heading, first.cell.row.label.replace("*", "\\*"))
            also = dict.fromkeys(other.cell.experiment.heading for other in others)
            text = f"{first.cell.column.label} {difference} (n = {first.n}{_also(list(also))})"
            found.setdefault(where, []).append(text)
    return [f"- {heading}, {label}: {', '.join(texts)}" for (heading, label), texts in found.items()]


def _also(headings: Sequence[str]) -> str:
    """'; also in Table 3', '; also in Tables 3 and 4'."""
    if len(headings) > 1 and all(heading.startswith("Table ") for heading in headings):
        return f"; also in Tables {join([heading.removeprefix('Table ') for heading in headings])}"
    return f"; also in {join(headings)}" if headings else ""


def _effects(paper: Paper, experiment: Experiment, cells: Sequence[Measured], file: str | None) -> str:
    mine = _of(experiment, cells)
    table = markdown_effects(experiment, mine)
    note = "".join(f"\n{text}\n" for text in (experiment.note, *remarks(paper, mine)) if text)
    opening = f"{experiment.opening}\n" if experiment.opening else ""
    return f"""## {caption(experiment)}

{opening}The first row is {MEASURES[experiment.measure]}; the others are the mean difference to it over runs
of the same class order and seed. {_reproduce(experiment.name, file)} runs what is missing.

{table}{note}"""


def _section(experiment: Experiment, cells: Sequence[Measured], file: str | None) -> str:
    """The table of the rows with runs; other rows are listed by name."""
    rows = [
        row for row in experiment.rows if any(c.n or c.cell.bare for c in _of(experiment, cells) if c.cell.row is row)
    ]
    if not rows:
        return f"## {caption(experiment)}\n\nNot run. {_reproduce(experiment.name, file)} would run it.\n"
    mine = [cell for cell in _of(experiment, cells) if cell.cell.row in rows]
    text = markdown(replace(experiment, rows=tuple(rows)), mine)
    others = [row.label.replace("*", "\\*") for row in experiment.rows if row not in rows]
    return text + (f"\nNot run: {', '.join(others)}.\n" if others else "")


def _provenance(used: Sequence[Record], records: Sequence[Record]) -> str:
    header = ["recipe", "runs (order/seed)", "seconds of a run", "hardware", "torch", "commit"]
    rows = [[run.recipe, run.orders, run.seconds, run.hardware, run.torch, run.commit] for run in run_batches(records)]
    others = len(records) - len(used)
    more = f" {others} of them are in no table above." if others else ""
    text = markdown_rows(header, rows) if records else "There are none yet.\n"
    shared = "Runs share a device, so the sum of their seconds is not wall-clock time."
    return f"## The runs\n\n{count_runs(len(records))}.{more} {shared}\n\n{text}"
