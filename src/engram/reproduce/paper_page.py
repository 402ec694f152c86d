"""The HTML page about a paper: its tables with our numbers and the published ones, and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engram.core.errors import option, spelled
from engram.report.formatting import count_runs, join, signed, spread
from engram.report.html_page import check_page_path, template, write_page_and_files
from engram.report.svg import drawing_style
from engram.reproduce import paper_figures as figures
from engram.reproduce.cell_plan import PaperCell, PaperPlan
from engram.reproduce.cells import (
    FURTHER,
    KEPT_NOTHING,
    NOT_RUN,
    UNPUBLISHED,
    WITHIN_POINT,
    WITHIN_STD,
    Measured,
    each_once,
    measure,
)
from engram.reproduce.paper import MEASURES, Experiment, Paper, Remark
from engram.reproduce.paper_tables import against_first, count, csv_table, grid, markdown, run_batches
from engram.reproduce.records import Record

_KINDS = {WITHIN_STD: "std", WITHIN_POINT: "point", FURTHER: "far", NOT_RUN: "", UNPUBLISHED: ""}
_WORDS = {
    "std": "within one standard deviation of the paper's mean",
    "point": "within one point of it",
    "far": "further off",
}
_NEAR = {  # in the order of the headline
    WITHIN_STD: "within the paper's standard deviation",
    WITHIN_POINT: "within one point",
    FURTHER: "further off",
}
_CAPTIONS = {
    "table": "Dots: ours minus the paper's mean, with our standard deviation; grey: the paper's; shaded: one point.",
    "curves": "Lines are means over n runs; bands show one sample standard deviation to each side.",
    "importance": "Lines are means of the sorted values over n runs; bands reach from the lowest run to the highest.",
    "effects": "Dots: mean difference over n pairs of runs of one class order and seed, with its standard deviation.",
}


def write_page(file: Path, paper: Paper, plan: PaperPlan) -> Path:
    """Write the page, and a folder of tables (Markdown, CSV) and plots (SVG) next to it; return the page's path."""
    check_page_path(file)
    with drawing_style():
        parts = [
            _part(paper, experiment, [measure(cell) for cell in plan.of(experiment)]) for experiment in plan.experiments
        ]
    cells = [cell for part in parts for cell in part["measured"]]
    context = {
        "title": paper.title,
        "headline": headline(cells),
        "facts": facts(cells),
        "words": _WORDS if any(cell.cell.published for cell in cells) else {},
        "parts": parts,
        "batches": run_batches(records_of(plan.cells)),
    }
    files = {f"{part['name']}.md": markdown(part["experiment"], part["measured"]) for part in parts}
    files |= {f"{part['name']}.csv": csv_table(part["measured"]) for part in parts}
    files |= {f"{drawing.name}.svg": drawing.svg for part in parts for drawing in part["drawings"]}
    source = template("reproduction.html.jinja", Path(__file__).parent / "templates")
    write_page_and_files(file, source, context, files)
    return file


def headline(cells: Sequence[Measured]) -> str:
    """How many published numbers were measured, and how close they are; a repeated number counts once."""
    in_tables = [cell for cell in cells if cell.cell.published is not None]
    published = [group[0] for group in each_once(cells)]
    measured = [cell for cell in published if cell.mark != NOT_RUN]
    if not published:
        return f"The paper has no numbers for these; {sum(cell.n > 0 for cell in cells)} of {len(cells)} were measured."
    if not measured:
        return f"None of the {len(published)} requested published numbers was measured yet."
    marks = Counter(cell.mark for cell in measured)
    single = [cell for cell in measured if cell.n == 1 and len(cell.cell.experiment.orders) > 1]
    alone = Counter(cell.mark for cell in single)
    parts = [
        f"{marks[mark]} {text}{f' ({alone[mark]} from a single run)' if alone[mark] else ''}"
        for mark, text in _NEAR.items()
        if marks[mark]
    ]
    text = f"{len(measured)} of {len(published)} published numbers were measured: {', '.join(parts)}"
    if single:
        orders = join(sorted({str(len(cell.cell.experiment.orders)) for cell in single}))
        text += f"; the paper's are means over {orders} class orders"
    if len(in_tables) > len(published):
        filled = sum(cell.mark != NOT_RUN for cell in in_tables)
        text += f". Some are in several tables: {filled} of {len(in_tables)} cells are filled"
    return f"{text}."


def facts(cells: Sequence[Measured]) -> str:
    """How many runs are behind the numbers, and on which hardware."""
    records = records_of(cell.cell for cell in cells)
    if not records:
        return "Ours will be the mean and the sample standard deviation over runs that differ in class order and seed."
    where = ", ".join(dict.fromkeys(record.machine for record in records))
    return (
        f"Ours: mean ± sample standard deviation over n runs, which differ in class order and seed; "
        f"{count_runs(len(records))} on {where}. Cells without runs have no number of ours."
    )


def remarks(paper: Paper, cells: Sequence[Measured]) -> list[str]:
    """Return the known reasons for differences, for cells that differ from the paper or have no published number."""
    off = [cell.cell for cell in cells if cell.mark in (FURTHER, WITHIN_POINT) or (cell.n and not cell.cell.published)]
    return [remark.text for remark in paper.remarks if any(_is_about(remark, cell) for cell in off)]


def _is_about(remark: Remark, cell: PaperCell) -> bool:
    return (
        cell.experiment.name == remark.experiment
        and (not remark.rows or cell.row.label in remark.rows)
        and (not remark.columns or cell.column.label in remark.columns)
    )


def records_of(cells: Iterable[PaperCell]) -> list[Record]:
    """Return the runs behind the cells, each once."""
    return list({id(record): record for cell in cells for record in cell.records}.values())


def _part(paper: Paper, experiment: Experiment, measured: list[Measured]) -> dict[str, Any]:
    rows = grid(experiment, measured)
    bases = rows[0][1]
    missing = dict.fromkeys(cell.why or KEPT_NOTHING for cell in measured)
    lines = sum(any(cell.n for cell in row) for _, row in rows)
    crowded = spelled(f"{lines} lines would be too many, {option('rows')} chooses up to {figures.MOST_LINES}")
    return {
        "name": experiment.name,
        "heading": experiment.heading,
        "title": experiment.title,
        "measure": MEASURES[experiment.measure].capitalize() + ".",
        "note": experiment.note,
        "remarks": remarks(paper, measured),
        "columns": [column.label for column in experiment.columns],
        "rows": [
            {"label": label, "cells": [_cell(cell, base) for cell, base in zip(row, bases, strict=True)]}
            for label, row in rows
        ],
        "drawings": figures.drawings(experiment, measured),
        "caption": _CAPTIONS[experiment.kind],
        "is_figure": experiment.kind in ("curves", "importance"),
        "undrawn": crowded if lines > figures.MOST_LINES else "; ".join(missing),
        "measured": measured,
        "experiment": experiment,
    }


def _cell(measured: Measured, base: Measured) -> dict[str, str]:
    difference = "" if measured.difference is None else signed(measured.difference)
    return {
        "ours": "" if measured.ours is None else spread(measured.ours),
        "n": count(measured),
        "why": measured.why,
        "paper": "" if measured.cell.published is None else spread(measured.cell.published),
        "difference": against_first(measured, base) or difference,
        "mark": measured.mark,
        "kind": _KINDS[measured.mark],
    }
