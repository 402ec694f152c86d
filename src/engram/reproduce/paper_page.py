"""The HTML page about a paper: its tables with our numbers and the published ones, and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from engram.core.errors import option, spelled
from engram.report.figures import WIDTH, colour, draw_line, importance_axes, new_figure
from engram.report.formatting import plain, plain_label, signed, spread
from engram.report.html_page import check_page_path, template, write_page_and_files
from engram.report.svg import CARD, INK, MUTED, Drawing, drawing_style, finish
from engram.reproduce import cells as numbers
from engram.reproduce.cell_plan import PaperPlan
from engram.reproduce.cells import FURTHER, NOT_RUN, UNPUBLISHED, WITHIN_POINT, WITHIN_STD, Measured
from engram.reproduce.paper import MEASURES, Experiment, Paper, PaperColumn
from engram.reproduce.paper_tables import against_first, count, csv_table, grid, markdown, run_batches

_KINDS = {WITHIN_STD: "std", WITHIN_POINT: "point", FURTHER: "far", NOT_RUN: "", UNPUBLISHED: ""}
MOST_LINES = 12  # in one plot, to stay distinguishable
_WORDS = {
    "std": "within one standard deviation of the paper's mean",
    "point": "within one point of it",
    "far": "further off",
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
            _part(paper, experiment, [numbers.measure(cell) for cell in plan.of(experiment)])
            for experiment in plan.experiments
        ]
    cells = [cell for part in parts for cell in part["measured"]]
    context = {
        "title": paper.title,
        "headline": numbers.headline(cells),
        "facts": numbers.facts(cells),
        "words": _WORDS if any(cell.cell.published for cell in cells) else {},
        "parts": parts,
        "batches": run_batches(numbers.records_of(plan.cells)),
    }
    files = {f"{part['name']}.md": markdown(part["experiment"], part["measured"]) for part in parts}
    files |= {f"{part['name']}.csv": csv_table(part["measured"]) for part in parts}
    files |= {f"{drawing.name}.svg": drawing.svg for part in parts for drawing in part["drawings"]}
    source = template("reproduction.html.jinja", Path(__file__).parent / "templates")
    write_page_and_files(file, source, context, files)
    return file


def _part(paper: Paper, experiment: Experiment, measured: list[Measured]) -> dict[str, Any]:
    rows = grid(experiment, measured)
    bases = rows[0][1]
    missing = dict.fromkeys(cell.why or numbers.KEPT_NOTHING for cell in measured)
    lines = sum(any(cell.n for cell in row) for _, row in rows)
    crowded = spelled(f"{lines} lines would be too many, {option('rows')} chooses up to {MOST_LINES}")
    return {
        "name": experiment.name,
        "heading": experiment.heading,
        "title": experiment.title,
        "measure": MEASURES[experiment.measure].capitalize() + ".",
        "note": experiment.note,
        "remarks": numbers.remarks(paper, measured),
        "columns": [column.label for column in experiment.columns],
        "rows": [
            {"label": label, "cells": [_cell(cell, base) for cell, base in zip(row, bases, strict=True)]}
            for label, row in rows
        ],
        "drawings": drawings(experiment, measured),
        "caption": _CAPTIONS[experiment.kind],
        "is_figure": experiment.kind in ("curves", "importance"),
        "undrawn": crowded if lines > MOST_LINES else "; ".join(missing),
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


def drawings(experiment: Experiment, cells: Sequence[Measured]) -> list[Drawing]:
    """Return the plots of an experiment that have numbers."""
    if experiment.kind == "importance":
        found = [importance(experiment, cells)]
    elif experiment.kind == "curves":
        found = [accuracy(experiment, column, cells) for column in experiment.columns]
    elif experiment.kind == "table":
        found = [differences(experiment, cells)]
    else:
        found = [effects(experiment, cells)]
    return [drawing for drawing in found if drawing is not None]


def accuracy(experiment: Experiment, column: PaperColumn, cells: Sequence[Measured]) -> Drawing | None:
    """Accuracy against classes seen: a line for each row that has runs, one sample standard deviation as a band.

    None without runs, or with more than MOST_LINES lines.
    """
    of_column = [cell for cell in cells if cell.cell.column is column]
    found = [(i, cell, line) for i, cell in enumerate(of_column) if (line := numbers.curve(cell.cell)) is not None]
    if not 0 < len(found) <= MOST_LINES:
        return None
    figure, axes = new_figure(WIDTH, 3.4 + 0.2 * len(found))
    bounds: list[float] = []
    for index, cell, (seen, values) in found:
        mean = np.array([value.mean for value in values])
        std = np.array([value.std or 0.0 for value in values])
        band = (mean - std, mean + std) if cell.n > 1 else None
        draw_line(axes, index, np.array(seen), mean, band, _legend(cell), markers=12)
        bounds += [float((mean - std).min()), float((mean + std).max())]
    lowest = min(90, 10 * math.floor(min(bounds) / 10))
    axes.set_ylim(lowest, max(lowest + 10, min(100, 10 * math.ceil(max(bounds) / 10))))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.grid(False, axis="x")
    axes.margins(x=0.02)
    axes.set_xlabel("classes seen")
    axes.set_ylabel("top-1 accuracy, %")
    axes.set_title(plain_label(column.label, 50))
    figure.legend(loc="outside lower left", ncols=1, fontsize=10)
    alt = f"Accuracy in percent against classes seen, {plain(column.label)}, a line for each row that was run."
    return finish(figure, f"{experiment.name}\n{column.label}", alt)


def _legend(cell: Measured) -> str:
    assert cell.ours is not None
    predictor = numbers.predictor_of(cell)
    who = plain_label(cell.cell.row.label, 28)
    named = who if f"({predictor})" in who else f"{who}, {predictor}"
    return f"{named}, n = {cell.n}: {spread(cell.ours)} %"


def importance(experiment: Experiment, cells: Sequence[Measured]) -> Drawing | None:
    """Importance of the last map's channels, highest first: mean over runs, with the range as a band."""
    found: list[tuple[int, Measured, np.ndarray]] = []
    for index, cell in enumerate(cells):
        kept = [record.importance[-1] for record in cell.cell.records if record.importance]
        if kept and len({len(values) for values in kept}) == 1:
            found.append((index, cell, np.array(kept)))
    if not found:
        return None
    figure, axes = new_figure(WIDTH, 3.4 + 0.2 * len(found))
    for index, cell, values in found:
        mean, ranks = values.mean(axis=0), np.arange(1, values.shape[1] + 1)
        label = f"{plain_label(cell.cell.column.label, 34)}, n = {len(values)}, std over channels {mean.std():.2f}"
        band = (values.min(axis=0), values.max(axis=0)) if len(values) > 1 else None
        draw_line(axes, index, ranks, mean, band, label, markers=8)
    axes.set_ylim(bottom=0)
    importance_axes(figure, axes, "last map, most important first", "After the last stage", columns=1)
    alt = "Sorted channel importance of the last map after the last stage, a line for each setting that was run."
    return finish(figure, experiment.name, alt)


def differences(experiment: Experiment, cells: Sequence[Measured]) -> Drawing | None:
    """Ours minus the paper's for each cell with both, with our sample standard deviation; the band is one point."""
    found = [cell for cell in cells if cell.difference is not None]
    if not found:
        return None
    figure, axes = new_figure(WIDTH, 1.1 + 0.26 * len(found))
    labels: list[str] = []
    for place, cell in enumerate(found):
        assert cell.difference is not None
        assert cell.ours is not None
        spread, paper = cell.ours.std, cell.cell.published
        within = None if paper is None else paper.deviation
        if within is not None:
            axes.plot([-within, within], [place, place], color=MUTED, linewidth=5, alpha=0.28)
        axes.errorbar(
            cell.difference, place, xerr=spread, fmt="o", color=colour(0), markeredgecolor=CARD, elinewidth=1.4
        )
        row = plain_label(cell.cell.row.label, 24)
        labels.append(f"{row}, {plain_label(cell.cell.column.label, 24)}, n = {cell.n}")
    low, high = axes.get_xlim()
    reach = max(1.5, abs(low), abs(high))
    axes.set_xlim(-reach, reach)
    axes.axvspan(-numbers.POINT, numbers.POINT, color=MUTED, alpha=0.08, linewidth=0, zorder=0)
    _difference_axis(axes, labels)
    axes.set_title("Ours minus the paper's")
    alt = f"Ours minus the published number in points, for the cells of {plain(experiment.heading)} that were run."
    return finish(figure, f"{experiment.name}\ndifferences", alt)


def effects(experiment: Experiment, cells: Sequence[Measured]) -> Drawing | None:
    """Difference of each row to the first row, for each column with runs of both."""
    bases = {id(cell.cell.column): cell.cell for cell in cells if cell.cell.row is experiment.rows[0]}
    found = [
        (cell.cell, value)
        for cell in cells
        if cell.cell.row is not experiment.rows[0]
        and (value := numbers.effect(bases[id(cell.cell.column)], cell.cell)) is not None
    ]
    if not found:
        return None
    figure, axes = new_figure(WIDTH, 1.1 + 0.26 * len(found))
    for place, (cell, value) in enumerate(found):
        shade = colour(experiment.columns.index(cell.column))
        axes.plot([0, value.mean], [place, place], color=shade, linewidth=1.4, alpha=0.5)
        axes.errorbar(value.mean, place, xerr=value.std, fmt="o", color=shade, markeredgecolor=CARD, elinewidth=1.4)
    named = len({id(cell.column) for cell, _ in found}) > 1
    columns = [f", {plain_label(cell.column.label, 24)}" if named else "" for cell, _ in found]
    labels = [
        f"{plain_label(cell.row.label, 40)}{column}, n = {value.n}"
        for (cell, value), column in zip(found, columns, strict=True)
    ]
    _difference_axis(axes, labels)
    axes.set_xlabel("points against the first row")
    axes.set_title("" if named else plain_label(found[0][0].column.label, 50))
    alt = f"Difference of each row of {plain(experiment.heading)} to its first row, in points."
    return finish(figure, f"{experiment.name}\npoints", alt)


def _difference_axis(axes: Axes, labels: Sequence[str]) -> None:
    axes.axvline(0, color=MUTED, linewidth=1.0, zorder=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel("points")
