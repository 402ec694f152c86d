"""The report's figures, drawn with matplotlib's object interface (no global state) as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from engram.report import tables
from engram.report.formatting import plain, plain_label, predictor_name
from engram.report.groups import RunGroup, row_percent
from engram.report.svg import CARD, GRID, INK, MARKERS, MUTED, ON_STRONG, SERIES, Drawing, finish

WIDTH = 5.0  # inches; at 72 units an inch the text is near its nominal size on a phone and on a desk
NAMED_CLASSES, _LARGE_NAMES = 60, 25  # classes named beside a confusion matrix; up to the second, in large letters
NUMBERED_STAGES = 12
_LISTED_CLASSES = 300  # of more classes, only the CSV file has the names
_KEY_COLUMNS, _KEY_LINE = 3, 0.165  # of the list of class names; inches
_BARS = 18

# From nearly transparent to dark blue; the page inverts it in dark mode.
_RAMP = LinearSegmentedColormap.from_list(
    "engram",
    [(0.33, 0.62, 0.86, 0.07), (0.20, 0.52, 0.80, 0.55), (0.06, 0.33, 0.62, 0.88), (0.02, 0.13, 0.33, 1.0)],
).with_extremes(bad=(0, 0, 0, 0))


DASHES = ("-", (0, (5, 1.5)), (0, (2, 1.2)), (0, (6, 1.5, 1.5, 1.5)))  # changes each time all colours are used


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes. Sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def colour(index: int) -> str:
    """The colour of the series at this index."""
    return SERIES[index % len(SERIES)]


def accuracy_curves(groups: Sequence[RunGroup], predictor: str) -> Drawing:
    """Accuracy against classes seen: a line per group, its sample standard deviation as a band, and chance."""
    shown = [(i, group) for i, group in enumerate(groups) if predictor in group.predictors]
    names_fit = len(shown) <= 6 and max(len(group.label) for _, group in shown) <= 12
    height = 3.4 if names_fit else 3.2 + 0.22 * len(shown)
    figure, axes = new_figure(WIDTH, height)
    ends: list[tuple[float, str, str]] = []
    for index, group in shown:
        values = group.accuracy(predictor)
        x, mean = np.array(group.classes), np.array([value.mean for value in values])
        std = np.array([value.std or 0.0 for value in values])
        text = f"{plain_label(group.label, 36)}, n = {group.n}"
        draw_line(axes, index, x, mean, (mean - std, mean + std) if group.n > 1 else None, text)
        ends.append((float(mean[-1]), group.label, colour(index)))
    seen = np.array(sorted({count for _, group in shown for count in group.classes}))
    axes.plot(seen, 100 / seen, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.3, label="chance", zorder=1)
    ends.append((100 / float(seen[-1]), "chance", MUTED))
    _percent_axis(axes, max(value.mean + (value.std or 0) for _, g in shown for value in g.accuracy(predictor)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("classes seen")
    axes.set_ylabel("top-1 accuracy, %")
    axes.set_title(predictor_name(predictor))
    axes.margins(x=0.02)
    if names_fit:
        _end_labels(axes, ends)
    else:
        figure.legend(loc="outside lower left", ncols=1)
    alt = f"Accuracy in percent against classes seen, {predictor_name(predictor)} predictor, one line per group."
    return finish(figure, f"accuracy_per_stage_{predictor}", alt)


def draw_line(
    axes: Axes,
    index: int,
    x: np.ndarray,
    y: np.ndarray,
    band: tuple[np.ndarray, np.ndarray] | None,
    label: str,
    markers: int = 18,
) -> None:
    """Draw the line at this index. band: its lower and upper bound. markers: see `line_style`."""
    axes.plot(x, y, label=label, zorder=3, **line_style(index, len(x), markers))
    if band is not None:
        axes.fill_between(x, *band, color=colour(index), alpha=0.16, linewidth=0, zorder=2)


def importance_axes(figure: Figure, axes: Axes, channels: str, title: str, columns: int) -> None:
    """Label the axes of a plot of sorted importance. channels: of which map, in words. columns: of the legend."""
    axes.axhline(1, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2, label="average channel")
    axes.grid(False, axis="x")
    axes.set_xlabel(f"channels of the {channels}")
    axes.set_ylabel("importance (map mean = 1)")
    axes.set_title(title)
    figure.legend(loc="outside lower left", ncols=columns, columnspacing=1.2, fontsize=10 if columns == 1 else None)


def line_style(index: int, points: int, markers: int = 18) -> dict[str, Any]:
    """Return the style of the line at this index. markers: number of points with a marker, at most."""
    return {
        "color": colour(index),
        "linestyle": DASHES[index // len(SERIES) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5.5,
        "markeredgecolor": CARD,
        "markeredgewidth": 0.9,
        "markevery": max(1, math.ceil(points / markers)),
    }


def _percent_axis(axes: Axes, highest: float) -> None:
    top = min(100.0, 10 * math.ceil(highest / 10 + 0.2))
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(False, axis="x")


def _end_labels(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write names next to the ends of their lines, moved apart if lines end close together."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.062
    placed: list[float] = []
    ordered = sorted(ends)
    for value, _, _ in ordered:
        placed.append(max(value, placed[-1] + gap) if placed else value)
    excess = max(0.0, placed[-1] - high)
    for (value, name, shade), y in zip(ordered, placed, strict=True):
        number = f"\N{NO-BREAK SPACE}{value:.1f}"
        axes.annotate(
            name + number,
            xy=(1.015, y - excess),
            xycoords=("axes fraction", "data"),
            va="center",
            color=shade,
            fontsize=9.5,
            annotation_clip=False,
        )


def accuracy_matrix(group: RunGroup, predictor: str) -> Drawing:
    """R[t][i]: accuracy after stage t (row) on the classes of stage i (column)."""
    matrix = group.matrix(predictor)
    size = len(matrix)
    figure, axes = new_figure(4.2, 3.9)
    _heat_map(axes, matrix, "accuracy, %")
    if size <= NUMBERED_STAGES:
        for t in range(size):
            for i in range(t + 1):
                shade = ON_STRONG if matrix[t, i] > 50 else INK
                axes.text(
                    i, t, f"{matrix[t, i]:.0f}", ha="center", va="center", fontsize=8, color=shade, in_layout=False
                )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlabel("classes of stage")
    axes.set_ylabel("after stage")
    axes.set_title(_title(group, predictor))
    alt = f"Accuracy matrix of {group.label}: rows are stages, columns the classes that came in each stage."
    return finish(figure, group.key("accuracy_matrix", predictor), alt)


def _heat_map(axes: Axes, values: np.ndarray, label: str) -> None:
    axes.imshow(values, cmap=_RAMP, vmin=0, vmax=100, interpolation="none")
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = axes.inset_axes((1.03, 0.0, 0.03, 1.0))
    bar.imshow(np.linspace(100, 0, 101)[:, None], cmap=_RAMP, vmin=0, vmax=100, aspect="auto", extent=(0, 1, 0, 100))
    bar.set_xticks([])
    bar.set_yticks([0, 50, 100])
    bar.yaxis.tick_right()
    bar.grid(False)
    bar.tick_params(length=0, labelsize=8)
    bar.spines[:].set_visible(False)
    bar.set_ylabel(label, fontsize=8.5, labelpad=2)
    bar.yaxis.set_label_position("right")


def _title(group: RunGroup, predictor: str | None = None) -> str:
    """Group, predictor and number of runs; on two lines if one would be too long."""
    parts = [] if predictor is None else [predictor_name(predictor)]
    if group.n > 1:
        parts.append(f"mean of {group.n} runs")
    label = plain_label(group.label, 34)
    return (", " if len(label) <= 14 else "\n").join(filter(None, [label, ", ".join(parts)]))


def learned_and_kept(group: RunGroup, index: int, predictor: str) -> Drawing:
    """For the classes of each stage: accuracy when they were learned (ring) and at the end (dot)."""
    matrix = group.matrix(predictor)
    x, learned, kept = np.arange(len(matrix)), np.diag(matrix), matrix[-1]
    figure, axes = new_figure(4.2, 3.1)
    size = 5.5 if len(x) <= 20 else 3.6
    axes.vlines(x, learned, kept, color=colour(index), alpha=0.4, linewidth=2, zorder=2)
    ring = {"markerfacecolor": CARD, "markeredgecolor": colour(index), "markersize": size}
    dot = {"markerfacecolor": colour(index), "markeredgecolor": colour(index), "markersize": size}
    axes.plot(x, learned, "o", label="when learned", zorder=3, clip_on=False, **ring)
    axes.plot(x, kept, "o", label="after the last stage", zorder=4, clip_on=False, **dot)
    axes.set_ylim(0, 100)
    axes.grid(False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=11))
    axes.set_xlabel("classes of stage")
    axes.set_ylabel("accuracy, %")
    axes.set_title(_title(group, predictor))
    figure.legend(loc="outside lower left", ncols=2, handletextpad=0.2, columnspacing=1.2)
    alt = f"{group.label}: accuracy of each stage's classes when they were learned and after the last stage."
    return finish(figure, group.key("learned_and_kept", predictor), alt)


def confusion(group: RunGroup, predictor: str) -> Drawing:
    """Row-normalised confusion matrix after the last stage, with class names if they fit."""
    order = "in order of arrival" if group.has_one_order else "in the data set's order"
    title = _title(group, predictor).replace("mean of", "sum of")
    alt = f"Confusion matrix of {group.label} after the last stage: rows true classes, columns predicted."
    name = group.key("confusion", predictor)
    return confusion_matrix(group.confusion(predictor), group.class_names, order, title, name, alt)


def needs_width(classes: int) -> bool:
    """Whether the names in a confusion matrix with this many classes would be too small on a phone."""
    return NUMBERED_STAGES < classes <= _LISTED_CLASSES


def confusion_matrix(
    counts: np.ndarray, class_names: Sequence[str], order: str, title: str, name: str, alt: str
) -> Drawing:
    """Confusion matrix in percent of the true class. order: how the classes are sorted, in words."""
    percent = row_percent(counts)
    size = len(percent)
    side = 6.4 if needs_width(size) else WIDTH
    if _LARGE_NAMES < size <= NAMED_CLASSES:
        side = 1.6 + 0.19 * size
    is_listed = NAMED_CLASSES < size <= _LISTED_CLASSES
    below = _KEY_LINE * math.ceil(size / _KEY_COLUMNS) if is_listed else 0.0
    figure, axes = new_figure(side, side - 0.2 + below)
    numbers = "" if size <= NAMED_CLASSES else ", numbered as below" if is_listed else f", {order}, as in the CSV file"
    if is_listed:
        _list_classes(figure, class_names, below)
    _heat_map(axes, percent, "share of the true class's test images, %")
    if size <= NAMED_CLASSES:
        names = [plain(name, 18) for name in class_names]
        letters = 9 if size <= _LARGE_NAMES else 8
        axes.set_xticks(range(size), names, rotation=90, fontsize=letters)
        axes.set_yticks(range(size), names, fontsize=letters)
        if size <= NUMBERED_STAGES:
            for row, column in np.argwhere(np.nan_to_num(percent) >= 0.5):
                shade = ON_STRONG if percent[row, column] > 50 else INK
                text = f"{percent[row, column]:.0f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=9, color=shade, in_layout=False)
    axes.set_xlabel(f"predicted class{numbers}")
    axes.set_ylabel(f"true class{numbers}")
    axes.set_title(title)
    return finish(figure, name, alt)


def _list_classes(figure: Figure, class_names: Sequence[str], height: float) -> None:
    """List the classes with their numbers, column by column, in the lowest part of a figure. height: inches."""
    share = height / figure.get_figheight()
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, share, 1, 1 - share)))
    lines = math.ceil(len(class_names) / _KEY_COLUMNS)
    for number, name in enumerate(class_names):
        column, line = divmod(number, lines)
        x, y = 0.02 + 0.98 * column / _KEY_COLUMNS, share * (1 - (line + 0.5) / lines)
        figure.text(x, y, f"{number} {plain_label(name, 20)}", va="center", fontsize=8.5, in_layout=False)


def importance(group: RunGroup) -> Drawing:
    """Importance of each map's channels from the highest to the lowest, against the share of channels."""
    figure, axes = new_figure(WIDTH, 3.6)
    maps = group.importance()
    means = [values.mean(axis=0) for values in maps]
    low, high = min(float(m.min()) for m in means), max(float(m.max()) for m in means)
    for index, (values, mean) in enumerate(zip(maps, means, strict=True)):
        x = 100 * (np.arange(len(mean)) + 0.5) / len(mean)
        band = (values.min(axis=0), values.max(axis=0)) if group.n > 1 else None
        draw_line(axes, index, x, mean, band, f"Z_{index + 1} ({len(mean)} channels)", markers=8)
    if low > 0 and high / low > 40:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(0, high * 1.05)
    axes.set_xlim(0, 100)
    importance_axes(figure, axes, "map, most important first, %", _title(group), columns=2)
    alt = f"Sorted channel importance of {group.label} after its last stage, one curve per map."
    return finish(figure, group.key("importance"), alt)


def time_spent(groups: Sequence[RunGroup]) -> Drawing:
    """Stacked bars of seconds: one per run, or one per group (mean) if there are many runs."""
    parts = tables.time_parts(groups)
    by_run = sum(group.n for group in groups) <= _BARS
    rows: list[tuple[str, np.ndarray]] = []
    for group in groups:
        full = [tables.time_spent(run, parts) for run in group.runs]
        name = plain_label(group.label, 26)
        if by_run and group.n > 1:
            rows += [
                (f"{name}, {plain(run.manifest.order.name, 20)}/{plain(run.seed, 20)}", np.array(r))
                for run, r in zip(group.runs, full, strict=True)
            ]
        else:
            mean = "" if group.n == 1 else f", mean of {group.n}"
            rows.append((name + mean, np.mean(full, axis=0)))
    figure, axes = new_figure(WIDTH, 1.55 + 0.3 * len(rows))
    left = np.zeros(len(rows))
    for index, part in enumerate([*parts, "other"]):
        widths = np.array([row[index] for _, row in rows])
        if widths.sum() > 0:
            shade = colour(index) if part != "other" else GRID
            axes.barh(
                range(len(rows)), widths, left=left, height=0.62, color=shade, edgecolor=CARD, label=plain(part, 40)
            )
        left += widths
    for y, total in enumerate(left):
        axes.text(total, y, f"  {total:.1f} s", va="center", fontsize=9, color=MUTED)
    axes.set_xlim(0, float(left.max()) * 1.16 or 1.0)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("seconds")
    figure.legend(loc="outside upper left", ncols=3, handlelength=0.8, columnspacing=0.9, handletextpad=0.4)
    return finish(figure, "seconds", "Seconds of each run, split into the kinds of work.")


def training_loss(group: RunGroup) -> Drawing:
    """Loss terms of the main phase of the group's first run, per epoch, with a vertical line at each new stage."""
    points = group.first.main_losses
    figure, axes = new_figure(WIDTH, 3.1)
    x = np.arange(1, len(points) + 1)
    for index, term in enumerate(dict.fromkeys(name for point in points for name in point.terms)):
        values = np.array([point.terms.get(term, np.nan) for point in points])
        axes.plot(
            x,
            values,
            color=colour(index),
            linestyle="-" if index % 2 == 0 else (0, (4, 1.4)),
            label=plain(term),
        )
    starts = [i for i in range(1, len(points)) if points[i].stage != points[i - 1].stage]
    for start in starts:
        axes.axvline(start + 0.5, color=GRID, linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    first = points[0].stage  # above 0 if another run trained the base stage
    axes.set_xlabel(f"epochs of the main phase, {f'from stage {first} on' if first else 'all stages'}")
    axes.set_ylabel("mean loss of the epoch")
    axes.set_title(plain_label(group.label, 40))
    figure.legend(loc="outside lower left", ncols=2, columnspacing=1.2)
    alt = f"Training loss of {group.label}, per epoch; vertical lines mark the stages."
    return finish(figure, group.key("loss"), alt)
