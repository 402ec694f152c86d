"""Writes docs/methods/compared.md, what each method gives and costs: python tools/compare_methods.py OUT RESULTS

RESULTS is the folder with the runs (*.jsonl) and the times of the methods (methods-*.json, as `python -m benchmarks`
writes them; of a method in several of them the latest counts). Accuracy against time goes to ../images beside OUT, once
there is a row that has both.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_picture import Point, scatter
from engram.errors import EngramError
from engram.files import read_json, write_bytes
from engram.recipes import recipe, recipe_names
from engram.report.svg import Drawing
from engram.report.tables import predictor_name
from engram.reproduce.cells import Measured, measure, predictor_of
from engram.reproduce.paper import load_paper
from engram.reproduce.plan import Asked, make_plan
from engram.reproduce.records import Record, protocol_key
from engram.reproduce.store import merge, read_results
from engram.reproduce.text import NOTHING, number, signed, spread
from fill_cards import METHODS

COMMAND = "python tools/compare_methods.py docs/methods/compared.md results"
RUN = 'engram reproduce table1 methods --columns "10 stages" --orders 1'
BENCHMARK = "python -m benchmarks --parts methods --epochs 3 --out results/methods-h200.json"
COLUMN, ORDER, SEED = "10 stages", "1", 1
AVERAGE, LAST = "average_incremental_accuracy", "final_accuracy"
FAR = 2.0  # points from the paper
PICTURE = "methods-compared"
# A method's card, which is NAME.md for all others.
CARDS = {"afc": "../afc.md"} | {method: f"{card}.md" for card, methods in METHODS.items() for method in methods}
BORROWED = "† is the time of the method's own recipe, from which the row's differs in a setting; so in the picture."
HEADER = ["", "by", "average", "paper", "less the paper's", "after the last stage", "of its base and later classes"]
HEADER += ["average by the other"]
HEADER += ["ms a step, later stages", "seconds of a run alone"]


@dataclass(frozen=True)
class Cost:
    """step: milliseconds in a later stage, None without a main phase; run: seconds of a whole run, alone."""

    step: float | None
    run: float


@dataclass(frozen=True)
class Row:
    """A row of the table. cost: None where not measured; borrowed: measured with other settings of the method."""

    measured: Measured
    method: str
    cost: Cost | None
    borrowed: bool

    @property
    def record(self) -> Record | None:
        """Its run."""
        return self.measured.cell.records[0] if self.measured.ours is not None else None

    @property
    def label(self) -> str:
        """Its name, which leads to its card."""
        text = self.measured.cell.row.label.replace("*", "\\*")
        return f"[{text}]({CARDS.get(self.method, f'{self.method}.md')})"


def read_times(folder: Path) -> tuple[dict[str, Cost], list[dict[str, Any]]]:
    """What each method costs by the folder's methods-*.json, and those files; refuses files of different hardware."""
    files = sorted(folder.glob("methods-*.json"))
    read = [_read_time_file(file) for file in files]
    machines = [{key: value for key, value in record["hardware"].items() if key != "system"} for _, record in read]
    for file, machine in zip(files, machines, strict=True):
        if machine != machines[0]:
            raise EngramError(f"{files[0]} and {file} were measured on different hardware; leave one of them out")
    read.sort(key=lambda one: one[1]["date"])
    return {name: cost for costs, _ in read for name, cost in costs.items()}, [record for _, record in read]


def _read_time_file(file: Path) -> tuple[dict[str, Cost], dict[str, Any]]:
    record = read_json(file)
    try:
        part = record["parts"]["methods"]
        costs = {name: Cost(one["stage_ms"], one["seconds"]["all"]) for name, one in part["methods"].items()}
        numbers = [part["epochs"], *(cost.run for cost in costs.values())]
        numbers += [cost.step for cost in costs.values() if cost.step is not None]
        texts = [record["date"], record["command"], record["hardware"]["name"], record["versions"]["torch"]]
        usable = all(math.isfinite(value) and value > 0 for value in numbers)
        usable = usable and all(isinstance(text, str) for text in texts) and record["quick"] is False
    except (KeyError, TypeError, AttributeError) as error:
        raise EngramError(f"{file} does not hold the times of methods ({error!r}); `{BENCHMARK}` makes it") from None
    if not usable:
        raise EngramError(f"{file} says nothing of speed: it is damaged or was made with --quick; use `{BENCHMARK}`")
    return costs, record


def rows_of(records: Sequence[Record], costs: dict[str, Cost]) -> list[Row]:
    """The paper's rows with ours beside, the most accurate first, those that were not run last."""
    asked, rows, known = Asked(orders=[ORDER], seeds=[SEED], columns=[COLUMN]), [], set(recipe_names())
    for cell in make_plan(load_paper().find(["table1", "methods"]), records, asked).cells:
        config = cell.wanted[0].config if cell.wanted else None
        method = cell.row.recipe if config is None else config.method
        timed = f"{method}-cifar100-b50-s10"  # the recipe that the benchmark takes
        borrowed = config is not None and timed in known and protocol_key(config) != protocol_key(recipe(timed))
        rows.append(Row(measure(cell), method, costs.get(method), borrowed))
    return sorted(rows, key=lambda row: math.inf if row.measured.ours is None else -row.measured.ours.mean)


def compare(results: Path) -> tuple[str, Drawing | None]:
    """The page, and its picture where there is something to draw."""
    records = merge(read_results([results]).records)
    costs, files = read_times(results)
    rows = rows_of(records, costs)
    drawing = draw(rows)
    image = "" if drawing is None else f"![{drawing.alt}](../images/{drawing.name}.svg)\n\n"
    lines = [HEADER, ["---"] * len(HEADER), *([row.label, predictor_of(row.measured), *_cells(row)] for row in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    far = [(row, by) for row in rows if (by := row.measured.difference) is not None and abs(by) > FAR]
    named = "".join(f"- {signed(by)}: {row.label}, see its card\n" for row, by in far) or "No row that was run.\n"
    page = f"""# The methods compared

What each method gives and what it costs: CIFAR-100, 50 base classes, 10 stages of 5 classes, 20 exemplars a class.

Made by `{COMMAND}` from [`results/`](../../results/README.md) and
the paper's numbers alone; a test checks that it is what this command gives.

- **Ours is one run**: class order {ORDER}, seed {SEED}. The paper's is mean ± standard deviation over three class
  orders, and is never put in place of ours.
{"".join(f"  {sentence}{chr(10)}" for sentence in _orders(records))}- **Accuracy**: {_runs(rows)}
- **Times**: {_timed(files)}

{image}Accuracy, in %, is the average over all stages, the base included, and that after the last stage, by the
predictor that the row reports (CNN is the head, NME the nearest mean of exemplars); the latter also of the base classes
and of those that came later, which says what an average does not: what was kept, and what was learned.
{_still(rows)}Beside it the same run's average by the other predictor.
A star marks what the paper's authors ran again with others' code. Rows without a number of the paper are not in its
Table 1 with 10 stages.{f" {BORROWED}" if any(row.cost and row.borrowed for row in rows) else ""}

{table}
## Further than {FAR:g} points from the paper

{named}{_commands(files)}"""
    return page, drawing


def _orders(records: Sequence[Record]) -> Iterator[str]:
    """How far AFC's one class order is from its mean over all of them."""
    asked = Asked(rows=["AFC"], columns=[COLUMN], seeds=[SEED])
    for cell in make_plan(load_paper().find(["table1"]), records, asked).cells:
        orders, whole = cell.experiment.orders, measure(cell).ours
        one = {run.order: run.value(AVERAGE, cell.predictor or "") for run in cell.records}.get(ORDER)
        if whole is None or whole.n < len(orders) or one is None:
            yield f"How far {cell.row.label} on order {ORDER} is from its mean is unknown: not all orders were run."
            continue
        yield (
            f"{cell.row.label} has {number(one)} on order {ORDER} and {spread(whole)} over orders {', '.join(orders)} "
            f"(n = {whole.n}), so this order is {signed(one - whole.mean)} from the mean."
        )


def _runs(rows: Sequence[Row]) -> str:
    runs = [row.record for row in rows if row.record is not None]
    said = f"{len(runs)} of {len(rows)} rows were run; `{RUN}` runs the others."
    if runs:
        hardware = _listed(f"{run.hardware} ({run.precision})" for run in runs)
        torch = _listed(str(run.data["versions"].get("torch", "unknown")) for run in runs)
        said += f"\n  {hardware}; torch {torch}; commit {_listed(run.commit for run in runs)}."
    return said


def _timed(files: Sequence[dict[str, Any]]) -> str:
    if not files:
        return f"not measured; `{BENCHMARK}` measures them."
    torch, commit = (_listed(file["versions"].get(key, "unknown") for file in files) for key in ("torch", "commit"))
    epochs = " or ".join(dict.fromkeys(str(file["parts"]["methods"]["epochs"]) for file in files))
    return (
        f"{files[0]['hardware']['name']}; torch {torch}; commit {commit}. One short run of each method, alone, on\n"
        f"  random images, {epochs} epochs of each phase and three stages, n = 1; the seconds are extrapolated to the\n"
        "  whole recipe ([how](../benchmark.md#methods-what-each-method-costs), [commands](#commands-of-the-times))."
    )


def _commands(files: Sequence[dict[str, Any]]) -> str:
    lines = "".join(f"    {file['command']}\n" for file in files)
    said = "The oldest first; of a method in several of them the latest counts."
    return f"\n## Commands of the times\n\n{said}\n\n{lines}" if files else ""


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts)))


def _cells(row: Row) -> list[str]:
    """Our numbers, the paper's and the times of a row, or that there are none."""
    cell, record, ours, apart = row.measured.cell, row.record, row.measured.ours, row.measured.difference
    average = last = parts = beside = "not run"
    if record is not None and ours is not None:
        averages, lasts = record.result[AVERAGE], record.result[LAST]
        others = [f"{number(averages[by])} ({predictor_name(by)})" for by in averages if by != cell.predictor]
        average, last, beside = number(ours.mean), number(lasts[cell.predictor]), ", ".join(others) or NOTHING
        parts = " and ".join(number(part, 1) for part in _base_and_later(record, cell.predictor or ""))
    found = [average, spread(cell.published), NOTHING if apart is None else signed(apart), last, parts, beside]
    if row.cost is None:
        return [*found, "not measured", "not measured"]
    mark = " †" if row.borrowed else ""
    return [*found, NOTHING if row.cost.step is None else number(row.cost.step) + mark, number(row.cost.run, 0) + mark]


def _base_and_later(record: Record, predictor: str) -> tuple[float, float]:
    """The accuracy after the last stage on the classes of the base stage, and on all that came after it."""
    base, *later = record.result["stages"][-1]["accuracy_by_stage"][predictor]
    sizes = record.data["stage_sizes"][1:]
    return base, sum(size * value for size, value in zip(sizes, later, strict=True)) / sum(sizes)


def _still(rows: Sequence[Row]) -> str:
    """What a network would have that knows its base classes as well as the best of these, and never another."""
    runs = [(row.record, row.measured.cell.predictor or "") for row in rows if row.record is not None]
    if not runs:
        return ""
    base = max(record.result["stages"][0]["accuracy"][predictor] for record, predictor in runs)
    sizes = runs[0][0].data["stage_sizes"]
    seen = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    average = sum(base * sizes[0] / classes for classes in seen) / len(seen)
    return (
        f"A network that kept the best base stage of these runs ({number(base)}) and never learned another class\n"
        f"would have an average of {number(average)}. "
    )


def draw(rows: Sequence[Row]) -> Drawing | None:
    """Accuracy against the seconds of a run; a run that two rows report alike is one point."""
    points: dict[tuple[str, str], Point] = {}
    for row in rows:
        by, label = predictor_of(row.measured), row.measured.cell.row.label.rstrip("*")
        if row.record is not None and row.measured.ours is not None and row.cost is not None:
            point = Point(label.removesuffix(f" ({by})"), by, row.cost.run, row.measured.ours.mean)
            points.setdefault((row.record.identity, by), point)
    return scatter(PICTURE, list(points.values())) if points else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page, and the picture where there is one."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("results", type=Path)
    given = options.parse_args(arguments)
    page, drawing = compare(given.results)
    write_bytes(given.out, page.encode())
    if drawing is not None:
        write_bytes(given.out.resolve().parents[1] / "images" / f"{drawing.name}.svg", drawing.svg.encode())


if __name__ == "__main__":
    try:
        main()
    except EngramError as error:
        raise SystemExit(f"error: {error}") from None
