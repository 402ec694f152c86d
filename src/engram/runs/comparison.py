"""Several results side by side: mean and standard deviation of each recipe over its class orders and seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engram.core.errors import EngramError
from engram.core.metrics import estimate
from engram.runs.directory import UNKNOWN_CODE
from engram.runs.result_table import ResultTable

MEASURES = {"average_incremental_accuracy": "average", "final_accuracy": "final", "forgetting": "forgetting"}
AnyResult = Mapping[str, Any]  # what `train` returns, or the content of result.json


@dataclass(frozen=True)
class Compared:
    """A result, and what decides its row.

    precision: None if it is not known. code: digests of the user's code, or empty. rest: what else runs of a row have
    in common. order: the name of the class order; created: when the run began; both empty if not known. machine: shown
    with the precision.
    """

    result: AnyResult
    precision: str | None = None
    code: str = ""
    rest: str | None = None
    order: str = ""
    created: str = ""
    machine: str = ""

    @classmethod
    def of(cls, result: Any) -> Compared:
        """A result that says itself what it was computed with."""
        if not is_result(result):
            raise EngramError(
                f"{repr(result)[:60]} is not a result; give what train() returned, or the run's directory"
            )
        return cls(result, result.get("precision"), str(result.get("code", "")), order=str(result.get("order", "")))

    @property
    def recipe(self) -> str:
        """The recipe, with its changes."""
        return str(self.result["recipe"])

    @property
    def repetition(self) -> tuple[str, str, int]:
        """Class order and seed, or the result itself if its class order is not known."""
        return self.order, str(self.result.get("seed")), 0 if self.order else id(self.result)


def rows_by_recipe(given: Iterable[Compared]) -> dict[str, list[Compared]]:
    """Return the results by the name of their row.

    A recipe has several rows if its runs differ in code, precision or `rest` (which counts if all results have it).
    """
    given = list(given)
    is_whole = all(each.rest is not None for each in given)
    found: dict[str, dict[tuple[str | None, ...], list[Compared]]] = {}
    for each in given:
        kind = (each.code, each.precision, each.rest if is_whole else None)
        found.setdefault(each.recipe, {}).setdefault(kind, []).append(each)
    rows: dict[str, list[Compared]] = {}
    for recipe, kinds in found.items():
        for label, runs in zip(_labels([runs[0] for runs in kinds.values()]), kinds.values(), strict=True):
            rows[f"{recipe} [{label}]" if label else recipe] = runs
    return rows


def _labels(firsts: Sequence[Compared]) -> list[str]:
    """Return a label for each row of a recipe: its code and precision where these differ, else a number.

    firsts: one run of each row.
    """
    codes, precisions = ({getattr(each, name) for each in firsts} for name in ("code", "precision"))
    labels: list[str] = []
    for each in firsts:
        place = f" on {each.machine}" if each.machine else ""
        texts = [f"code {each.code or UNKNOWN_CODE}"] if len(codes) > 1 else []
        labels.append(", ".join([*texts, *([f"{each.precision}{place}"] if len(precisions) > 1 else [])]))
    if len(firsts) == 1:
        return labels
    times = Counter(labels)
    numbered = (f"{number}: {label}".removesuffix(": ") for number, label in enumerate(labels, start=1))
    return [label if times[label] == 1 else name for label, name in zip(labels, numbered, strict=True)]


def latest(runs: Iterable[Compared]) -> list[Compared]:
    """Return the runs without repetitions: of the same run with the same class order and seed, the latest counts.

    That is the one given last, unless it is known to have begun earlier.
    """
    runs = list(runs)
    is_whole = all(each.rest is not None for each in runs)
    kept: dict[tuple[object, ...], Compared] = {}
    for each in runs:
        key = (each.recipe, each.code, each.precision, each.rest if is_whole else None, *each.repetition)
        held = kept.setdefault(key, each)
        if not (each.created and held.created) or each.created >= held.created:
            kept[key] = each
    return list(kept.values())


def compare_results(results: Iterable[Any] | Mapping[str, Any], predictor: str | None = None) -> ResultTable:
    """Return a table of results, a row for each recipe or each name; `engram.compare` also takes directories.

    results: each is what `train` returned, the content of result.json, or `Compared`.
    """
    rows = {name: [each.result for each in latest(row)] for name, row in _named(results).items()}
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


def _named(results: Any) -> dict[str, list[Compared]]:
    """Return the results by the name of their row."""
    if is_result(results):
        results = [results]
    if not isinstance(results, Mapping):
        return rows_by_recipe(map(_compared, results))
    rows = {str(name): [given] if is_result(given) else list(given) for name, given in results.items()}
    return {name: list(map(_compared, row)) for name, row in rows.items() if row}


def _compared(given: Any) -> Compared:
    return given if isinstance(given, Compared) else Compared.of(given)


def is_result(given: Any) -> bool:
    """Return whether this has the content of a result."""
    return isinstance(given, Mapping) and all(name in given for name in ("recipe", *MEASURES))


def same_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which repetitions of a run agree, of the configuration in run.json."""
    free = ("recipe", "order", "seed", "device", "precision", "predictor", "data")
    return {key: value for key, value in sorted(config.items()) if key not in free}
