"""`engram predict`: classify images, one line of output each."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from engram.cli.commands.model_common import prepare_hardware, tell_other_files, tell_unreadable
from engram.cli.main import UNREADABLE
from engram.cli.options.models import Predict
from engram.cli.streams import arriving_lines, printable, tell
from engram.cli.text import bar, make_console
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.data.sources.folder import is_image, leads_up, walk_files, walk_images
from engram.models.doubt import check_rate
from engram.models.from_run import open_for_prediction
from engram.models.labels import encode_label
from engram.models.onnx_model import ExportedModel
from engram.models.prediction import Predicted, best_positions, predict_files

STANDARD_INPUT = "-"
Columns = Sequence[Iterable[tuple[Any, float]]]  # best class of each image, second best, ...: name, probability


def predict_command(options: Predict, typed: Sequence[str]) -> int:
    """Carry out `engram predict`; return the exit status."""
    del typed
    for name, value in (("--top", options.top), ("--batch", options.batch)):
        if value is not None and value < 1:
            raise EngramError(f"{name} must be at least 1, got {value}")
    if options.unknown is not None:
        check_rate(options.unknown)
    paths = [str(typed_path(text)) for text in options.paths]
    check_paths(paths)
    prepare_hardware(options.hardware)
    predictor = _open_predictor(options)
    # No progress bar if the results are printed on the same terminal.
    hidden = options.quiet or sys.stdout.isatty()
    console = make_console(stderr=True, quiet=hidden)
    streamed = STANDARD_INPUT in paths
    moving = console.is_terminal and not hidden
    total = sum(1 for _ in expand(paths)) if moving and not streamed else None
    done = unreadable = 0
    others: Counter[str] = Counter()
    with nullcontext() if hidden else bar(console, "predicting") as progress:
        task = None if progress is None else progress.add_task("", total=total)
        for part in predictor.predict(expand(paths, others)):
            write_lines(sys.stdout, predictor.labels, part, options.top, options.json, predictor.threshold)
            tell_unreadable(part.skipped, len(part.skipped))
            done, unreadable = done + len(part.paths), unreadable + len(part.skipped)
            if progress is not None and task is not None:
                progress.update(task, completed=done + unreadable)
    tell_other_files(others)
    if not done and not unreadable:
        if set(paths) == {STANDARD_INPUT}:
            raise EngramError("standard input named no image; give it the path of an image or a folder on each line")
        raise EngramError(f"no images found in {', '.join(paths)}")
    if unreadable:
        tell(f"{unreadable} of {done + unreadable} images could not be read")
        return UNREADABLE
    return 0


class _Predictor(NamedTuple):
    """A model, a run or an exported network, ready to predict files. threshold: familiarity below it means unknown."""

    labels: Sequence[Hashable]
    predict: Callable[[Iterable[str | None]], Iterator[Predicted]]
    threshold: float | None


def _open_predictor(options: Predict) -> _Predictor:
    place, rate = typed_path(options.model), options.unknown
    if place.suffix == ".onnx" and place.is_file():
        return _open_exported(place, options)
    model = open_for_prediction(place, options.hardware.device, bf16=options.bf16)
    model.predictor(options.by)
    doubt = None if rate is None else model.doubt_of(options.by)
    predict = partial(predict_files, model, by=options.by, batch=options.batch, doubt=doubt)
    return _Predictor(model.labels, predict, None if doubt is None or rate is None else doubt.threshold(rate))


def _open_exported(place: Path, options: Predict) -> _Predictor:
    if options.bf16 or options.hardware.device == "cuda":
        given = "--bf16" if options.bf16 else "--device cuda"
        raise EngramError(f"onnxruntime computes an exported model in float32 on the CPU; leave out {given}")
    exported, rate = ExportedModel(place), options.unknown
    if options.by not in (None, exported.by):
        raise EngramError(f"{place} was exported to predict by {exported.by}; leave out --by, or export it by another")
    threshold = None if rate is None else exported.threshold(rate)
    predict = partial(exported.predict_files, batch=options.batch, doubt=rate is not None)
    return _Predictor(exported.labels, predict, threshold)


def check_paths(given: Iterable[str]) -> None:
    """Refuse a path that does not exist and a pattern without a match, before the model is opened."""
    for text in given:
        if text != STANDARD_INPUT and not os.path.lexists(text) and next(_matches(text), None) is None:
            how = "nothing matches" if glob.has_magic(text) else "there is no file or folder"
            raise EngramError(f"{how} {printable(text)}")


def expand(
    given: Iterable[str], others: Counter[str] | None = None, lines: Iterable[str] | None = None
) -> Iterator[str | None]:
    """Yield the image files named by files, folders, patterns and, for -, the lines of standard input.

    Yields None if the next line of standard input has not arrived yet.

    others: counts the other files in the folders by their extension.
    """
    for text in given:
        if text == STANDARD_INPUT:
            given_lines = (sys.stdin or ()) if lines is None else lines  # None if it is closed
            for number, line in enumerate(arriving_lines(given_lines)):
                if line is None:
                    yield None
                    continue
                path = line.rstrip("\r\n")
                path = path.removeprefix("\ufeff") if number == 0 else path  # byte order mark of some editors
                if path:
                    yield from _files(path, others)
        else:
            yield from _files(text, others) if os.path.lexists(text) else _matches(text, others)


def _files(path: str, others: Counter[str] | None) -> Iterator[str]:
    """Yield the image files in a folder, or the file itself."""
    return walk_images(path, others) if os.path.isdir(path) else iter((path,))


def _matches(pattern: str, others: Counter[str] | None = None) -> Iterator[str]:
    """Yield the files that match a pattern, and images in folders that match it, sorted as in a folder.

    No link to a parent folder is followed, and `**` enters a folder once.
    """
    if not glob.has_magic(pattern):
        return
    parts = (pattern[:-1] if pattern.endswith("**/") else pattern).split("/")
    while parts and parts[-1] == "**":  # all that is in a folder
        parts.pop()
    place = parts.index("**") if "**" in parts else len(parts)
    start = "/".join(parts[:place]) or ("/" if pattern.startswith("/") else ".")
    roots = [root for root in sorted(glob.iglob(start), key=lambda path: path.split("/")) if not leads_up(root)]
    if place == len(parts):
        for root in roots:
            yield from _files(root, others)
        return
    seen: set[tuple[int, int]] = set()
    for root in filter(os.path.isdir, roots):
        for path in walk_files(root, seen):
            names = os.path.relpath(path, root).split("/")
            inside = any(_fits(names[:depth], parts[place:]) for depth in range(1, len(names)))
            if _fits(names, parts[place:]) or (inside and is_image(path, others)):
                yield path if place else path.removeprefix("./")


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the names in a path match the parts of a pattern; `**` matches any number of names."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_fits(names[skipped:], parts[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])


def write_lines(
    out: TextIO,
    labels: Sequence[Hashable],
    part: Predicted,
    top: int,
    as_json: bool,
    threshold: float | None = None,
) -> None:
    """Write a line for each image of a batch; JSON also has a line for each unreadable file.

    labels: names of the classes. threshold: familiarity below which an image is unknown; None asks no such question.
    """
    best = best_positions(part.shares, min(top, len(labels)))
    names = [encode_label(label) if as_json else printable(label) for label in labels]
    shares = np.take_along_axis(part.shares, best, axis=1)
    columns = [
        zip([names[place] for place in places], column, strict=True)
        for places, column in zip(best.T.tolist(), shares.T.tolist(), strict=True)
    ]
    unknown = None
    if threshold is not None and part.familiarity is not None:
        unknown = (part.familiarity < threshold).tolist()
    out.write("".join((_json if as_json else _text)(part.paths, columns, unknown)))
    if as_json:  # every path gets an answer
        out.writelines(json.dumps({"path": path, "error": reason}) + "\n" for path, reason in part.skipped)
    out.flush()


def _text(paths: Sequence[str], columns: Columns, unknown: Sequence[bool] | None) -> Iterator[str]:
    cells = [[f"\t{name}\t{share:.4f}" for name, share in column] for column in columns]
    first = repeat("", len(paths)) if unknown is None else ["\tunknown" if is_so else "\tknown" for is_so in unknown]
    return map("".join, zip(map(printable, paths), first, *cells, repeat("\n", len(paths)), strict=True))


def _json(paths: Sequence[str], columns: Columns, unknown: Sequence[bool] | None) -> Iterator[str]:
    for number, (path, *best) in enumerate(zip(paths, *columns, strict=True)):
        top = [{"class": name, "probability": share} for name, share in best]
        doubt = {} if unknown is None else {"unknown": unknown[number]}
        yield json.dumps({"path": path, **top[0], "top": top, **doubt}, allow_nan=False) + "\n"
