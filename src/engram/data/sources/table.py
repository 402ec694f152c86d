"""Image files and labels from a table: a CSV, JSON Lines or Parquet file with a column of paths and one of labels."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from engram.core.errors import EngramError, option, suggest
from engram.core.io import parse_json, reading, typed_path

TABLES: Final = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
LARGEST_BYTES: Final = 2**30
LONGEST_FIELD: Final = 2**20  # characters
Row = Mapping[str, Any]


def is_table(path: str | Path) -> bool:
    """Return whether this is a file whose name ends as that of a table."""
    place = typed_path(path)
    return place.suffix.lower() in TABLES and place.is_file()


def read_table(path: str | Path, path_column: str = "path", label_column: str = "label") -> tuple[list[str], list[str]]:
    """Return the paths of the image files and the label of each, as text. Paths are relative to the table's folder."""
    place = typed_path(path)
    with reading(place):
        if place.stat().st_size > LARGEST_BYTES:
            raise EngramError(f"{place} is larger than the {LARGEST_BYTES // 2**20} MiB allowed for a table; divide it")
        try:
            return _columns(_rows(place), place, path_column, label_column)
        except EngramError:
            raise
        except (csv.Error, ValueError) as error:
            raise EngramError(f"the table {place} cannot be read: {error}; save it as UTF-8") from None


def _columns(rows: Iterable[Row], place: Path, path_column: str, label_column: str) -> tuple[list[str], list[str]]:
    paths: list[str] = []
    labels: list[str] = []
    for number, row in enumerate(rows, 1):
        for name in (path_column, label_column):
            if name not in row:
                kind = "path_column" if name == path_column else "label_column"
                hint = suggest(name, [str(key) for key in row if key is not None])
                raise EngramError(f"{place} has no column {name!r} ({option(kind)}): {hint}")
        file, label = row[path_column], row[label_column]
        if not isinstance(file, str) or not file.strip() or label is None or not str(label).strip():
            raise EngramError(f"row {number} of {place} has no path or no label; complete or remove it")
        paths.append(str(place.parent / file.strip()))
        labels.append(str(label).strip())
    if not paths:
        raise EngramError(f"{place} has no row; give a table with an image in each row")
    twice = dict(zip(reversed(paths), reversed(labels), strict=True))
    for file, label in zip(paths, labels, strict=True):
        if twice[file] != label:
            raise EngramError(f"{place} gives {file} the labels {twice[file]!r} and {label!r}; keep one of the rows")
    unique = dict(zip(paths, labels, strict=True))
    return list(unique), list(unique.values())


def _rows(place: Path) -> Iterator[Row]:
    kind = place.suffix.lower()
    if kind == ".parquet":
        yield from _parquet_rows(place)
        return
    with place.open(encoding="utf-8-sig", newline="") as file:
        if kind in (".csv", ".tsv"):
            csv.field_size_limit(LONGEST_FIELD)
            head = file.readline()
            file.seek(0)
            comma = ";" if ";" in head and "," not in head else ","  # spreadsheets write semicolons in many countries
            yield from csv.DictReader(file, delimiter="\t" if kind == ".tsv" else comma, strict=True)
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = parse_json(line)
            if not isinstance(row, dict):
                raise EngramError(f"line {number} of {place} is not a JSON object; write {{'path': ..., 'label': ...}}")
            yield row


def _parquet_rows(place: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file by pyarrow, which must be installed."""
    if find_spec("pyarrow") is None:
        raise EngramError(f"to read {place}, pyarrow must be installed: pip install pyarrow; or save the table as CSV")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        for batch in parquet.ParquetFile(place).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are among these
        raise EngramError(f"the table {place} cannot be read: {error}") from None
