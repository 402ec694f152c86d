"""The page itself: words and rows computed from the groups, the template filled in, and everything written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engram.core.errors import EngramError
from engram.core.io import write_text
from engram.core.metrics import METRICS
from engram.core.provenance import version
from engram.report import figures
from engram.report import wording as words
from engram.report.entry import FILES
from engram.report.groups import Group, as_text, has_given_order, load_runs, make_groups, rivals, without_repeats
from engram.report.svg import SERIES, Drawing, drawing_style
from engram.report.tables import PAIRED, confused_pairs, csv_files, duration, number, predictor_name
from engram.report.templating import template
from engram.runs.directory import RESULT, runs_in

_OPEN_CONFUSIONS = 3
_EXACT_COLUMNS = 6  # of the table of stages; where there are more, they get one digit, so that all are in sight
_PREDICTOR_WORDS = {
    "cnn": "CNN: the class with the highest score of the classifier.",
    "nme": "NME: the class whose mean exemplar is nearest.",
}


def write_report(given: Sequence[Path], out: Path | None, tell: Callable[[str], None]) -> Path:
    """The path of the HTML page made from these run directories; figures and tables stand in a folder beside it."""
    paths = _run_directories(given, tell)
    runs, repeats = without_repeats(load_runs(paths))
    for repeat, counted in repeats.items():
        tell(f"left out {repeat.directory}: {counted.directory} has the same configuration, class order and seed")
    groups = make_groups(runs)
    target = _target(given if len(given) == 1 else paths, out)
    folder = target.with_name(f"{target.stem}_files")
    with drawing_style():
        context, drawings = _context(groups, len(repeats))
    page = template("report.html.jinja").render(
        **context, folder=quote(os.fsencode(folder.name)), folder_name=folder.name
    )
    files = {f"{drawing.name}.svg": drawing.svg for drawing in drawings} | csv_files(groups)
    write_folder(folder, files)
    write_text(target, page)
    return target


def _run_directories(given: Sequence[Path], tell: Callable[[str], None]) -> list[Path]:
    """What was given, with the runs in it that have a finished stage in place of a folder of runs."""
    found: list[Path] = []
    for path in given:
        runs = runs_in(path)
        finished = [run for run in runs if run == path or (run / RESULT).exists()]
        for run in [run for run in runs if finished and run not in finished]:
            tell(f"left out {run}: it has no finished stage yet")
        found += finished or runs or [path]  # of what cannot be used, reading it says why
    return found


def _target(directories: Sequence[Path], out: Path | None) -> Path:
    if out is None:
        parents = [directory.resolve().parent for directory in directories]
        home = directories[0] if len(directories) == 1 else Path(os.path.commonpath(parents))
        return home / "report.html"
    if out.is_dir():
        return out / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise EngramError(f"The report cannot be written to {out}: give a file name that ends in .html.")
    return out


def write_folder(folder: Path, files: dict[str, str]) -> None:
    """Nothing; the folder then holds these files, without those of an earlier report, and what others put there."""
    manifest = folder / FILES
    earlier = manifest.read_text(encoding="utf-8").splitlines() if manifest.is_file() else []
    for name, text in files.items():
        write_text(folder / name, text)
    write_text(manifest, "".join(f"{name}\n" for name in sorted(files)))
    for name in set(earlier) - set(files):
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)


def _context(groups: list[Group], repeats: int) -> tuple[dict[str, Any], list[Drawing]]:
    """What the template needs, and all figures in it."""
    cells = [_Cell(group, index) for index, group in enumerate(groups)]
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
        "marks_best": any(row["best_final"] for row in summary),
        "differences": _differences(cells),
        "any_spread": any(group.n > 1 for group in groups),
        "predictor_words": " ".join(_PREDICTOR_WORDS[name] for name in predictors if name in _PREDICTOR_WORDS),
        "curves": curves,
        "per_stage": _per_stage(cells),
        "matrices": matrices,
        "kept": kept,
        "confusions": confusions,
        "named_classes": any(len(group.class_ids) <= figures.NAMED_CLASSES for group in groups),
        "confusion_order": "in order of arrival"
        if one_order
        else "in the data set's order where runs met them in different orders",
        "importance": importance,
        "seconds": seconds,
        "reused_base": [group.label for group in groups if any(run.log.reused_base for run in group.runs)],
        "losses": losses,
        "losses_without_base": [
            group.label for group in groups if group.first.main_losses and group.first.log.reused_base
        ],
        "protocols": [_protocol(cell) for cell in cells],
        "version": version(),
    }
    return context, [*curves, *(part["drawing"] for part in parts), seconds]


class _Cell:
    """A group as the template sees it: its label, number of runs and colour."""

    def __init__(self, group: Group, index: int) -> None:
        self.group, self.index = group, index
        self.label, self.n, self.key = group.label, group.n, index % len(SERIES)


def _kept(cell: _Cell, predictor: str) -> dict[str, Any]:
    return {
        "drawing": figures.learned_and_kept(cell.group, cell.index, predictor),
        "table": f"accuracy_matrix_{cell.group.slug}_{predictor}",
    }


def _confusion(cell: _Cell, predictor: str) -> dict[str, Any]:
    return {
        "group": cell,
        "predictor": predictor_name(predictor),
        "drawing": figures.confusion(cell.group, predictor),
        "pairs": confused_pairs(cell.group, predictor),
        "is_wide": figures.needs_width(len(cell.group.class_ids)),
        "is_open": cell.index < _OPEN_CONFUSIONS and predictor == cell.group.predictors[0],
    }


def _summary(cells: list[_Cell]) -> list[dict[str, Any]]:
    rows = []
    for cell in cells:
        for position, name in enumerate(cell.group.predictors):
            values = {metric: cell.group.metric(metric, name) for metric in METRICS}
            rows.append(
                {
                    "group": cell,
                    "leads": position == 0,
                    "predictor": predictor_name(name),
                    "values": values,
                    "average": number(values["average_incremental_accuracy"]),
                    "final": number(values["final_accuracy"]),
                    "forgetting": number(values["forgetting"]),
                    "transfer": number(values["backward_transfer"]),
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


def _differences(cells: list[_Cell]) -> list[dict[str, Any]]:
    """A table for each protocol: every group less the best of those with the most runs, where pairs have a spread."""
    cell_of = {cell.group: cell for cell in cells}
    tables = []
    for beside in rivals([cell.group for cell in cells]):
        best = max(beside, key=lambda group: group.n)  # of several the first, which is the best
        values = {g: [g.difference(best, metric) for metric in PAIRED] for g in beside if g is not best}
        if any(value is not None and value.n > 1 for found in values.values() for value in found):
            rows = [
                {
                    "group": cell_of[group],
                    "predictor": predictor_name(group.predictors[0]),
                    "cells": [
                        (number(value), "no pair" if value is None else f"{value.higher} of {value.n}")
                        for value in found
                    ],
                }
                for group, found in values.items()
            ]
            tables.append({"best": cell_of[best], "predictor": predictor_name(best.predictors[0]), "rows": rows})
    return tables


def _per_stage(cells: list[_Cell]) -> dict[str, Any]:
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
            {"stage": stage, "classes": classes, "cells": [number(c.get((stage, classes)), digits) for c in values]}
            for stage, classes in keys
        ],
    }


def _protocol(cell: _Cell) -> dict[str, Any]:
    runs = cell.group.runs
    card = _merged([run.manifest.card for run in runs])
    if cell.group.first.stopped:
        card.append(("Progress", cell.group.first.stopped))
    if "Recipe" not in dict(card):
        card.insert(0, ("Recipe", cell.group.first.recipe))
    made = [
        (
            "Runs",
            words.join(f"{run.directory.name} (order {run.manifest.order.name}, seed {run.seed})" for run in runs),
        ),
        *{f"Order {run.manifest.order.name}": ", ".join(run.arrivals) for run in runs if has_given_order(run)}.items(),
        ("Settings hash", words.join(dict.fromkeys(run.manifest.config_hash for run in runs))),
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
    """Label and text of each line, with all texts named where the runs differ."""
    labels = dict.fromkeys(label for text in texts for label in text)
    return [(label, ", ".join(dict.fromkeys(t[label] for t in texts if label in t))) for label in labels]
