"""Several results side by side: mean and standard deviation of each recipe over its class orders and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engram.core.errors import EngramError
from engram.core.metrics import estimate
from engram.runs.result_table import ResultTable

MEASURES = {"average_incremental_accuracy": "average", "final_accuracy": "final", "forgetting": "forgetting"}
AnyResult = Mapping[str, Any]  # what `train` returns, or the content of result.json


def compare_results(
    results: Iterable[AnyResult] | Mapping[str, AnyResult | Sequence[AnyResult]], predictor: str | None = None
) -> ResultTable:
    """Return a table of results, a row for each recipe or each name; `engram.compare` also takes directories."""
    rows = _named(results)
    if not rows:
        raise EngramError("there is no result to compare; give at least one")
    found = list(dict.fromkeys(name for row in rows.values() for result in row for name in result["final_accuracy"]))
    if predictor is not None and predictor not in found:
        raise EngramError(f"no result has the predictor {predictor!r}; they have {', '.join(found)}")
    shown = found if predictor is None else [predictor]
    columns = [
        (key, by, f"{title} {by}" if len(found) > 1 else title) for key, title in MEASURES.items() for by in shown
    ]
    header = ("recipe", "n", *(title for _, _, title in columns))
    cells = (
        (name, len(row), *(estimate([result[key].get(by) for result in row]) for key, by, _ in columns))
        for name, row in rows.items()
    )
    return ResultTable(header, tuple(cells))


def _named(results: Any) -> dict[str, list[AnyResult]]:
    """Return the results by the name of their row."""
    if is_result(results):
        results = [results]
    if isinstance(results, Mapping):
        rows = {str(name): [given] if is_result(given) else list(given) for name, given in results.items()}
        rows = {name: row for name, row in rows.items() if row}
    else:
        rows = {}
        for result in results:
            rows.setdefault(str(result["recipe"]) if is_result(result) else "", []).append(result)
    wrong = [result for row in rows.values() for result in row if not is_result(result)]
    if wrong:
        raise EngramError(f"{repr(wrong[0])[:60]} is not a result; give what train() returned, or the run's directory")
    return rows


def is_result(given: Any) -> bool:
    """Return whether this has the content of a result."""
    return isinstance(given, Mapping) and all(name in given for name in ("recipe", *MEASURES))
