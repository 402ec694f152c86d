"""Files of results from several machines: read, merge without duplicates, write.

A file is JSON Lines, one run per line (`records.py`). Two runs that should have the same numbers and do not are a
conflict: the error names both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram.core.errors import EngramError
from engram.core.io import write_text
from engram.reproduce.records import KIND, Record, parse_line, read_record
from engram.runs.directory import MANIFEST, runs_in
from engram.runs.reader import parse_result, read_manifest
from engram.runs.stored_run import RunManifest

SUFFIX = ".jsonl"
_SHOWN = 3
_LOOKED_AT = 65536  # bytes


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
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EngramError(f"{file} cannot be read as results of engram: {error}") from None
    if not lines:
        raise EngramError(f"{file} is empty; a file of results has one run per line")
    return [parse_line(line, f"{file}, line {number},") for number, line in enumerate(lines, start=1)]


def is_ours(file: Path) -> bool:
    """Whether a file claims to hold results of engram, damaged or not; an empty file may have held some."""
    try:
        with file.open("rb") as opened:
            start = opened.read(_LOOKED_AT)
    except OSError:
        return True  # reading it reports what is wrong
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
    """Sort key: recipe (its numbers as numbers), order, seed, time."""
    parts = re.split(r"(\d+)", f"{record.recipe} order {record.order.name} seed {record.seed}")
    numbered = tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts)
    return (numbered, record.created, record.identity)
