"""Writes docs/methods/compared.md, what each method gives and costs: python tools/compare_methods.py OUT RESULTS

RESULTS is the folder with the runs (*.jsonl) and the times of the methods (methods-*.json, as `python -m benchmarks`
writes them; of a method in several of them the latest counts). Accuracy against time goes to ../images beside OUT, once
there is a row that has both.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from compare_picture import Point, Words, scatter
from engram.core.errors import EngramError
from engram.core.io import read_json, write_bytes
from engram.experiment.recipes import recipe, recipe_names
from engram.report.formatting import NOTHING, decimal, predictor_name, signed, spread
from engram.report.svg import Drawing
from engram.reproduce.cell_plan import PaperRequest, make_plan
from engram.reproduce.cells import Measured, measure, predictor_of
from engram.reproduce.paper import load_paper
from engram.reproduce.records import Record, protocol_key
from engram.reproduce.results_files import merge, read_results
from fill_cards import METHODS

COMMAND = "python tools/compare_methods.py docs/methods/compared.md results"
RUN = 'engram reproduce table1 methods --columns "10 stages" --orders 1'
BENCHMARK = "python -m benchmarks --parts methods --epochs 3 --out results/methods-h200.json"
EMBEDDED_RUN = "engram reproduce mini"
COLUMN, ORDER, SEED = "10 stages", "1", 1
AVERAGE, LAST = "average_incremental_accuracy", "final_accuracy"
FAR = 2.0  # points from the paper
PICTURE = "methods-compared"
WORDS = Words(
    "Accuracy and time",
    "seconds of a whole run, alone",
    "Average incremental accuracy of each method against the seconds of a whole run.",
    {"CNN": "by the head (CNN)", "NME": "by the nearest mean of exemplars (NME)"},
)
# A method's card, which is NAME.md for all others.
CARDS = {"afc": "../afc.md"} | {method: f"{card}.md" for card, methods in METHODS.items() for method in methods}
BORROWED = (
    "A dagger (†) marks a time that was measured with the method's own recipe,\n"
    "  which differs from the row's in one setting; the picture uses it too."
)
FOUND = ["final", "final, base and later", "average, other predictor"]
COST = ["ms per step, later stages", "seconds per run, alone"]
HEADER = ["", "predictor", "average", "paper", "difference", *FOUND, *COST]
EMBEDDED = ["", "predictor", "average", *FOUND]


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
    def records(self) -> Sequence[Record]:
        """Its runs."""
        return [] if self.measured.ours is None else self.measured.cell.records

    @property
    def predictor(self) -> str:
        """The one that it reports."""
        return self.measured.cell.predictor or ""

    @property
    def label(self) -> str:
        """Its name, which leads to its card."""
        text = self.measured.cell.row.label.replace("*", "\\*")
        return f"[{text}]({CARDS.get(self.method, f'{self.method}.md')})"


def read_times(folder: Path) -> tuple[dict[str, Cost], list[dict[str, Any]]]:
    """Return the cost of each method by the folder's methods-*.json, and those files; refuse different hardware."""
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
    asked, rows, known = PaperRequest(orders=[ORDER], seeds=[SEED], columns=[COLUMN]), [], set(recipe_names())
    for cell in make_plan(load_paper().find(["table1", "methods"]), records, asked).cells:
        config = cell.wanted[0].config if cell.wanted else None
        method = cell.row.recipe if config is None else config.method
        timed = f"{method}-cifar100-b50-s10"  # the recipe that the benchmark takes
        borrowed = config is not None and timed in known and protocol_key(config) != protocol_key(recipe(timed))
        rows.append(Row(measure(cell), method, costs.get(method), borrowed))
    return _best_first(rows)


def embedded_rows(records: Sequence[Record]) -> list[Row]:
    """Every method on the embedded set, in the same order."""
    cells = make_plan(load_paper().find(["mini"]), records, PaperRequest(seeds=[SEED])).cells
    return _best_first([Row(measure(cell), cell.row.recipe, None, False) for cell in cells])


def _best_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: math.inf if row.measured.ours is None else -row.measured.ours.mean)


def compare(results: Path) -> tuple[str, Drawing | None]:
    """The page, and its picture where there is something to draw."""
    records = merge(read_results([results]).records)
    costs, files = read_times(results)
    rows = rows_of(records, costs)
    drawing = draw(rows)
    image = "" if drawing is None else f"![{drawing.alt}](../images/{drawing.name}.svg)\n\n"
    far = [(row, by) for row in rows if (by := row.measured.difference) is not None and abs(by) > FAR]
    named = "".join(f"- {signed(by)}: {row.label}, see its card\n" for row, by in far) or "No row that was run.\n"
    page = f"""# The methods compared

What each method gives and what it costs: CIFAR-100, 50 base classes, 10 stages of 5 classes, 20 exemplars a class.

Made by `{COMMAND}` from [`results/`](../../results/README.md) and
the paper's numbers alone; a test checks that it is what this command gives.

- **Ours is one run**: class order {ORDER}, seed {SEED}. The paper's is mean ± standard deviation over three class
  orders, and is never put in place of ours.
{"".join(f"  {sentence}{chr(10)}" for sentence in _orders(records))}- **Accuracy**: {_runs(rows, RUN)}
- **Times**: {_timed(files)}

{image}How to read the table (accuracy in %):

- **average**: mean accuracy over all stages, including the base, by the row's predictor (CNN is the head, NME the
  nearest mean of exemplars).
- **final**: accuracy after the last stage. **Final, base and later**: the same for the base classes and for the classes
  that came later. They show what was kept and what was learned, which an average does not.
- **average, other predictor**: the same run's average by the other predictor.
- **paper**: missing where the paper's Table 1 has no such row with 10 stages. A star marks rows for which the paper's
  authors ran other people's code again.{f" {BORROWED}" if any(row.cost and row.borrowed for row in rows) else ""}

{_still(rows).rstrip()}

{_table(HEADER, rows, _cells)}
## Further than {FAR:g} points from the paper

{named}
{_embedded(embedded_rows(records))}{_commands(files)}"""
    return page, drawing


def _orders(records: Sequence[Record]) -> Iterator[str]:
    """How far AFC's one class order is from its mean over all of them."""
    asked = PaperRequest(rows=["AFC"], columns=[COLUMN], seeds=[SEED])
    for cell in make_plan(load_paper().find(["table1"]), records, asked).cells:
        orders, whole = cell.experiment.orders, measure(cell).ours
        one = {run.order.name: run.value(AVERAGE, cell.predictor or "") for run in cell.records}.get(ORDER)
        if whole is None or whole.n < len(orders) or one is None:
            yield f"How far {cell.row.label} on order {ORDER} is from its mean is unknown: not all orders were run."
            continue
        yield (
            f"{cell.row.label} has {decimal(one)} on order {ORDER} and {spread(whole)} over orders {', '.join(orders)} "
            f"(n = {whole.n}), so this order is {signed(one - whole.mean)} from the mean."
        )


def _table(header: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([row.label, predictor_of(row.measured), *cells(row)] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _embedded(rows: Sequence[Row]) -> str:
    """The section on the embedded set."""
    orders = rows[0].measured.cell.experiment.orders
    return f"""## On the embedded set

Twenty classes of small images that come with the package: 10 base classes, 5 stages of two, 5 exemplars a class, 16
epochs of the main phase (GDumb 32 after the base), mean ± standard deviation over class orders {", ".join(orders)}. It
needs no GPU and no download, and says less: its settings were chosen for naive, replay and AFC on other classes; DER
and EEIL have a longer balanced phase, and no other method has anything of its own there.
{_still(rows)}{_runs(rows, EMBEDDED_RUN)}

{_table(EMBEDDED, rows, lambda row: [_average(row), *_found(row)])}"""


def _runs(rows: Sequence[Row], command: str) -> str:
    runs = [record for row in rows for record in row.records]
    done = sum(bool(row.records) for row in rows)
    said = f"{done} of {len(rows)} rows were run; `{command}` runs {'them' if done == len(rows) else 'the others'}."
    if runs:
        hardware = _listed(f"{run.machine} ({run.precision})" for run in runs)
        torch = _listed(run.versions.get("torch", "unknown") for run in runs)
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
        "  whole recipe ([how](../benchmark.md#methods-what-each-method-costs), [commands](#commands-of-the-times)).\n"
        "  Differences of 10 % or less mean nothing, and newer kernels are faster\n"
        "  ([more on this](../../results/README.md#times-of-single-methods))."
    )


def _commands(files: Sequence[dict[str, Any]]) -> str:
    lines = "".join(f"    {file['command']}\n" for file in files)
    said = "Oldest first. If a method is in several of them, the latest counts."
    return f"\n## Commands of the times\n\n{said}\n\n{lines}" if files else ""


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts)))


def _average(row: Row) -> str:
    """Our average with its spread; of several runs, how many."""
    ours = row.measured.ours
    return "not run" if ours is None else spread(ours) + (f" (n = {ours.n})" if ours.n > 1 else "")


def _found(row: Row) -> list[str]:
    """Return the other metrics of a row's runs, as means, or a remark that there are none."""
    if not row.records:
        return ["not run"] * len(FOUND)
    last = fmean(record.result.final_accuracy[row.predictor] for record in row.records)
    parts = [_base_and_later(record, row.predictor) for record in row.records]
    base, later = fmean(part[0] for part in parts), fmean(part[1] for part in parts)
    others = {
        by: fmean(record.result.average_incremental_accuracy[by] for record in row.records)
        for by in row.records[0].result.average_incremental_accuracy
        if by != row.predictor
    }
    beside = ", ".join(f"{decimal(value)} ({predictor_name(by)})" for by, value in others.items())
    return [decimal(last), f"{decimal(base, 1)} and {decimal(later, 1)}", beside or NOTHING]


def _cells(row: Row) -> list[str]:
    """Our numbers, the paper's and the times of a row."""
    apart = row.measured.difference
    paper = [spread(row.measured.cell.published), NOTHING if apart is None else signed(apart)]
    found = [_average(row), *paper, *_found(row)]
    if row.cost is None:
        return [*found, "not measured", "not measured"]
    mark = " †" if row.borrowed else ""
    return [
        *found,
        NOTHING if row.cost.step is None else decimal(row.cost.step) + mark,
        decimal(row.cost.run, 0) + mark,
    ]


def _base_and_later(record: Record, predictor: str) -> tuple[float, float]:
    """The accuracy after the last stage on the classes of the base stage, and on all that came after it."""
    base, *later = record.result.stages[-1].accuracy_by_stage[predictor]
    sizes = record.stage_sizes[1:]
    return base, sum(size * value for size, value in zip(sizes, later, strict=True)) / sum(sizes)


def _still(rows: Sequence[Row]) -> str:
    """Return the accuracy of a network that knows its base classes as well as the best of these, and no others."""
    runs = [row for row in rows if row.records]
    if not runs:
        return ""
    base = max(fmean(run.result.stages[0].accuracy[row.predictor] for run in row.records) for row in runs)
    sizes = runs[0].records[0].stage_sizes
    average = fmean(base * sizes[0] / sum(sizes[: number + 1]) for number in range(len(sizes)))
    return (
        f"A network that kept the best base stage of these runs ({decimal(base)}) and never learned another class\n"
        f"would have an average of {decimal(average)}. "
    )


def draw(rows: Sequence[Row]) -> Drawing | None:
    """Accuracy against the seconds of a run; a run that two rows report alike is one point."""
    points: dict[tuple[str, str], Point] = {}
    for row in rows:
        by, label = predictor_of(row.measured), row.measured.cell.row.label.rstrip("*")
        if row.records and row.measured.ours is not None and row.cost is not None:
            point = Point(label.removesuffix(f" ({by})"), by, row.cost.run, row.measured.ours.mean)
            points.setdefault((row.records[0].identity, by), point)
    return scatter(PICTURE, list(points.values()), WORDS) if points else None


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
