"""Puts what was measured of each method into its card: python tools/fill_cards.py CARDS RESULTS

CARDS is the folder of the cards (docs/methods), RESULTS the folder with the runs. What stands in a card between the two
comments of `BEGIN` and `END` is replaced: the paper's numbers of the method in Tables 1 and 4, what has no number there
(the experiment `methods`), and ours beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from engram.core.errors import EngramError
from engram.core.io import write_bytes
from engram.report.formatting import NOTHING, signed, spread
from engram.reproduce.cell_plan import make_plan
from engram.reproduce.cells import Measured, measure
from engram.reproduce.paper import load_paper
from engram.reproduce.paper_tables import MARKS, count
from engram.reproduce.records import Record
from engram.reproduce.results_files import merge, read_results

COMMAND = "python tools/fill_cards.py docs/methods results"
BEGIN, END = f"<!-- made by `{COMMAND}` -->", "<!-- until here -->"
METHODS = {
    "bounds": ("naive", "joint"),
    "dde": ("ucir-dde", "podnet-dde"),
}  # of a card whose method is not called as its file is
HEADINGS = {"table1": "Table 1: ", "table4": "Table 4, 50 stages: ", "methods": ""}  # of the experiments
WHAT = "CIFAR-100, 50 base classes, average incremental accuracy in %"


def fill(text: str, table: str) -> str:
    """The card with that between its comments."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise EngramError(f"the card has no place for what was measured: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def table_of(methods: Sequence[str], cells: Sequence[Measured]) -> str:
    """The cells of those methods, a line each."""
    lines = ["| | published | measured here | difference |", "|---|---|---|---|"]
    for cell in cells:
        row, column = cell.cell.row, cell.cell.column
        if row.recipe in methods and cell.in_paper:
            label = f"{HEADINGS[cell.cell.experiment.name]}{row.label}, {column.label}".replace("*", "\\*")
            lines.append(f"| {label} | {spread(cell.cell.published)} | {_ours(cell)} | {_difference(cell)} |")
    if len(lines) == 2:
        raise EngramError(f"no experiment has a row of {' or '.join(methods)}")
    runs = [record for cell in cells if cell.cell.row.recipe in methods for record in cell.cell.records]
    return f"{WHAT}.{_where(runs)}\n\n" + "".join(f"{line}\n" for line in lines)


def _ours(cell: Measured) -> str:
    if cell.ours is None:
        return "not run"
    orders = sorted({record.order.name for record in cell.cell.records})
    some = "" if len(orders) == len(cell.cell.experiment.orders) > 1 else f", class order {', '.join(orders)}"
    return f"{spread(cell.ours)} ({count(cell)}{some})"


def _difference(cell: Measured) -> str:
    return NOTHING if cell.difference is None else f"{signed(cell.difference)} {MARKS[cell.mark]}"


def _where(runs: Sequence[Record]) -> str:
    if not runs:
        return ""
    found = sorted({f"{run.machine}, {run.precision}, commit {run.commit}" for run in runs})
    return f" Ours: {'; '.join(found)}."


def cards(folder: Path, results: Path) -> dict[Path, str]:
    """Every card with what was measured in it; files without the comments are none."""
    records = merge(read_results([results]).records)
    cells = [measure(cell) for cell in make_plan(load_paper().find(list(HEADINGS)), records).cells]
    found: dict[Path, str] = {}
    for file in sorted(folder.glob("*.md")):
        text = file.read_text(encoding="utf-8")
        if BEGIN in text:
            found[file] = fill(text, table_of(METHODS.get(file.stem, (file.stem,)), cells))
    if not found:
        raise EngramError(f"no card in {folder} has a place for what was measured: {BEGIN}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the cards."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("cards", type=Path)
    options.add_argument("results", type=Path)
    given = options.parse_args(arguments)
    for file, text in cards(given.cards, given.results).items():
        write_bytes(file, text.encode())


if __name__ == "__main__":
    try:
        main()
    except EngramError as error:
        raise SystemExit(f"error: {error}") from None
