"""Writes docs/bench.md, methods with plain and strong augmentation: python tools/compare_bench.py OUT RESULTS

RESULTS is the folder with the runs (*.jsonl), what each method keeps (kept-bytes.json, by tools/measure_kept.py) and
the times of the methods (methods-*.json, by `python -m benchmarks`). Two pictures go to the folder images beside OUT.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from compare_methods import CARDS, Cost, read_times
from compare_picture import Point, Words, scatter
from engram.core.errors import EngramError
from engram.core.io import read_json, write_bytes
from engram.report.formatting import NOTHING, decimal, spread
from engram.report.svg import Drawing
from engram.reproduce.cell_plan import PaperRequest, make_plan
from engram.reproduce.cells import Measured, measure
from engram.reproduce.paper import load_paper
from engram.reproduce.records import Record
from engram.reproduce.results_files import merge, read_results

COMMAND = "python tools/compare_bench.py docs/bench.md results"
RUN = "engram reproduce b50 b0 --paper bench"
KEPT = "kept-bytes.json"
COLUMN = "10 stages"
SEED = 1
PLAIN, STRONG = "plain", "strong"
GROUPS = {PLAIN: "plain augmentation", STRONG: "strong augmentation (TrivialAugment or AutoAugment)"}
BY_BYTES = Words(
    "Accuracy and memory",
    "kept between stages, MB",
    "Average incremental accuracy of each method with 10 stages against what it keeps between stages.",
    GROUPS,
)
BY_SECONDS = Words(
    "Accuracy and time",
    "seconds of a whole run with plain augmentation, alone",
    "Average incremental accuracy of each method with 10 stages against the seconds of a whole run.",
    GROUPS,
)


class BenchRow:
    """A row: its cells by column, and what it costs."""

    def __init__(self, cells: Sequence[Measured], kept: dict[str, int] | None, cost: Cost | None) -> None:
        self.cells = {cell.cell.column.label: cell for cell in cells}
        self.first = cells[0].cell
        self.kept = None if kept is None else sum(kept.values()) / 1e6
        self.cost = cost

    @property
    def was_run(self) -> bool:
        """Whether any of its cells has a number."""
        return any(cell.n for cell in self.cells.values())

    @property
    def label(self) -> str:
        """Its name, which leads to the card of its method."""
        card = CARDS.get(self.first.row.recipe, f"{self.first.row.recipe}.md")
        place = "afc.md" if card == "../afc.md" else f"methods/{card}"
        return f"[{self.first.row.label}]({place})"

    @property
    def group(self) -> str:
        """Whether it has a policy of augmentation."""
        return PLAIN if self.first.wanted[0].config.augmentation.policy == "none" else STRONG

    def numbers(self, columns: Sequence[str], last: str) -> list[str]:
        """The averages with their number of runs, and the accuracy after the last stage of one column."""
        found = [_average(self.cells[column]) for column in columns]
        records = self.cells[last].cell.records if self.cells[last].n else []
        predictor = self.cells[last].cell.predictor or ""
        return [*found, decimal(fmean(run.result.final_accuracy[predictor] for run in records)) if records else NOTHING]


def _average(cell: Measured) -> str:
    return NOTHING if cell.ours is None else f"{spread(cell.ours)} (n = {cell.n})"


def rows_of(name: str, records: Sequence[Record], results: Path) -> list[BenchRow]:
    """The rows of an experiment of the bench, the most accurate first."""
    kept = read_json(results / KEPT)["rows"] if (results / KEPT).exists() else {}
    costs, _ = read_times(results)
    groups: dict[str, list[Measured]] = {}
    for cell in make_plan(load_paper(Path("bench")).find([name]), records, PaperRequest(seeds=[SEED])).cells:
        groups.setdefault(cell.row.label, []).append(measure(cell))
    rows = [
        BenchRow(cells, kept.get(label), costs.get(cells[0].cell.wanted[0].config.method))
        for label, cells in groups.items()
    ]
    return sorted(rows, key=lambda row: -max((cell.ours.mean for cell in row.cells.values() if cell.ours), default=0))


def table(rows: Sequence[BenchRow], columns: Sequence[str], last: str, costs: bool) -> str:
    """The rows that were run, as Markdown."""
    header = ["", *columns, f"last ({last})"] + (["kept, MB", "seconds, plain"] if costs else [])
    lines = [header, ["---"] * len(header)]
    for row in rows:
        if row.was_run:
            kept = NOTHING if row.kept is None else decimal(row.kept, 1)
            seconds = NOTHING if row.cost is None else decimal(row.cost.run, 0)
            lines.append([row.label, *row.numbers(columns, last), *([kept, seconds] if costs else [])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def missing(rows: Sequence[BenchRow]) -> str:
    """A sentence about the rows that were not run."""
    names = [row.first.row.label for row in rows if not row.was_run]
    return f"Not run yet: {'; '.join(names)}.\n" if names else ""


def pictures(rows: Sequence[BenchRow]) -> list[Drawing]:
    """Accuracy with 10 stages against kept bytes, and against seconds."""
    done = [(row, ours.mean) for row in rows if (ours := row.cells[COLUMN].ours) is not None]
    by_bytes = [Point(row.first.row.label, row.group, row.kept, mean) for row, mean in done if row.kept]
    by_time = [
        Point(row.first.row.label, row.group, row.cost.run, mean)
        for row, mean in done
        if row.cost is not None and row.group == PLAIN
    ]
    found = [("bench-bytes", by_bytes, BY_BYTES), ("bench-seconds", by_time, BY_SECONDS)]
    return [scatter(name, points, words) for name, points, words in found if points]


def compare(results: Path) -> tuple[str, list[Drawing]]:
    """The page and its pictures."""
    records = merge(read_results([results]).records)
    b50, b0 = (rows_of(name, records, results) for name in ("b50", "b0"))
    columns = ["50 stages", "25 stages", "10 stages", "5 stages"]
    drawings = pictures(b50)
    images = "".join(f"![{drawing.alt}](images/{drawing.name}.svg)\n\n" for drawing in drawings)
    page = f"""# The open bench

Methods under one protocol, each with plain and with strong augmentation: CIFAR-100, ResNet-32, seed {SEED}, average
incremental accuracy in %, mean ± standard deviation over class orders (n says how many of 1, 2 and 3 were run).

Made by `{COMMAND}` from [`results/`](../results/README.md); a test checks
that it is what this command gives. `{RUN}` runs what is missing (`--rows`, `--columns` and
`--orders` choose; all of it takes about 15 hours of one H200).

- **plain**: crop, mirror image and brightness, as in the AFC paper. **strong**: TrivialAugment and cutout 8 on top, in
  every stage, and nothing else changed. Rows with other words say what their authors used.
- **last**: accuracy after the last stage of the column that is named.
- **kept**: everything that is carried from stage to stage except the teacher, which is a copy of the network: weights,
  exemplars as 8-bit images, statistics (`results/{KEPT}`, by `python tools/measure_kept.py`).
- **seconds, plain**: of a whole run with 10 stages, alone on one H200, extrapolated from a short one
  ([how](benchmark.md#methods-what-each-method-costs)); – where it was not measured.

## 50 base classes

20 exemplars per class, for the methods that keep any.

{table(b50, columns, COLUMN, costs=True)}
{missing(b50)}
{images}## No large base stage

Ten stages of ten classes, 2,000 exemplars in total, class order `numpy:1993`.

{table(b0, [COLUMN], COLUMN, costs=False)}
{missing(b0)}"""
    return page.rstrip() + "\n", drawings


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and its pictures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("results", type=Path)
    given = options.parse_args(arguments)
    page, drawings = compare(given.results)
    write_bytes(given.out, page.encode())
    for drawing in drawings:
        write_bytes(given.out.resolve().parent / "images" / f"{drawing.name}.svg", drawing.svg.encode())


if __name__ == "__main__":
    try:
        main()
    except EngramError as error:
        raise SystemExit(f"error: {error}") from None
