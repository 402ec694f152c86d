"""Numbers, lists and tables as text, the same in reports, reproduction pages and the terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

PREDICTOR_NAMES = {"cnn": "CNN", "nme": "NME"}
MINUS = "\N{MINUS SIGN}"
NOTHING = "–"  # shown for a number that does not exist
ACCURACY_WORDS = (
    "Accuracy is the share of the test images of all classes seen so far that are classified correctly; average "
    "incremental accuracy is its mean over the stages, including the base stage."
)
_NBSP = "\N{NO-BREAK SPACE}"
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # how a formula begins, for spreadsheets


class MeanAndStd(Protocol):
    """A mean and its standard deviation, None if unknown."""

    @property
    def mean(self) -> float: ...
    @property
    def std(self) -> float | None: ...


def predictor_name(predictor: str) -> str:
    """Return the predictor's name as papers write it."""
    return PREDICTOR_NAMES.get(predictor) or plain(predictor, 40)


def plain(text: str, limit: int = 10_000) -> str:
    """Return the text on one line without control characters (XML cannot hold them), cut to `limit` characters."""
    clean = "".join(c if c.isprintable() else " " for c in text).strip() or "(no name)"
    return clean if len(clean) <= limit else clean[: limit - 1].rstrip() + "…"


def plain_label(text: str, limit: int) -> str:
    """Return the text as `plain`, but cut in the middle: labels of groups often differ only at their end."""
    clean = plain(text)
    head = (limit - 1) // 3
    return clean if len(clean) <= limit else f"{clean[:head].rstrip()}…{clean[head + 1 - limit :].lstrip()}"


def decimal(value: float, digits: int = 2) -> str:
    """Format a number with a minus sign instead of a hyphen; a rounded zero has no sign."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", MINUS)


def signed(value: float) -> str:
    """Format a difference with its sign."""
    text = decimal(value)
    return text if text.startswith(MINUS) or float(text) == 0 else f"+{text}"


def spread(value: MeanAndStd | None, digits: int = 2) -> str:
    """Format a mean and its standard deviation: '62.18 ± 0.57', '62.18' without one, or a dash for None."""
    if value is None:
        return NOTHING
    text = decimal(value.mean, digits)
    return text if value.std is None else f"{text} ± {decimal(value.std, digits)}"


def glued(value: MeanAndStd | None, digits: int = 2) -> str:
    """Format like `spread`, with no-break spaces."""
    return spread(value, digits).replace(" ", _NBSP)


def duration(value: MeanAndStd) -> str:
    """Format seconds and their spread: '42.0 s', '3 min 05 s', '2 h 07 min'."""
    text = _duration(value.mean)
    return text if value.std is None else f"{text}{_NBSP}±{_NBSP}{_duration(value.std)}"


def _duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def join(texts: Iterable[str]) -> str:
    """Join texts: 'a', 'a and b', 'a, b and c'."""
    listed = list(texts)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key by which '10' comes after '9'."""
    parts = re.findall(r"\d+|\D+", text)
    return [(0, len(number := part.lstrip("0")), number) if part.isdecimal() else (1, 0, part) for part in parts]


def count_runs(count: int) -> str:
    """Format a number of runs: '1 run', '2 runs'."""
    return f"{count} run{'' if count == 1 else 's'}"


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a CSV file with one header line; None is an empty cell.

    Text that a spreadsheet would take for a formula begins with an apostrophe, which spreadsheets do not show.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in (header, *rows):
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in row])
    return text.getvalue()
