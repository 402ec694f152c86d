"""The numbers of the report: the most confused classes, and CSV files (unrounded)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engram.core.metrics import METRICS, TASK_METRICS, Estimate
from engram.report.formatting import csv_text
from engram.report.groups import RunGroup, comparable_groups, row_percent
from engram.runs.result import SECONDS
from engram.runs.stored_run import StoredRun

PAIRED = ("average_incremental_accuracy", "final_accuracy")  # the metrics whose differences are shown
_CONFUSED_PAIRS = 10
_LEAD = ("group", "run", "order", "seed")  # the first columns of a table of runs


@dataclass(frozen=True)
class ConfusedPair:
    """A frequent mistake: `percent` of the images of class `true` were predicted as `predicted`."""

    true: str
    predicted: str
    count: int
    percent: float


def most_confused(counts: np.ndarray, names: Sequence[str]) -> list[ConfusedPair]:
    """Return the most frequent mistakes by share of the true class. counts: rows true classes, columns predicted."""
    percent = row_percent(counts)
    mistakes = np.argwhere((counts > 0) & ~np.eye(len(counts), dtype=bool))
    ranked = sorted(mistakes.tolist(), key=lambda cell: (-percent[cell[0], cell[1]], cell))
    return [
        ConfusedPair(names[row], names[column], int(counts[row, column]), float(percent[row, column]))
        for row, column in ranked[:_CONFUSED_PAIRS]
    ]


def csv_files(groups: Sequence[RunGroup]) -> dict[str, str]:
    """Return the CSV text of every table by its key plus ".csv"; see `RunGroup.key`."""
    files = {
        "summary.csv": _summary(groups),
        "accuracy_per_stage.csv": _accuracy_per_stage(groups),
        "runs.csv": _runs(groups),
        "seconds.csv": _seconds(groups),
    }
    if differences := _differences(groups):
        files["differences.csv"] = differences
    for group in groups:
        for predictor in group.predictors:
            files[f"{group.key('accuracy_matrix', predictor)}.csv"] = _matrix(group, predictor)
            files[f"{group.key('confusion', predictor)}.csv"] = _confusion(group, predictor)
        if group.importance():
            files[f"{group.key('importance')}.csv"] = _importance(group)
        if group.first.losses:
            files[f"{group.key('loss')}.csv"] = _loss(group)
    return files


def _cells(value: Estimate | None) -> list[object]:
    return [None, None] if value is None else [value.mean, value.std]


def _summary(groups: Sequence[RunGroup]) -> str:
    names = [*METRICS, "seconds", *TASK_METRICS]
    header = ["group", "recipe", "method", "predictor", "n", "stages", "classes"]
    header += [f"{name}_{part}" for name in names for part in ("mean", "std")]
    rows = []
    for group in groups:
        for predictor in group.predictors:
            values, known = ([group.metric(name, predictor) for name in some] for some in (METRICS, TASK_METRICS))
            cells = [cell for value in [*values, group.seconds, *known] for cell in _cells(value)]
            lead = [group.label, group.first.recipe, group.first.method, predictor, group.n]
            rows.append([*lead, len(group.classes) - 1, group.classes[-1], *cells])
    return csv_text(header, rows)


def _differences(groups: Sequence[RunGroup]) -> str:
    """Every pair of comparable groups; empty if no two have a class order and seed in common."""
    rows = [
        [one.label, one.predictors[0], other.label, other.predictors[0], metric, value.n, *_cells(value), value.higher]
        for peers in comparable_groups(groups)
        for other, one in itertools.combinations(peers, 2)
        for metric in PAIRED
        if (value := one.difference(other, metric)) is not None
    ]
    header = ["group", "predictor", "less", "less_predictor", "metric", "pairs", "mean", "std", "pairs_above_zero"]
    return csv_text(header, rows) if rows else ""


def _accuracy_per_stage(groups: Sequence[RunGroup]) -> str:
    header = ["group", "predictor", "stage", "classes", "n", "accuracy_mean", "accuracy_std"]
    rows = [
        [group.label, predictor, stage, classes, group.n, *_cells(value)]
        for group in groups
        for predictor in group.predictors
        for stage, (classes, value) in enumerate(zip(group.classes, group.accuracy(predictor), strict=True))
    ]
    return csv_text(header, rows)


def _runs(groups: Sequence[RunGroup]) -> str:
    rows = [
        [*lead, predictor, index, stage.classes, stage.accuracy[predictor], stage.seconds]
        for group, run, lead in _each_run(groups)
        for predictor in group.predictors
        for index, stage in enumerate(run.stages)
    ]
    return csv_text([*_LEAD, "predictor", "stage", "classes", "accuracy", "seconds"], rows)


def _each_run(groups: Sequence[RunGroup]) -> Iterator[tuple[RunGroup, StoredRun, list[object]]]:
    """Yield each run with its group and its cells of the columns _LEAD."""
    for group in groups:
        for run in group.runs:
            yield group, run, [group.label, run.directory.name, run.manifest.order.name, run.result.seed]


def time_parts(groups: Sequence[RunGroup]) -> list[str]:
    """The kinds of work in `seconds_by` of any run, in the order of the work."""
    named = {part for group in groups for run in group.runs for part in run.result.seconds_by}
    return [*SECONDS, *sorted(named.difference(SECONDS))]


def time_spent(run: StoredRun, parts: Sequence[str]) -> list[float]:
    """Return the seconds of each kind of work, and of everything else."""
    spent = [run.result.seconds_by.get(part, 0.0) for part in parts]
    return [*spent, max(0.0, run.result.seconds - sum(spent))]


def _seconds(groups: Sequence[RunGroup]) -> str:
    parts = time_parts(groups)
    rows = [[*lead, *time_spent(run, parts), run.result.seconds] for _, run, lead in _each_run(groups)]
    return csv_text([*_LEAD, *parts, "other", "total"], rows)


def _matrix(group: RunGroup, predictor: str) -> str:
    matrix = group.matrix(predictor)
    header = ["after_stage", *(f"classes_of_stage_{i}" for i in range(len(matrix)))]
    rows = ([t, *(None if np.isnan(value) else float(value) for value in row)] for t, row in enumerate(matrix))
    return csv_text(header, rows)


def _confusion(group: RunGroup, predictor: str) -> str:
    names = group.class_names
    counts = group.confusion(predictor).tolist()
    return csv_text(["true_class", *names], ([name, *row] for name, row in zip(names, counts, strict=True)))


def _importance(group: RunGroup) -> str:
    rows = []
    for m, values in enumerate(group.importance(), start=1):
        stds = values.std(axis=0, ddof=1).tolist() if group.n > 1 else [None] * values.shape[1]
        for rank, (mean, std) in enumerate(zip(values.mean(axis=0).tolist(), stds, strict=True), start=1):
            rows.append([f"Z_{m}", rank, group.n, mean, std])
    return csv_text(["map", "rank", "n", "importance_mean", "importance_std"], rows)


def _loss(group: RunGroup) -> str:
    run = group.first
    terms = list(dict.fromkeys(term for point in run.losses for term in point.terms))
    rows = ([p.stage, p.phase, p.epoch, *(p.terms.get(term) for term in terms)] for p in run.losses)
    return csv_text(["stage", "phase", "epoch", *terms], rows)
