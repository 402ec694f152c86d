"""Results and run directories side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engram.core.errors import EngramError
from engram.runs.comparison import AnyResult, Compared, compare_results, is_result, same_settings
from engram.runs.reader import read_run
from engram.runs.result_table import ResultTable

Given = AnyResult | str | os.PathLike[str]


def compare(
    results: Given | Iterable[Given] | Mapping[str, Given | Sequence[Given]], predictor: str | None = None
) -> ResultTable:
    """Return a table of results in percent: average incremental accuracy, final accuracy and forgetting.

    Runs of a recipe with other code or another precision have a row of their own. If a class order and seed is there
    twice, the latest counts. The table is shown in a notebook, and has `to_frame()`, `to_markdown()` and `to_latex()`.
    A standard deviation is that of a sample (n - 1).

    Parameters
    ----------
    results: what `train` returned, or directories of finished runs, a row for each recipe; or by name, one or several
        for each name.
    predictor: only this one, such as "cnn"; None: all of them.

    >>> from engram import compare, recipe, train
    >>> results = [train(recipe("afc-mini-b10-s5").with_value("order", str(order))) for order in (1, 2, 3)]
    >>> print(compare(results).to_latex())
    """
    if isinstance(results, Mapping) and not is_result(results):
        return compare_results({str(name): _read_all(given) for name, given in results.items()}, predictor)
    return compare_results(_read_all(results), predictor)


def _read_all(given: Any) -> list[Any]:
    several = [given] if isinstance(given, (str, os.PathLike)) or is_result(given) else given
    return [_read(each) if isinstance(each, (str, os.PathLike)) else each for each in several]


def _read(directory: str | os.PathLike[str]) -> Compared:
    run = read_run(Path(directory))
    if run.stopped:
        raise EngramError(f"{run.directory} is a run that was {run.stopped}; finish it, or leave it out")
    manifest = run.manifest
    return Compared(
        run.result,
        manifest.config.get("precision"),
        manifest.method_code,
        rest=json.dumps([same_settings(manifest.config), manifest.data.fingerprint]),
        order=manifest.order.name,
        created=manifest.created,
    )
