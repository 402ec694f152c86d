"""Results of several machines in one file: read, merged without duplicates, written.

A file is JSON Lines, one run a line (`records.py`). Two runs that must have come to the same numbers and did not are a
conflict, which is named and never settled here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram.core.errors import EngramError
from engram.core.io import write_bytes
from engram.reproduce.records import KIND, Record, is_complete, parse_line, read_run
from engram.runs.directory import MANIFEST, runs_in

SUFFIX = ".jsonl"
_SHOWN = 3
_LOOKED_AT = 65536  # bytes


@dataclass(frozen=True)
class Found:
    """What was read: the complete runs, and the directories of those that are not."""

    records: list[Record]
    unfinished: list[Path]


def read_results(places: Sequence[Path]) -> Found:
    """The runs in these places: run directories, files of results, or folders of either."""
    found = Found([], [])
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
            if is_complete(run):
                found.records.append(read_run(run))
            else:
                found.unfinished.append(run)
    return found


def read_file(file: Path) -> list[Record]:
    """The records of a file; one that is damaged, or of something else, is refused with its name and line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EngramError(f"{file} cannot be read as results of engram: {error}") from None
    if not lines:
        raise EngramError(f"{file} is empty; a file of results has one run a line")
    return [parse_line(line, f"{file}, line {number},") for number, line in enumerate(lines, start=1)]


def is_ours(file: Path) -> bool:
    """Whether a file says that it holds results of engram, be they damaged; an empty one may have held some."""
    try:
        with file.open("rb") as opened:
            start = opened.read(_LOOKED_AT)
    except OSError:
        return True  # whoever reads it says what is wrong
    return not start or json.dumps(KIND).encode() in start


def merge(records: Iterable[Record]) -> list[Record]:
    """The records without duplicates, in an order of their own; refuses conflicts, with both sources of each."""
    kept: dict[str, Record] = {}
    conflicts: list[tuple[Record, Record]] = []
    for record in records:
        other = kept.setdefault(record.identity, record)
        if other.numbers != record.numbers:
            conflicts.append((other, record))
        elif "importance" in record.data and "importance" not in other.data:
            kept[record.identity] = record
    if conflicts:
        raise EngramError(_describe(conflicts))
    return sorted(kept.values(), key=_place)


def write_file(file: Path, records: Sequence[Record]) -> None:
    """Puts the records into a file, whole or not at all."""
    write_bytes(file, "".join(f"{record.to_line()}\n" for record in records).encode())


def _describe(conflicts: Sequence[tuple[Record, Record]]) -> str:
    texts = [
        f"{one.source} and {two.source} (both {one.recipe}, order {one.order}, seed {one.seed}, commit {one.commit} on "
        f"{one.hardware})"
        for one, two in conflicts[:_SHOWN]
    ]
    more = f", and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
    return (
        f"the same run has different numbers in {'; in '.join(texts)}{more}; "
        "find out which is right and leave the other out"
    )


def _place(record: Record) -> tuple[object, ...]:
    """Where a record stands in a file: recipes by name with their numbers as numbers, then order, seed, time."""
    parts = re.split(r"(\d+)", f"{record.recipe} order {record.order} seed {record.seed}")
    numbered = tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts)
    return (numbered, record.data["created"], record.identity)
