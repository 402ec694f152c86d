"""Make the report about runs (an HTML page, figures as SVG, numbers as CSV)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engram.core.metrics import METRICS, TASK_METRICS
from engram.report import figures
from engram.report import wording as words
from engram.report.formatting import ACCURACY_WORDS, duration, glued, join, predictor_name
from engram.report.groups import (
    RunGroup,
    as_text,
    comparable_groups,
    has_given_order,
    load_runs,
    make_groups,
    without_repeats,
)
from engram.report.html_page import check_page_path, template, write_page_and_files
from engram.report.svg import SERIES, Drawing, drawing_style
from engram.report.tables import PAIRED, csv_files, most_confused
from engram.runs.directory import RESULT, runs_in

_OPEN_CONFUSIONS = 3
_EXACT_COLUMNS = 6  # a wider table of stages has one digit instead of two, to fit the page
_PREDICTOR_WORDS = {
    "cnn": "CNN: the class with the highest score of the classifier.",
    "nme": "NME: the class whose mean exemplar is nearest.",
}


def write_report(
    directories: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    *,
    pdf: bool = False,
) -> Path:
    """Write a report about run directories, and return the path of its HTML page.

    Parameters
    ----------
    directories: run directories, or folders of them; in a folder, runs without a finished stage are left out.
    out: the page's file name, or a folder for it; by default `report.html` in the one directory that was given, or in
        the common parent of several. Figures and CSV files go to a folder named like the page plus `_files`.
    tell: called with a sentence about each run that is left out. Of runs with the same configuration, class order and
        seed, only one counts.
    pdf: write every figure as PDF too.

    Raises EngramError, with the file, if a directory is not a run, has no finished stage, or is damaged.
    """
    given = [Path(path) for path in ([directories] if isinstance(directories, str | Path) else directories)]
    paths = _run_directories(given, tell)
    runs, repeats = without_repeats(load_runs(paths))
    for repeat, counted in repeats.items():
        tell(f"left out {repeat.directory}: {counted.directory} has the same configuration, class order and seed")
    groups = make_groups(runs)
    page = _page_path(given if len(given) == 1 else paths, None if out is None else Path(out))
    with drawing_style():
        context, drawings = _context(groups, len(repeats))
    files: dict[str, str | bytes] = {f"{drawing.name}.svg": drawing.svg for drawing in drawings}
    files |= csv_files(groups) | ({f"{drawing.name}.pdf": drawing.pdf() for drawing in drawings} if pdf else {})
    write_page_and_files(page, template("report.html.jinja"), context, files)
    return page


def _run_directories(given: Sequence[Path], tell: Callable[[str], None]) -> list[Path]:
    """Replace each folder of runs by the runs in it that have a finished stage."""
    found: list[Path] = []
    for path in given:
        runs = runs_in(path)
        finished = [run for run in runs if run == path or (run / RESULT).exists()]
        for run in [run for run in runs if finished and run not in finished]:
            tell(f"left out {run}: it has no finished stage yet")
        found += finished or runs or [path]  # reading them reports what is wrong
    return found


def _page_path(directories: Sequence[Path], out: Path | None) -> Path:
    if out is None:
        parents = [directory.resolve().parent for directory in directories]
        home = directories[0] if len(directories) == 1 else Path(os.path.commonpath(parents))
        return home / "report.html"
    if out.is_dir():
        return out / "report.html"
    check_page_path(out)
    return out


def _context(groups: list[RunGroup], repeats: int) -> tuple[dict[str, Any], list[Drawing]]:
    """Return the variables of the template, and all figures."""
    cells = [_GroupView(group, index) for index, group in enumerate(groups)]
    predictors = list(dict.fromkeys(name for group in groups for name in group.predictors))
    curves = [figures.accuracy_curves(groups, predictor) for predictor in predictors]
    reported = [(cell, cell.group.predictors[0]) for cell in cells]
    others = [(cell, name) for cell in cells for name in cell.group.predictors[1:]]
    matrices = {
        kind: [{"drawing": figures.accuracy_matrix(cell.group, name)} for cell, name in pairs]
        for kind, pairs in {"reported": reported, "others": others}.items()
    }
    kept = [_kept(cell, name) for cell, name in reported if len(cell.group.classes) > 1]
    confusions = [_confusion(cell, name) for cell, name in [*reported, *others]]
    importance = [{"drawing": figures.importance(group)} for group in groups if group.importance()]
    losses = [{"drawing": figures.training_loss(group)} for group in groups if group.first.main_losses]
    seconds = figures.time_spent(groups)
    parts = [*matrices["reported"], *matrices["others"], *kept, *confusions, *importance, *losses]
    summary = _summary(cells)
    one_order = all(group.has_one_order for group in groups)
    context = {
        "title": words.title(groups),
        "headline": words.headline(groups),
        "facts": words.facts(groups),
        "notes": words.notes(groups, repeats),
        "summary": summary,
        "knows_stages": any(row["values"]["final_task_accuracy"] is not None for row in summary),
        "marks_best": any(row["best_final"] for row in summary),
        "differences": _differences(cells),
        "any_spread": any(group.n > 1 for group in groups),
        "accuracy_words": ACCURACY_WORDS,
        "predictor_words": " ".join(_PREDICTOR_WORDS[name] for name in predictors if name in _PREDICTOR_WORDS),
        "curves": curves,
        "per_stage": _per_stage(cells),
        "matrices": matrices,
        "kept": kept,
        "confusions": confusions,
        "named_classes": any(len(group.class_ids) <= figures.NAMED_CLASSES for group in groups),
        "confusion_order": "in order of arrival" if one_order else "in the data set's order if the class orders differ",
        "importance": importance,
        "seconds": seconds,
        "reused_base": [group.label for group in groups if any(run.log.reused_base for run in group.runs)],
        "losses": losses,
        "losses_without_base": [
            group.label for group in groups if group.first.main_losses and group.first.log.reused_base
        ],
        "protocols": [_protocol(cell) for cell in cells],
    }
    return context, [*curves, *(part["drawing"] for part in parts), seconds]


class _GroupView:
    """A group for the template: label, number of runs and colour."""

    def __init__(self, group: RunGroup, index: int) -> None:
        self.group, self.index = group, index
        self.label, self.n, self.key = group.label, group.n, index % len(SERIES)


def _kept(cell: _GroupView, predictor: str) -> dict[str, Any]:
    return {
        "drawing": figures.learned_and_kept(cell.group, cell.index, predictor),
        "table": cell.group.key("accuracy_matrix", predictor),
    }


def _confusion(cell: _GroupView, predictor: str) -> dict[str, Any]:
    return {
        "group": cell,
        "predictor": predictor_name(predictor),
        "drawing": figures.confusion(cell.group, predictor),
        "pairs": most_confused(cell.group.confusion(predictor), cell.group.class_names),
        "is_wide": figures.needs_width(len(cell.group.class_ids)),
        "is_open": cell.index < _OPEN_CONFUSIONS and predictor == cell.group.predictors[0],
    }


def _summary(cells: list[_GroupView]) -> list[dict[str, Any]]:
    rows = []
    for cell in cells:
        for position, name in enumerate(cell.group.predictors):
            values = {metric: cell.group.metric(metric, name) for metric in (*METRICS, *TASK_METRICS)}
            rows.append(
                {
                    "group": cell,
                    "leads": position == 0,
                    "predictor": predictor_name(name),
                    "values": values,
                    "average": glued(values["average_incremental_accuracy"]),
                    "final": glued(values["final_accuracy"]),
                    "forgetting": glued(values["forgetting"]),
                    "transfer": glued(values["backward_transfer"]),
                    "task": glued(values["final_task_accuracy"]),
                    "time": duration(cell.group.seconds),
                }
            )
    ranks = len(rows) > 1 and words.comparable([cell.group for cell in cells])
    for flag, metric in (("best_average", "average_incremental_accuracy"), ("best_final", "final_accuracy")):
        means = [row["values"][metric].mean for row in rows if row["values"][metric] is not None]
        for row in rows:
            value = row["values"][metric]
            row[flag] = ranks and value is not None and value.mean == max(means)
    return rows


def _differences(cells: list[_GroupView]) -> list[dict[str, Any]]:
    """For each protocol, the difference of every group to the best of those with the most runs."""
    cell_of = {cell.group: cell for cell in cells}
    tables = []
    for peers in comparable_groups([cell.group for cell in cells]):
        best = max(peers, key=lambda group: group.n)  # the first of several, which is the best
        values = {g: [g.difference(best, metric) for metric in PAIRED] for g in peers if g is not best}
        if any(value is not None and value.n > 1 for found in values.values() for value in found):
            rows = [
                {
                    "group": cell_of[group],
                    "predictor": predictor_name(group.predictors[0]),
                    "cells": [
                        (glued(value), "no pair" if value is None else f"{value.higher} of {value.n}")
                        for value in found
                    ],
                }
                for group, found in values.items()
            ]
            tables.append({"best": cell_of[best], "predictor": predictor_name(best.predictors[0]), "rows": rows})
    return tables


def _per_stage(cells: list[_GroupView]) -> dict[str, Any]:
    columns = [(cell, name) for cell in cells for name in cell.group.predictors]
    values = [
        {
            (stage, classes): value
            for stage, (classes, value) in enumerate(zip(cell.group.classes, cell.group.accuracy(name), strict=True))
        }
        for cell, name in columns
    ]
    keys = sorted({key for column in values for key in column})
    digits = 2 if len(columns) <= _EXACT_COLUMNS else 1
    return {
        "columns": [{"group": cell, "predictor": predictor_name(name)} for cell, name in columns],
        "rows": [
            {"stage": stage, "classes": classes, "cells": [glued(c.get((stage, classes)), digits) for c in values]}
            for stage, classes in keys
        ],
    }


def _protocol(cell: _GroupView) -> dict[str, Any]:
    runs = cell.group.runs
    card = _merged([run.manifest.card for run in runs])
    if cell.group.first.stopped:
        card.append(("Progress", cell.group.first.stopped))
    if "Recipe" not in dict(card):
        card.insert(0, ("Recipe", cell.group.first.recipe))
    made = [
        (
            "Runs",
            join(f"{run.directory.name} (order {run.manifest.order.name}, seed {run.seed})" for run in runs),
        ),
        *{f"Order {run.manifest.order.name}": ", ".join(run.arrivals) for run in runs if has_given_order(run)}.items(),
        ("Settings hash", join(dict.fromkeys(run.manifest.config_hash for run in runs))),
    ]
    machine = [
        *_merged([run.manifest.versions for run in runs]),
        *_merged([{key: as_text(value) for key, value in run.manifest.hardware.items()} for run in runs]),
    ]
    commands = list(dict.fromkeys(run.manifest.command for run in runs if run.manifest.command))
    return {
        "group": cell,
        "blocks": [block for block in (card, made, machine) if block],
        "commands": commands,
    }


def _merged(texts: list[Any]) -> list[tuple[str, str]]:
    """Return label and text of each line; if the runs differ, all texts."""
    labels = dict.fromkeys(label for text in texts for label in text)
    return [(label, ", ".join(dict.fromkeys(t[label] for t in texts if label in t))) for label in labels]
