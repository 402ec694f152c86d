"""The tables of a paper as Markdown and CSV, and text that all output formats have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engram.core.metrics import Estimate
from engram.report.formatting import csv_text, decimal, signed, spread
from engram.reproduce.cells import (
    FURTHER,
    MARKS,
    UNPUBLISHED,
    WITHIN_POINT,
    WITHIN_STD,
    Measured,
    effect,
    effect_of,
    predictor_of,
)
from engram.reproduce.paper import MEASURES, Experiment
from engram.reproduce.records import Record

_MARKED = (
    f"{MARKS[WITHIN_STD]} {WITHIN_STD} of the paper's mean, {MARKS[WITHIN_POINT]} {WITHIN_POINT} of it, "
    f"{MARKS[FURTHER]} {FURTHER}"
)
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
