"""Matplotlib figures as reproducible SVG text, and as PDF and PNG files.

A figure is drawn once with the hex colours below. On the page each of them becomes a CSS variable, so the figure
follows the reader's light or dark setting; the file next to the page keeps the hex colours.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, MUTED, GRID, CARD, ON_STRONG = "#1d2630", "#5b6775", "#dde2e8", "#fffffe", "#fefefe"
SERIES = ("#0b6bb3", "#c8501e", "#00875f", "#94489a", "#a37500", "#2193bd", "#6d737c", "#7b3f22")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")

_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "line", CARD: "card", ON_STRONG: "on-strong"} | {
    colour: f"s{i}" for i, colour in enumerate(SERIES)
}
_COLOUR = re.compile("|".join(_VARIABLES))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # real text: it uses the reader's font, can be searched, and is small
    "text.parse_math": False,  # a class may be called "$5"
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib, so the layout is the same everywhere
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.titlepad": 10,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10.5,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.linewidth": 1,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
    "figure.facecolor": CARD,
    "savefig.facecolor": CARD,
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure: file name without suffix, SVG text, and a description. figure: to draw it in another form."""

    name: str
    svg: str
    alt: str
    figure: Figure | None = field(default=None, repr=False, compare=False)

    @property
    def inline(self) -> str:
        """The figure as an element of an HTML page, in the page's colours."""
        body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", self.svg[self.svg.index("<svg") :], count=2)
        # Only inside tags: a class may be called "fill: #1d2630".
        body = re.sub(r"<[^>]*>", lambda tag: _COLOUR.sub(lambda found: f"var(--{_VARIABLES[found[0]]})", tag[0]), body)
        return body.replace("<svg ", f'<svg role="img" aria-label="{escape(self.alt)}" ', 1)

    def pdf(self) -> bytes:
        """The figure as a PDF file for papers, with its text as TrueType fonts.

        The font has no Chinese, Japanese or Korean characters: they are drawn as boxes.
        """
        return self._drawn(FigureCanvasPdf, {"pdf.fonttype": 42}, "print_pdf", metadata={"CreationDate": None})

    def png(self) -> bytes:
        """The figure as a PNG file."""
        return self._drawn(FigureCanvasAgg, {}, "print_png")

    def _drawn(self, canvas: type[FigureCanvasBase], style: dict[Any, Any], method: str, **how: Any) -> bytes:
        assert self.figure is not None
        content = io.BytesIO()
        with drawing_style(), mpl.rc_context(style):
            getattr(canvas(self.figure), method)(content, **how)
        return content.getvalue()


@contextmanager
def drawing_style() -> Iterator[None]:
    """Context in which figures have the style of the report, and names in any script are drawn without a warning."""
    with warnings.catch_warnings(), mpl.rc_context():
        mpl.rcdefaults()  # a reader's own matplotlibrc must not change the report
        mpl.rcParams.update(_STYLE)
        # The font used for measuring lacks some scripts; the reader's browser draws the text and has them.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=r"Matplotlib currently does not support .* natively")
        yield


def finish(figure: Figure, name: str, alt: str) -> Drawing:
    """Return the figure as SVG text that depends only on what was drawn."""
    text = io.StringIO()
    # Ids inside the file are hashes; the salt makes them differ between figures that share a page.
    with mpl.rc_context({"svg.hashsalt": name.encode(errors="replace").decode()}):
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        FigureCanvasSVG(figure).print_svg(text, metadata=nothing)
    svg = re.sub(r"<!DOCTYPE[^>]*>\s*", "", text.getvalue())
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # counters, the same in every figure
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*pt" height="[^"]*pt"', r"\1", svg, count=1)
    return Drawing(name, svg, alt, figure)
