"""The page itself: words and rows computed from the groups, the template filled in, and everything written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from engram.errors import EngramError
from engram.files import write_bytes
from engram.report import FILES, figures
from engram.report.groups import Group, make_groups
from engram.report.load import METRICS, Run, load_runs
from engram.report.svg import SERIES, Drawing, drawing_style
from engram.report.tables import confused_pairs, csv_files, duration, number, predictor_name
from engram.rundir import version

_OPEN_CONFUSIONS = 3
_HEADLINE_GROUPS = 5
_PREDICTOR_WORDS = {
    "cnn": "CNN: the class with the highest score of the classifier.",
    "nme": "NME: the class whose mean exemplar is nearest.",
}


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """The path of the HTML page made from these run directories; figures and tables stand in a folder beside it."""
    paths = [Path(directory) for directory in directories]
    groups = make_groups(load_runs(paths))
    target = _target(paths, out)
    folder = target.with_name(f"{target.stem}_files")
    with drawing_style():
        context, drawings = _context(groups)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    page = environment.get_template("report.html.jinja").render(
        **context, folder=quote(folder.name), folder_name=folder.name
    )
    files = {f"{drawing.name}.svg": drawing.svg for drawing in drawings} | csv_files(groups)
    write_folder(folder, files)
    write_bytes(target, page.encode())
    return target


def _target(directories: list[Path], out: Path | None) -> Path:
    if out is None:
        parents = [directory.resolve().parent for directory in directories]
        home = directories[0] if len(directories) == 1 else Path(os.path.commonpath(parents))
        return home / "report.html"
    out = Path(out)
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
        write_bytes(folder / name, text.encode())
    write_bytes(manifest, "".join(f"{name}\n" for name in sorted(files)).encode())
    for name in set(earlier) - set(files):
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)


def _context(groups: list[Group]) -> tuple[dict[str, Any], list[Drawing]]:
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
    losses = [{"drawing": figures.training_loss(group)} for group in groups if group.first.losses]
    seconds = figures.time_spent(groups)
    parts = [*matrices["reported"], *matrices["others"], *kept, *confusions, *importance, *losses]
    summary = _summary(cells)
    one_order = all(group.has_one_order for group in groups)
    context = {
        "title": _title(groups),
        "headline": _headline(groups),
        "facts": _facts(groups),
        "notes": _notes(groups),
        "summary": summary,
        "marks_best": any(row["best_final"] for row in summary),
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
        "reused_base": [group.label for group in groups if any(run.reused_base for run in group.runs)],
        "losses": losses,
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
        "is_open": cell.index < _OPEN_CONFUSIONS and predictor == cell.group.predictors[0],
    }


def _title(groups: list[Group]) -> str:
    names = [group.label for group in groups]
    data = _join(dict.fromkeys(group.first.dataset for group in groups))
    if len(names) > _HEADLINE_GROUPS:
        return f"{len(names)} methods on {data}"
    return f"{_join(names)} on {data}"


def _headline(groups: list[Group]) -> str:
    """What came out, in one sentence, from the final accuracy of each group's reported predictor."""
    results = [(group.metric("final_accuracy", group.predictors[0]), group) for group in groups]
    known = sorted(((v, g) for v, g in results if v is not None), key=lambda pair: -pair[0].mean)
    same_classes = len({group.classes[-1] for _, group in known}) == 1
    clauses = []
    for position, (value, group) in enumerate(known[:_HEADLINE_GROUPS]):
        verb = "at" if position else "is at" if group.first.stopped else "ends at"
        over = f" over {group.classes[-1]} classes" if position == 0 or not same_classes else ""
        clauses.append(f"{group.label} {verb} {number(value, 1)}\N{NO-BREAK SPACE}%{over}")
    rest = len(known) - len(clauses)
    tail = f"; {rest} more {'is' if rest == 1 else 'are'} in the table" if rest > 0 else ""
    return ", ".join(clauses) + tail + "."


def _facts(groups: list[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    protocols = list(dict.fromkeys(_stages_in_words(run) for run in runs))
    words = protocols[0] if len(protocols) == 1 else f"{len(protocols)} different protocols"
    devices = _join(dict.fromkeys(run.hardware.get("device", "unknown device") for run in runs))
    predictors = _join(dict.fromkeys(predictor_name(group.predictors[0]) for group in groups))
    dates = sorted({run.created[:10] for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Top-1 accuracy of the {predictors} predictor over all classes seen. {words}; {count} on {devices}, {when}."


def _stages_in_words(run: Run) -> str:
    base, later = run.stage_sizes[0], run.stage_sizes[1:]
    if not later:
        return f"{base} classes in one stage"
    sizes = _join(str(size) for size in dict.fromkeys(later))
    plural = "" if set(later) == {1} else "es"
    return f"{base} base classes, then {len(later)} stage{'s' if len(later) > 1 else ''} of {sizes} class{plural}"


def _notes(groups: list[Group]) -> list[str]:
    """What a careful reader should know before comparing."""
    notes = []
    if not _same_protocol(groups):
        notes.append(
            "These runs differ in data or in how it was split into stages, so their numbers are not comparable."
        )
    notes += [f"{group.first.recipe}: {group.first.stopped}." for group in groups if group.first.stopped]
    for group in groups:
        if len({(run.order, run.seed) for run in group.runs}) < group.n:
            notes.append(
                f"{group.label} has runs with the same order and seed, so its spread is not that of independent runs."
            )
    if len(groups) > 1 and _comparable(groups):
        if all(group.n == 1 for group in groups):
            notes.append(
                "One run each: a difference of a point or two may be chance. More orders and seeds would tell."
            )
        else:
            notes += _lead(groups)
    return notes


def _same_protocol(groups: list[Group]) -> bool:
    return len({(g.first.fingerprint, g.first.class_names, g.first.stage_sizes) for g in groups}) == 1


def _comparable(groups: list[Group]) -> bool:
    """True when all groups went the same way to its end, so that a higher accuracy is a better one."""
    return _same_protocol(groups) and not any(group.first.stopped for group in groups)


def _lead(groups: list[Group]) -> list[str]:
    values = [(group.metric("final_accuracy", group.predictors[0]), group) for group in groups]
    ranked = sorted(((v, g) for v, g in values if v is not None), key=lambda pair: -pair[0].mean)
    for (best, first), (second, runner_up) in list(pairwise(ranked))[:1]:
        gap = best.mean - second.mean
        spreads = [value.std for value in (best, second) if value.std is not None]
        if spreads:
            verdict = "more than" if gap > max(spreads) else "within"
            return [
                f"{first.label} leads {runner_up.label} by {gap:.1f} points at the end, {verdict} the spread "
                f"over runs (standard deviation {' and '.join(f'{s:.1f}' for s in spreads)})."
            ]
    return []


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
    ranks = len(rows) > 1 and _comparable([cell.group for cell in cells])
    for flag, metric in (("best_average", "average_incremental_accuracy"), ("best_final", "final_accuracy")):
        means = [row["values"][metric].mean for row in rows if row["values"][metric] is not None]
        for row in rows:
            value = row["values"][metric]
            row[flag] = ranks and value is not None and value.mean == max(means)
    return rows


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
    return {
        "columns": [{"group": cell, "predictor": predictor_name(name)} for cell, name in columns],
        "rows": [
            {"stage": stage, "classes": classes, "cells": [number(c.get((stage, classes))) for c in values]}
            for stage, classes in keys
        ],
    }


def _protocol(cell: _Cell) -> dict[str, Any]:
    runs = cell.group.runs
    card = _merged([run.card for run in runs])
    if cell.group.first.stopped:
        card.append(("Progress", cell.group.first.stopped))
    if "Recipe" not in dict(card):
        card.insert(0, ("Recipe", cell.group.first.recipe))
    made = [
        ("Runs", _join(f"{run.directory.name} (order {run.order}, seed {run.seed})" for run in runs)),
        ("Settings hash", _join(dict.fromkeys(run.config_hash for run in runs))),
    ]
    machine = [*_merged([run.versions for run in runs]), *_merged([run.hardware for run in runs])]
    commands = list(dict.fromkeys(run.command for run in runs if run.command))
    return {
        "group": cell,
        "blocks": [block for block in (card, made, machine) if block],
        "commands": commands,
    }


def _merged(texts: list[Any]) -> list[tuple[str, str]]:
    """Label and text of each line, with all texts named where the runs differ."""
    labels = dict.fromkeys(label for text in texts for label in text)
    return [(label, ", ".join(dict.fromkeys(t[label] for t in texts if label in t))) for label in labels]


def _join(words: Iterable[str]) -> str:
    listed = list(words)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
