"""Plots of an experiment: accuracy per stage, sorted importance, differences to the paper, effects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from engram.report.figures import WIDTH, colour, line_style, new_figure
from engram.report.formatting import spread
from engram.report.svg import CARD, INK, MUTED, Drawing, finish, plain, plain_label
from engram.reproduce.cells import POINT, Measured, curve, effect, predictor_of
from engram.reproduce.paper import Experiment, PaperColumn

_ALPHA = 0.16  # of a band
MOST_LINES = 12  # in one plot, to stay distinguishable


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
    found = [(i, cell, line) for i, cell in enumerate(of_column) if (line := curve(cell.cell)) is not None]
    if not 0 < len(found) <= MOST_LINES:
        return None
    figure, axes = new_figure(WIDTH, 3.4 + 0.2 * len(found))
    bounds: list[float] = []
    for index, cell, (seen, values) in found:
        mean = np.array([value.mean for value in values])
        std = np.array([value.std or 0.0 for value in values])
        axes.plot(seen, mean, label=_legend(cell), zorder=3, **line_style(index, len(seen), markers=12))
        if cell.n > 1:
            axes.fill_between(seen, mean - std, mean + std, color=colour(index), alpha=_ALPHA, linewidth=0, zorder=2)
        bounds += [float((mean - std).min()), float((mean + std).max())]
    lowest = min(90, 10 * math.floor(min(bounds) / 10))
    axes.set_ylim(lowest, max(lowest + 10, min(100, 10 * math.ceil(max(bounds) / 10))))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.grid(False, axis="x")
    axes.margins(x=0.02)
    axes.set_xlabel("classes seen")
    axes.set_ylabel("top-1 accuracy, %")
    axes.set_title(column.label)
    figure.legend(loc="outside lower left", ncols=1, fontsize=10)
    alt = f"Accuracy in percent against classes seen, {plain(column.label)}, a line for each row that was run."
    return finish(figure, _file(f"{experiment.name}_{column.label}"), alt)


def _legend(cell: Measured) -> str:
    assert cell.ours is not None
    predictor = predictor_of(cell)
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
        axes.plot(ranks, mean, label=label, zorder=3, **line_style(index, len(ranks), markers=8))
        if len(values) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(ranks, low, high, color=colour(index), alpha=_ALPHA, linewidth=0, zorder=2)
    axes.axhline(1, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2, label="average channel")
    axes.set_ylim(bottom=0)
    axes.grid(False, axis="x")
    axes.set_xlabel("channels of the last map, most important first")
    axes.set_ylabel("importance (map mean = 1)")
    axes.set_title("After the last stage")
    figure.legend(loc="outside lower left", ncols=1, fontsize=10)
    alt = "Sorted channel importance of the last map after the last stage, a line for each setting that was run."
    return finish(figure, _file(experiment.name), alt)


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
    axes.axvspan(-POINT, POINT, color=MUTED, alpha=0.08, linewidth=0, zorder=0)
    _difference_axis(axes, labels)
    axes.set_title("Ours minus the paper's")
    alt = f"Ours minus the published number in points, for the cells of {plain(experiment.heading)} that were run."
    return finish(figure, _file(f"{experiment.name}_differences"), alt)


def effects(experiment: Experiment, cells: Sequence[Measured]) -> Drawing | None:
    """Difference of each row to the first row, for each column with runs of both."""
    bases = {id(cell.cell.column): cell.cell for cell in cells if cell.cell.row is experiment.rows[0]}
    found = [
        (cell.cell, value)
        for cell in cells
        if cell.cell.row is not experiment.rows[0]
        and (value := effect(bases[id(cell.cell.column)], cell.cell)) is not None
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
    axes.set_title("" if named else found[0][0].column.label)
    alt = f"Difference of each row of {plain(experiment.heading)} to its first row, in points."
    return finish(figure, _file(f"{experiment.name}_points"), alt)


def _difference_axis(axes: Axes, labels: Sequence[str]) -> None:
    axes.axvline(0, color=MUTED, linewidth=1.0, zorder=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel("points")


def _file(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())
