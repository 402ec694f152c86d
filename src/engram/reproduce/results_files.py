"""Files of results from several machines: read, merge without duplicates, write, summarise.

A file is JSON Lines, one run per line (`records.py`). Two runs that should have the same numbers and do not are a
conflict: the error names both.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.core.errors import EngramError
from engram.core.io import write_text
from engram.core.metrics import estimate
from engram.experiment.recipes import recipe, recipe_names
from engram.report.formatting import natural_key
from engram.reproduce.paper import PAPERS
from engram.reproduce.records import KIND, Record, parse_line, protocol_key, read_record
from engram.runs.comparison import Compared, compare_results, same_settings
from engram.runs.directory import MANIFEST, runs_in
from engram.runs.reader import parse_result, read_manifest
from engram.runs.result_table import ResultTable
from engram.runs.stored_run import RunManifest

SUFFIX = ".jsonl"
_SHOWN = 3
_LOOKED_AT = 65536  # bytes
MEASURED = PAPERS / "measured.json"
SUMMARY_COMMAND = "engram results summary src/engram/reproduce/papers/measured.json results"
AVERAGE = "average_incremental_accuracy"


@dataclass(frozen=True)
class FoundResults:
    """The complete runs that were found, and the directories of incomplete ones."""

    records: list[Record]
    unfinished: list[Path]


def read_results(places: Sequence[Path]) -> FoundResults:
    """Read the runs in these places: run directories, files of results, or folders of either."""
    found = FoundResults([], [])
    for place in places:
        if not place.exists():
            raise EngramError(
                f"there is nothing at {place}; give run directories, folders of them, or files of results"
            )
        if place.is_file():
            found.records.extend(read_file(place))
            continue
        runs = runs_in(place)
        files = sorted(place.glob(f"*{SUFFIX}")) if not (place / MANIFEST).exists() else []
        if not runs and not files:
            raise EngramError(f"{place} holds no run directory and no file of results (*{SUFFIX}); give another")
        for file in files:
            found.records.extend(read_file(file))
        for run in runs:
            manifest = read_manifest(run)
            if _is_complete(run, manifest):
                found.records.append(read_record(run, manifest))
            else:
                found.unfinished.append(run)
    return found


def _is_complete(directory: Path, manifest: RunManifest) -> bool:
    """Whether every stage is finished. A run whose result.json cannot be read is resumed, which writes it again."""
    try:
        return len(parse_result(directory).stages) >= len(manifest.stage_sizes)
    except EngramError:
        return False


def read_file(file: Path) -> list[Record]:
    """Read the records of a file; a damaged or foreign line is refused with file and line."""
    if file.exists() and not file.is_file():
        raise EngramError(f"{file} cannot be read as results of engram: it is not a regular file")
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EngramError(f"{file} cannot be read as results of engram: {error}") from None
    if lines == [""]:
        raise EngramError(f"{file} is empty; a file of results has one run per line")
    return [parse_line(line, f"{file}, line {number},") for number, line in enumerate(lines, start=1)]


def is_ours(file: Path) -> bool:
    """Whether a file claims to hold results of engram, damaged or not; an empty file may have held some."""
    if not file.is_file():
        return True  # reading it reports what is wrong
    try:
        with file.open("rb") as opened:
            start = opened.read(_LOOKED_AT)
    except OSError:
        return True
    return not start or json.dumps(KIND).encode() in start


def merge(records: Iterable[Record]) -> list[Record]:
    """Return the records without duplicates, sorted; refuse conflicts, with both sources of each."""
    kept: dict[str, Record] = {}
    conflicts: list[tuple[Record, Record]] = []
    for record in records:
        other = kept.setdefault(record.identity, record)
        if other.numbers != record.numbers:
            conflicts.append((other, record))
        elif record.importance and not other.importance:
            kept[record.identity] = record
    if conflicts:
        raise EngramError(_describe(conflicts))
    return sorted(kept.values(), key=_sort_key)


def write_file(file: Path, records: Sequence[Record]) -> None:
    """Write the records to a file, all or nothing."""
    write_text(file, "".join(f"{record.to_line()}\n" for record in records))


def _describe(conflicts: Sequence[tuple[Record, Record]]) -> str:
    texts = [
        f"{one.source} and {two.source} (both {one.recipe}, order {one.order.name}, seed {one.seed}, "
        f"commit {one.commit} on {one.machine})"
        for one, two in conflicts[:_SHOWN]
    ]
    more = f", and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
    return (
        f"the same run has different numbers in {'; in '.join(texts)}{more}; "
        "find out which is right and leave the other out"
    )


def _sort_key(record: Record) -> tuple[object, ...]:
    name = natural_key(f"{record.recipe} order {record.order.name} seed {record.seed}")
    return name, record.created, record.identity


def summarise(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By recipe: n, mean and standard deviation (None for one run) of the average accuracy, and mean seconds of a run.

    The latest run of each class order and seed counts, in the default precision of its device. Accuracy is in percent,
    with the predictor that the recipe reports. Runs may have shared a device.
    """
    found: dict[str, dict[tuple[str, int], Record]] = {}
    for record in sorted(records, key=lambda record: record.created):
        name = record.recipe.split(" ")[0]
        if record.has_default_precision and name in recipe_names() and _is_unchanged(record, name):
            found.setdefault(name, {})[record.order.name, record.seed] = record
    return {name: _summary_row(name, list(runs.values())) for name, runs in sorted(found.items())}


def table_of(records: Sequence[Record]) -> ResultTable:
    """Return a table with a row for each recipe: mean and standard deviation over class orders and seeds.

    The latest run of each class order and seed counts. Runs of a recipe with other settings, precision or code of the
    user have a row of their own.
    """
    return compare_results(
        Compared(
            record.result,
            record.precision,
            record.method_code,
            rest=json.dumps([same_settings(record.config), record.data.fingerprint]),
            order=record.order.name,
            created=record.created,
            machine=record.machine,
        )
        for record in sorted(records, key=_sort_key)
    )


def _is_unchanged(record: Record, name: str) -> bool:
    """Whether the run has the recipe's current settings, apart from class order and seed."""
    plain = recipe(name).with_value("order", record.order.name).with_value("seed", record.seed)
    return record.key == protocol_key(plain)


def _summary_row(name: str, runs: Sequence[Record]) -> dict[str, Any]:
    predictor = recipe(name).predictor
    accuracy = estimate([value for run in runs if (value := run.value(AVERAGE, predictor)) is not None])
    assert accuracy is not None
    return {
        "predictor": predictor,
        "n": accuracy.n,
        "mean": round(accuracy.mean, 2),
        "std": None if accuracy.std is None else round(accuracy.std, 2),
        "seconds": round(statistics.fmean(run.result.seconds for run in runs)),
        "hardware": ", ".join(sorted({run.machine for run in runs})),
    }


def summary_text(summary: dict[str, dict[str, Any]]) -> str:
    """Return the summary as JSON, one recipe per line."""
    lines = [f" {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in summary.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def measured() -> dict[str, dict[str, Any]]:
    """Return the summary in this package, by recipe."""
    return json.loads(MEASURED.read_text(encoding="utf-8"))
