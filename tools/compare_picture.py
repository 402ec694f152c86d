"""The pictures of tools/compare_methods.py and compare_bench.py: accuracy against cost, every point with its name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from engram.report.formatting import plain
from engram.report.svg import CARD, INK, MARKERS, MUTED, SERIES, Drawing, drawing_style, finish

WIDTH, HEIGHT = 8.0, 7.2  # inches
DEPTH = 25.0  # percent below the best; what is lower stands at the lower edge, or all others would be a heap
SIZE, LINE, GAP = 9.0, 11.0, 7.0  # points: letters, lines, from a point to its name
LETTER = 0.58 * SIZE  # its mean width, rather too much
# Where a name may stand as seen from its point, the nearest first.
OFFSETS = sorted(
    (
        (side * (GAP + out), lift * LINE / 2)
        for side in (1, -1)
        for out in (0, 12, 30, 60, 120)
        for lift in range(-30, 31)
    ),
    key=lambda one: math.hypot(*one),
)
Box = tuple[float, float, float, float]  # left, bottom, right, top; points


@dataclass(frozen=True)
class Point:
    """A run: its name, the group that it is drawn with, its cost, percent."""

    label: str
    group: str
    cost: float
    accuracy: float


@dataclass(frozen=True)
class Words:
    """The words of a picture. groups: what the legend says of each group of points."""

    title: str
    cost: str
    alt: str
    groups: Mapping[str, str]


def scatter(name: str, points: Sequence[Point], words: Words) -> Drawing:
    """The points, the cost on a logarithmic axis; names stand beside them where there is room."""
    least = max(point.accuracy for point in points) - DEPTH
    points = [point if point.accuracy >= least else _sunk(point, least) for point in points]
    with drawing_style():
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=72)  # so that a unit on the canvas is a point
        axes = figure.add_axes((0.08, 0.09, 0.9, 0.79))
        _scale(axes, points)
        for index, (group, said) in enumerate(words.groups.items()):
            some = [point for point in points if point.group == group]
            xy = [point.cost for point in some], [point.accuracy for point in some]
            style = {"color": SERIES[index], "marker": MARKERS[index], "edgecolors": CARD, "linewidths": 0.8}
            if some:
                axes.scatter(*xy, s=44, label=said, zorder=3, **style)
        _name(axes, points)
        axes.set_xlabel(words.cost)
        axes.set_ylabel("average incremental accuracy, %")
        axes.set_title(words.title, pad=28)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, fontsize=10, handletextpad=0.3)
        return finish(figure, name, words.alt)


def _sunk(point: Point, least: float) -> Point:
    """A point at the lower edge, whose name tells where it is."""
    return replace(point, label=f"{point.label} (at {point.accuracy:.1f})", accuracy=least)


def _scale(axes: Axes, points: Sequence[Point]) -> None:
    """Round numbers along the cost, 1, 2 and 5 of each power of ten, and room for names on both sides."""
    cost, values = [point.cost for point in points], [point.accuracy for point in points]
    low, high = min(cost) / 1.4, max(cost) * 1.4
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(values) - 2, max(values) + 2)
    ticks = [digit * 10.0**power for power in range(-3, 8) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:,g}" for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _name(axes: Axes, points: Sequence[Point]) -> None:
    """Writes each name as near to its point as neither points nor other names stand, with a line where it is apart."""
    spots = [(float(x), float(y)) for x, y in axes.transData.transform([(p.cost, p.accuracy) for p in points])]
    canvas = axes.bbox.x0, axes.bbox.y0, axes.bbox.x1 + GAP, axes.bbox.y1
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in spots]
    names: list[Box] = []
    for (x, y), point in sorted(zip(spots, points, strict=True), key=lambda one: -one[0][1]):
        label = plain(point.label, 40)
        choices = [(_box(x + dx, y + dy, (len(label) + 1) * LETTER, dx > 0), dx, dy) for dx, dy in OFFSETS]
        free = [one for one in choices if _within(one[0], canvas) and not _meets(one[0], taken)]
        others = names + [(a - 3, b - 3, a + 3, b + 3) for a, b in spots if (a, b) != (x, y)]
        clear = [one for one in free if not any(_meets(box, others) for box in _line(x, y, *one[1:]))]
        box, dx, dy = (clear or free or choices)[0]
        taken += [box, *_line(x, y, dx, dy)]
        names.append(box)
        side, apart = ("left", 0.0) if dx > 0 else ("right", 1.0), abs(dy) > LINE / 2 or abs(dx) > GAP
        line = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(
            label,
            (point.cost, point.accuracy),
            (dx, dy),
            textcoords="offset points",
            ha=side[0],
            va="center",
            color=INK,
            fontsize=SIZE,
            arrowprops={**line, "relpos": (side[1], 0.5)} if apart else None,
        )


def _box(x: float, y: float, width: float, right: bool) -> Box:
    """The room of a name that begins at that place, or ends there."""
    left = x if right else x - width
    return left, y - LINE / 2, left + width, y + LINE / 2


def _line(x: float, y: float, dx: float, dy: float) -> list[Box]:
    """Small boxes along the line from a point to its name, the point's own surroundings aside."""
    shares = [i / 10 for i in range(3, 10)] if abs(dy) > LINE / 2 or abs(dx) > GAP else []
    return [(x + t * dx - 1, y + t * dy - 1, x + t * dx + 1, y + t * dy + 1) for t in shares]


def _meets(one: Box, others: Sequence[Box]) -> bool:
    return any(one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3] for two in others)


def _within(one: Box, two: Box) -> bool:
    return one[0] >= two[0] and one[1] >= two[1] and one[2] <= two[2] and one[3] <= two[3]
