"""`engram evaluate`: accuracy of a model on a folder of class folders, by class, and its confusions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engram.cli.commands.model_common import (
    exclude,
    list_labelled,
    nesting_problem,
    prepare_hardware,
    refuse_models,
    report_path,
    tell_unreadable,
)
from engram.cli.main import UNREADABLE
from engram.cli.options.models import Evaluate, TableFlags
from engram.cli.streams import printable, tell
from engram.cli.text import (
    bar,
    count_classes,
    fits,
    make_console,
    make_table,
    percent,
    print_line,
    print_table,
    shorten,
)
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.data.decode.prefetch import decode_files
from engram.data.sources.folder import walk_images
from engram.models.doubt import Doubt, area_under_curve
from engram.models.from_run import open_for_prediction
from engram.models.labels import labels_by_name
from engram.models.model import Model
from engram.models.prediction import Evaluated, LearnedImages, evaluate_batches, predict_files
from engram.report.thumbnails import SIDE

MATRIX = 20  # largest number of classes for a confusion matrix in the terminal
PAIRS = 10
KEPT = 0.95  # share of known images that are kept, where it is asked how many strangers pass


def evaluate_command(options: Evaluate, typed: Sequence[str]) -> int:
    """Carry out `engram evaluate`; return the exit status."""
    del typed
    exclude(options.quiet, options.json)
    report = report_path(options.report)
    prepare_hardware(options.hardware)
    refuse_models("evaluate", options.images)
    if options.strangers is not None and next(walk_images(_folder(options.strangers)), None) is None:
        raise EngramError(f"no images found in {options.strangers}")
    paths, labels = list_labelled(options.images, options.table)
    model = open_for_prediction(typed_path(options.model), options.hardware.device, bf16=options.bf16)
    paths, places, unknown = known_images(model, paths, labels, options.images, options.table)
    console = make_console()
    doubt = None if options.strangers is None else model.doubt_of(options.by)
    threshold = None if doubt is None else doubt.threshold(1 - KEPT)  # refuses before minutes of work
    done = _evaluate(model, paths, places, options, doubt)
    if not done.images:
        raise EngramError(f"none of the {len(paths)} images in {options.images} could be read")
    if done.learned:
        tell(learned_text(done.learned, done.images))
    found = summary(model, done, unknown, options)
    if doubt is not None and threshold is not None:
        found["strangers"] = _strangers(model, done, doubt, threshold, options)
    if report is not None:
        from engram.report.evaluation_page import write_evaluation  # matplotlib takes a second to import

        write_evaluation(found, report, _pictures)
    if options.json:
        print_line(console, json.dumps(found, allow_nan=False))
    else:
        _tell(console, found, options.quiet, report)
    if done.skipped:
        tell(f"{len(done.skipped)} of {len(paths)} images could not be read")
        return UNREADABLE
    return 0


def _pictures(paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Return thumbnails of files by path, without those that cannot be read."""
    images, positions, _ = decode_files(paths, SIDE, skip_bad=True)
    return {paths[position]: image for position, image in zip(positions, images, strict=True)}


def _folder(text: str) -> Path:
    """Return the folder that was typed; refuse anything else."""
    place = typed_path(text)
    if not place.is_dir():
        raise EngramError(f"{place} is not a folder; --strangers takes a folder of images")
    return place


def known_images(
    model: Model, paths: Sequence[str], labels: Sequence[str], folder: str, table: TableFlags
) -> tuple[list[str], list[int], dict[str, int]]:
    """Return the images of known classes, the positions of their classes, and the number of other images by class."""
    place_of = {name: model.position(label) for name, label in labels_by_name(model.labels).items()}
    unknown = dict(sorted(Counter(label for label in labels if label not in place_of).items()))
    pairs = [(path, place_of[label]) for path, label in zip(paths, labels, strict=True) if label in place_of]
    if not pairs:
        problem = nesting_problem(folder, table)
        raise EngramError(problem or f"the model knows none of the classes in {folder}: {shorten(list(unknown), 60)}")
    if unknown:
        names = shorten([printable(name) for name in unknown], 60)
        tell(f"left out what the model does not know: {names}")
    return [path for path, _ in pairs], [place for _, place in pairs], unknown


def _strangers(model: Model, done: Evaluated, doubt: Doubt, threshold: float, options: Evaluate) -> dict[str, Any]:
    """Return how well the images evaluated are told from those of --strangers, percent unrounded.

    threshold: the familiarity below which an image is unknown at a rate of 1 - KEPT.
    """
    assert options.strangers is not None
    familiarity: list[float] = []
    learned, files = LearnedImages(model), walk_images(typed_path(options.strangers))
    for part in predict_files(model, files, options.by, doubt=doubt, learned=learned):
        tell_unreadable(part.skipped, len(part.skipped))
        familiarity += [] if part.familiarity is None else part.familiarity.tolist()
    if not familiarity:
        raise EngramError(f"none of the images in {options.strangers} could be read")
    if learned.count:
        tell(
            f"the model was trained on {learned.count} of the {len(familiarity)} images in {options.strangers}, so "
            "these are no strangers; give images of classes that it does not know"
        )
    known, strangers = np.array(done.familiarity), np.array(familiarity)
    rate = 1 - KEPT
    return {
        "folder": options.strangers,
        "images": len(strangers),
        "learned_from": learned.count,
        "auroc": area_under_curve(known, strangers),
        "pass_at_95_kept": 100 * float((strangers >= np.quantile(known, rate)).mean()),
        "unknown_rate": rate,
        "known_called_unknown": 100 * float((known < threshold).mean()),
        "strangers_called_unknown": 100 * float((strangers < threshold).mean()),
    }


def _strangers_line(found: dict[str, Any]) -> str:
    return (
        f"{found['images']} strangers: AUROC {found['auroc']:.3f}; {percent(found['pass_at_95_kept'])} % of them pass "
        f"where 95 % of the known images do; with --unknown {found['unknown_rate']:g}, "
        f"{percent(found['known_called_unknown'])} % of the known images and "
        f"{percent(found['strangers_called_unknown'])} % of the strangers are unknown"
    )


def _evaluate(
    model: Model, paths: Sequence[str], places: Sequence[int], options: Evaluate, doubt: Doubt | None
) -> Evaluated:
    console = make_console(stderr=True, quiet=options.quiet or options.json)
    done: Evaluated | None = None
    reported = 0
    with bar(console, "evaluating") as progress:
        task = progress.add_task("", total=len(paths))
        for done in evaluate_batches(model, paths, places, options.by, doubt):
            tell_unreadable(done.skipped[reported:], len(done.skipped))
            reported = len(done.skipped)
            progress.update(task, completed=done.images + reported)
    assert done is not None
    return done


def learned_text(learned: int, images: int) -> str:
    """Return a warning about images that the model was trained on."""
    return (
        f"the model was trained on {learned} of these {images} images, so the accuracy on new images may be lower; "
        "evaluate on images that no lesson used"
    )


def summary(model: Model, done: Evaluated, unknown: Mapping[str, int], options: Evaluate) -> dict[str, Any]:
    """Return the result as plain data, percent unrounded. unknown: number of images of each unknown class."""
    classes = [
        {"class": label, "images": images, "right": right, "accuracy": 100 * right / images if images else None}
        for label, (images, right) in zip(model.labels, done.by_class(), strict=True)
    ]
    return {
        "model": options.model,
        "folder": options.images,
        "method": model.config.method,
        "by": done.by,
        "images": done.images,
        "learned_from": done.learned,
        "accuracy": done.accuracy,
        "accuracy_of_images": done.accuracy_of_images,
        "classes": classes,
        "confusion": done.counts.tolist(),
        "mistakes": [
            {
                "path": mistake.path,
                "class": model.labels[mistake.true],
                "predicted": model.labels[mistake.predicted],
                "probability": mistake.probability,
            }
            for mistake in done.mistakes
        ],
        "left_out": [{"class": name, "images": images} for name, images in unknown.items()],
        "unreadable": [path for path, _ in done.skipped],
    }


def _tell(console: Console, found: dict[str, Any], quiet: bool, report: Path | None) -> None:
    tested = [entry for entry in found["classes"] if entry["images"]]
    print_line(
        console,
        f"balanced accuracy {percent(found['accuracy'])} % (mean over {count_classes(len(tested))}), "
        f"plain accuracy {percent(found['accuracy_of_images'])} % (of {found['images']} images), by {found['by']}",
    )
    if "strangers" in found:
        print_line(console, _strangers_line(found["strangers"]))
    if not quiet:
        print_table(console, class_table(tested))
        matrix, unseen = matrix_table(found)
        if max(matrix.row_count, len(matrix.columns) - 1) <= MATRIX and fits(console, matrix):
            console.print(matrix)
            if unseen:
                console.print(unseen)
        elif found["accuracy"] < 100:
            print_table(console, pairs_table(found))
    if report is not None:
        print_line(console, f"report: {report}")


def class_table(tested: Sequence[dict[str, Any]]) -> Table:
    """Return a table of images and accuracy of each class."""
    table = make_table(["class", "images", "right", "accuracy %"], right=["images", "right", "accuracy %"])
    for entry in tested:
        table.add_row(printable(entry["class"]), str(entry["images"]), str(entry["right"]), percent(entry["accuracy"]))
    return table


def matrix_table(found: dict[str, Any]) -> tuple[Table, str]:
    """Return the confusion matrix, true class by predicted class, and a note on columns without a row.

    Classes without an image that were never predicted are left out.
    """
    counts = np.array(found["confusion"])
    names = [f"{number} {printable(entry['class'])}" for number, entry in enumerate(found["classes"], start=1)]
    taken = [place for place, images in enumerate(counts.sum(axis=0)) if images]
    heads = [str(place + 1) for place in taken]
    table = make_table(["true class", *heads], right=heads, title="predicted class")
    for name, row in zip(names, counts, strict=True):
        if row.sum():
            table.add_row(name, *[str(row[place]) if row[place] else "" for place in taken])
    unseen = [names[place] for place in taken if not counts[place].sum()]
    return table, f"no images of these classes: {', '.join(unseen)}" if unseen else ""


def pairs_table(found: dict[str, Any]) -> Table:
    """Return a table of the most frequent mistakes."""
    counts = np.array(found["confusion"])
    np.fill_diagonal(counts, 0)
    table = make_table(["true class", "predicted class", "images"], right=["images"])
    for flat in np.argsort(-counts, axis=None, kind="stable")[:PAIRS].tolist():
        row, column = divmod(flat, len(counts))
        if counts[row, column]:
            names = (printable(found["classes"][place]["class"]) for place in (row, column))
            table.add_row(*names, str(counts[row, column]))
    return table
