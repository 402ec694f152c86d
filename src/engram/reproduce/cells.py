"""The numbers of a cell: ours over its runs, the paper's, and their difference; and what they say together.

A cell without runs has no number of ours; the paper's number is never used instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engram.core.metrics import Difference, Estimate, estimate, paired
from engram.report.formatting import ACCURACY_WORDS, count_runs, join, predictor_name
from engram.reproduce.cell_plan import NOT_IN_PAPER, PaperCell, PaperPlan
from engram.reproduce.paper import Paper, Remark
from engram.reproduce.records import Record

Mark = Literal["within one standard deviation", "within one point", "further off", "not run", "nothing published"]
WITHIN_STD: Mark = "within one standard deviation"
WITHIN_POINT: Mark = "within one point"
FURTHER: Mark = "further off"
NOT_RUN: Mark = "not run"
UNPUBLISHED: Mark = "nothing published"
MARKS: dict[Mark, str] = {WITHIN_STD: "●", WITHIN_POINT: "◐", FURTHER: "○", NOT_RUN: "–", UNPUBLISHED: " "}
KEPT_NOTHING = "run, but no importance was kept"
POINT = 1.0
_SLACK = 1e-9  # rounding of a difference that is exactly on the limit
_NEAR = {  # in the order of the headline
    WITHIN_STD: "within the paper's standard deviation",
    WITHIN_POINT: "within one point",
    FURTHER: "further off",
}


@dataclass(frozen=True, eq=False)
class Measured:
    """A cell with its numbers. ours: None without runs. difference: ours minus the paper's."""

    cell: PaperCell
    ours: Estimate | None
    difference: float | None
    mark: Mark

    @property
    def n(self) -> int:
        """Number of runs."""
        return 0 if self.ours is None else self.ours.n

    @property
    def why(self) -> str:
        """Why there is no number of ours; empty if there is one."""
        return "" if self.ours is not None else self.cell.reason or self.lacking

    @property
    def lacking(self) -> str:
        """The missing part, whatever this version could run."""
        return KEPT_NOTHING if self.cell.bare else NOT_RUN

    @property
    def in_paper(self) -> bool:
        """Whether the paper has a number in this cell."""
        return self.cell.reason != NOT_IN_PAPER


def measure(cell: PaperCell) -> Measured:
    """Compute the numbers of a cell."""
    name = cell.experiment.measure
    values = [] if cell.predictor is None else [record.value(name, cell.predictor) for record in cell.records]
    ours = estimate(values) if values else None
    if ours is None:
        return Measured(cell, None, None, NOT_RUN)
    if cell.published is None:
        return Measured(cell, ours, None, UNPUBLISHED)
    difference = ours.mean - cell.published.mean
    return Measured(cell, ours, difference, _mark(abs(difference), cell.published.deviation))


def measure_all(plan: PaperPlan) -> list[Measured]:
    """Compute the numbers of every cell."""
    return [measure(cell) for cell in plan.cells]


def _mark(difference: float, std: float | None) -> Mark:
    if std is not None and difference <= std + _SLACK:
        return WITHIN_STD
    return WITHIN_POINT if difference <= POINT + _SLACK else FURTHER


def each_once(cells: Sequence[Measured]) -> list[list[Measured]]:
    """Group the cells that repeat the same published number, measured cells first.

    Equal numbers in two columns of one table are different numbers. Cells without a published number are left out.
    """
    found: dict[object, dict[str, list[Measured]]] = {}  # by number, then by the column of its first cell
    for measured in cells:
        cell = measured.cell
        if cell.published is None:
            continue
        places = found.setdefault(cell.experiment.number(cell.row, cell.column, cell.published), {})
        others = [place for place, (one, *_) in places.items() if one.cell.experiment is not cell.experiment]
        places.setdefault(others[0] if others else cell.column.label, []).append(measured)
    groups = [group for places in found.values() for group in places.values()]
    return [sorted(group, key=lambda measured: measured.mark == NOT_RUN) for group in groups]


def effect(base: PaperCell, cell: PaperCell) -> Difference | None:
    """Difference to a base cell, over pairs of runs with the same class order and seed; None without pairs."""
    name = cell.experiment.measure

    def values(one: PaperCell) -> dict[tuple[str, int], float | None]:
        return {(record.order.name, record.seed): record.value(name, one.predictor or "") for record in one.records}

    return paired(values(cell), values(base))


def effect_of(cell: PaperCell, first: PaperCell) -> Difference | None:
    """Difference to the first row in a table of effects; None for the first row and in other tables."""
    return effect(first, cell) if cell.experiment.kind == "effects" and cell is not first else None


def curve(cell: PaperCell) -> tuple[list[int], list[Estimate]] | None:
    """Classes seen and accuracy after each stage over the cell's runs; None without runs."""
    curves = [record.curve(cell.predictor or "") for record in cell.records]
    if not curves or not curves[0] or len({tuple(seen for seen, _ in line) for line in curves}) > 1:
        return None
    columns = zip(*([value for _, value in line] for line in curves), strict=True)
    estimates = [value for column in columns if (value := estimate(column)) is not None]
    return [seen for seen, _ in curves[0]], estimates


def predictor_of(measured: Measured) -> str:
    """Name of the predictor as papers write it; empty if the cell has none."""
    return "" if measured.cell.predictor is None else predictor_name(measured.cell.predictor)


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
        f"{count_runs(len(records))} on {where}. Cells without runs have no number of ours. {ACCURACY_WORDS}"
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
