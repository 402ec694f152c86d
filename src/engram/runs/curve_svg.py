"""A small drawing of accuracy against classes seen, as an SVG element for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle

WIDTH, HEIGHT = 360, 160
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 70, 8, 24
_COLOURS = ("#0b6bb3", "#c8501e", "#00875f", "#94489a", "#a37500", "#2193bd")  # readable on light and dark pages


def curve_svg(classes: Sequence[int], curves: Mapping[str, Sequence[float]]) -> str:
    """Return the drawing. classes: seen after each stage. curves: accuracy in percent after each stage, by name."""
    low, high = min(classes), max(classes)

    def x(seen: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (seen - low) / max(1, high - low)

    def y(percent: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - percent / 100)

    parts = []
    for percent in (0, 50, 100):
        at = f"{y(percent):.1f}"
        parts.append(f'<path d="M{_LEFT} {at}H{WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity=".2"/>')
        parts.append(_label(_LEFT - 5, y(percent) + 4, f"{percent}", "end"))
    parts += [_label(x(seen), HEIGHT - 8, f"{seen}", "middle") for seen in dict.fromkeys((low, high))]
    parts.append(_label((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, "classes seen", "middle"))
    below = 0.0
    highest_first = sorted(curves.items(), key=lambda item: -item[1][-1])
    for (name, values), colour in zip(highest_first, cycle(_COLOURS), strict=False):
        points = [f"{x(seen):.1f},{y(value):.1f}" for seen, value in zip(classes, values, strict=True)]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="2.5" fill="{colour}"/>' for p in points]
        below = max(y(values[-1]) + 4, below + 12)  # labels one below the other, where lines end close together
        parts.append(_label(WIDTH - _RIGHT + 6, below, f"{name[:9]} {values[-1]:.1f}", "start", colour))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    label = "accuracy in percent against classes seen"
    return f'<svg {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _label(x: float, y: float, text: str, anchor: str, colour: str = "currentColor") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="11" font-family="sans-serif"'
    return f"<text {place}>{escape(text)}</text>"
