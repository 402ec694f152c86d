"""A table of results as text: Markdown, LaTeX, HTML and the cells of a CSV file or a pandas frame."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from engram.core.errors import EngramError
from engram.core.metrics import Estimate

Cell = str | int | float | Estimate | None
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
}


@dataclass(frozen=True)
class ResultTable:
    """A table. header: the names of the columns. rows: text, numbers, or estimates over several runs.

    In a notebook it is shown as HTML.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def cells(self) -> tuple[list[str], list[list[str | int | float | None]]]:
        """Return header and rows without rounding; a column of estimates becomes two, its mean and its "std"."""
        split = {i for i in range(len(self.header)) if any(isinstance(row[i], Estimate) for row in self.rows)}
        header: list[str] = []
        for i, name in enumerate(self.header):
            header += [name, f"{name} std"] if i in split else [name]
        rows: list[list[str | int | float | None]] = []
        for row in self.rows:
            flat: list[str | int | float | None] = []
            for i, cell in enumerate(row):
                value, std = (cell.mean, cell.std) if isinstance(cell, Estimate) else (cell, None)
                flat += [value, std] if i in split else [value]
            rows.append(flat)
        return header, rows

    def to_frame(self) -> Any:
        """Return the cells as a pandas frame."""
        header, rows = self.cells()
        return pandas().DataFrame(rows, columns=header)

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        right = self._numbers()
        lines = [self.header, ["---:" if i in right else "---" for i in range(len(self.header))], *self.rows]
        shown = [
            [_markdown(_text(cell)) if number != 1 else str(cell) for cell in row] for number, row in enumerate(lines)
        ]
        return "".join(f"| {' | '.join(row)} |\n" for row in shown)

    def to_latex(self) -> str:
        r"""Return the table as LaTeX, which needs \usepackage{booktabs}."""
        right = self._numbers()
        columns = "".join("r" if i in right else "l" for i in range(len(self.header)))
        head, *body = (" & ".join(_latex(cell) for cell in row) + r" \\" for row in (self.header, *self.rows))
        begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
        return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end, ""])

    def _repr_html_(self) -> str:
        right = self._numbers()

        def row(tag: str, cells: Sequence[Cell]) -> str:
            align = ("right" if i in right else "left" for i in range(len(cells)))
            shown = (
                f'<{tag} style="text-align:{at}">{escape(_text(cell))}</{tag}>'
                for at, cell in zip(align, cells, strict=True)
            )
            return f"<tr>{''.join(shown)}</tr>"

        body = "".join(row("td", cells) for cells in self.rows)
        return f"<table><thead>{row('th', self.header)}</thead><tbody>{body}</tbody></table>"

    def _numbers(self) -> set[int]:
        """The columns without text, which are aligned to the right."""
        return {i for i in range(len(self.header)) if not any(isinstance(row[i], str) for row in self.rows)}


def pandas() -> Any:
    """Import pandas, which is not a dependency."""
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise EngramError("a frame needs pandas, which is not installed: pip install pandas") from None


def _text(cell: Cell) -> str:
    """Return a cell on one line: accuracies with two decimals, a dash for a number that does not exist."""
    if isinstance(cell, Estimate):
        return f"{cell.mean:.2f}" if cell.std is None else f"{cell.mean:.2f} ± {cell.std:.2f}"
    if isinstance(cell, str):
        return " ".join("".join(sign if sign.isprintable() else " " for sign in cell).split())
    return "–" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", text)


def _latex(cell: Cell) -> str:
    text = _text(cell)
    if isinstance(cell, float | Estimate):
        return "$" + text.replace("±", r"\pm") + "$"
    return "--" if cell is None else "".join(_LATEX.get(sign, sign) for sign in text)
