"""Read run directories as checked, typed data: run.json, result.json, stages/ and events.jsonl.

This is the only reader of these files. It does not import torch. A file that is missing, half-written, inconsistent or
of another run raises an EngramError that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors

from engram.core import metrics
from engram.core.errors import EngramError
from engram.core.events import read_events
from engram.core.provenance import version
from engram.core.safe_folder import MissingFile, read_inside
from engram.runs.checked import Source, checked, read_checked, read_json_file
from engram.runs.directory import EVENTS, FORMAT, MANIFEST, PREDICTIONS, RESULT, TASK_PREDICTIONS, stage_name
from engram.runs.result import order_value, stage_metrics, task_metrics
from engram.runs.stored_run import (
    LossPoint,
    RunIdentity,
    RunLog,
    RunManifest,
    RunProgress,
    RunResult,
    StageArrays,
    StageRow,
    StoredRun,
)

TOLERANCE = 1e-6  # of a metric computed again from the stages
ACCURACY_TOLERANCE = 0.05  # of an accuracy computed again from the predictions, in percent
MAX_THREADS = 1024  # of torch; more of them end the program without a message
_ARRAY_BYTES = 2**28
_RUN_AGAIN = "run it again, or leave this run out"
_RESUME = "resume the run, which writes it again, or leave this run out"


def read_manifest(directory: Path) -> RunManifest:
    """Read run.json."""
    if not directory.is_dir():
        raise EngramError(f"there is no run directory at {directory}")
    file = directory / MANIFEST
    if not os.path.lexists(file):
        raise EngramError(f"{directory} is not a run directory: it has no {MANIFEST}")
    source = Source(file, _RUN_AGAIN)
    content = read_json_file(source, file)
    form = checked(_Format, content, source)
    if form.format != FORMAT:
        raise EngramError(
            f"{directory} was written by engram {form.engram} in format {form.format}, and this is engram {version()}, "
            f"which reads format {FORMAT}; use the version that wrote it"
        )
    manifest = checked(RunManifest, content, source)
    check_identity(manifest, source, num_classes=len(manifest.data.class_names))
    if not manifest.predictors:
        source.fail("predictors is empty")
    if len(manifest.data.image_size) != 2:
        source.fail("data.image_size should be a height and a width")
    return manifest


@dataclass(frozen=True)
class _Format:
    format: int
    engram: Any = "?"


def check_identity(run: RunIdentity, source: Source, num_classes: int | None = None) -> None:
    """Check that configuration, class order and stages fit together. num_classes: of the data set, if known."""
    if config_hash(run.config) != run.config_hash:
        source.fail("its configuration was changed after the run began")
    if run.order.name != str(configured := run.config.get("order", run.order.name)):
        source.fail(f"its class order is called {run.order.name!r:.60}, and its configuration has {configured!r:.60}")
    ids = run.order.class_ids
    if sorted(ids) != list(range(len(ids) if num_classes is None else num_classes)):
        source.fail("order.class_ids is not an order of the classes")
    if not run.stage_sizes or sum(run.stage_sizes) != len(ids):
        source.fail(f"stage_sizes does not fit the {len(ids)} classes of the class order")
    threads = run.hardware.get("threads")
    if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_THREADS):
        source.fail(f"hardware.threads should be a whole number from 1 to {MAX_THREADS}, got {threads!r:.60}")


def config_hash(config: Mapping[str, Any]) -> str:
    """Short digest of a configuration (plain data), without the recipe's name and the path of the images.

    Computed from the data as saved, so it stays the same when a later version has more settings.
    """
    data = {key: value for key, value in config.items() if key != "recipe"}
    images = config.get("data", {})
    data["data"] = {k: v for k, v in images.items() if k != "path"} if isinstance(images, dict) else images
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=8).hexdigest()


def read_result(directory: Path, manifest: RunManifest) -> RunResult:
    """Read result.json; compute its metrics again from its stages, and its stages from their predictions.

    A stage whose predictions were deleted is not computed again.
    """
    result, source = parse_result(directory), Source(directory / RESULT, _RESUME)
    check_result(result, manifest, source)
    if result.stages and (missing := [name for name in manifest.predictors if name not in result.predictors]):
        source.fail(f"it has no {missing[0]} accuracy")
    for row in result.stages:
        read_stage(directory, row, manifest.stage_sizes)
    return result


def parse_result(directory: Path) -> RunResult:
    """Read result.json with its types checked, but not its numbers."""
    return read_checked(RunResult, directory / RESULT, _RESUME)


def check_result(result: RunResult, run: RunIdentity, source: Source) -> None:
    """Check that a result belongs to its run, and that its metrics follow from its stages."""
    config = run.config
    expected = {"recipe": run.recipe, "method": config.get("method"), "seed": config.get("seed")}
    for name, value in {**expected, "order": order_value(run.order.name)}.items():
        found = result.content.get(name, value)  # early results have no order
        if type(found) not in (int, str) or str(found) != str(value):
            source.fail(f"its result is of another run: {name} {found!r:.200}, not {value!r:.200}")
    check_stages(result.stages, run, source)
    for name in result.predictors:
        accuracy = [row.accuracy[name] for row in result.stages]
        again = stage_metrics(accuracy, [row.accuracy_by_stage[name] for row in result.stages])
        for metric, value in again.items():
            stored = result.metrics[metric].get(name)
            if (stored is None) != (value is None) or abs((stored or 0) - (value or 0)) > TOLERANCE:
                source.fail(f"its {metric} ({name}) is {stored} and its stages give {value}")
    again = task_metrics([row.task_accuracy for row in result.stages])
    for metric in metrics.TASK_METRICS:
        stored, found = result.metrics[metric], again.get(metric, {})
        if stored.keys() != found.keys() or any(abs((stored[n] or 0) - found[n]) > TOLERANCE for n in found):
            source.fail(f"its {metric} is {dict(stored)} and its stages give {found}")


def check_stages(stages: Sequence[StageRow], run: RunIdentity, source: Source) -> None:
    """Check that stages are the first ones of a run, each with the accuracies of the same predictors."""
    if len(stages) > len(run.stage_sizes):
        source.fail(f"it has {len(stages)} stages and the run has {len(run.stage_sizes)}")
    if stages and not stages[0].accuracy:
        source.fail("stages[0].accuracy is empty")
    for index, (row, seen) in enumerate(zip(stages, accumulate(run.stage_sizes), strict=False)):
        if row.stage != index or row.classes != seen:
            source.fail(f"stages[{index}] should be stage {index} with {seen} classes")
        if row.accuracy.keys() != stages[0].accuracy.keys():
            source.fail(f"stages[{index}] should have the predictors of stages[0]")
        for name in row.accuracy:
            if len(row.accuracy_by_stage.get(name, ())) != index + 1:
                source.fail(f"stages[{index}] should have a {name} accuracy for each of {index + 1} stages")
        if row.task_accuracy and row.task_accuracy.keys() != row.accuracy.keys():
            source.fail(f"stages[{index}].task_accuracy should have the predictors of its accuracy")


def read_stage(directory: Path, row: StageRow, sizes: Sequence[int]) -> StageArrays | None:
    """Read the predictions of a stage and check its accuracies; None if stages/NNN.safetensors is missing.

    sizes: number of new classes of each stage.
    """
    source = Source(directory / stage_name(row.stage), _RUN_AGAIN)
    try:
        tensors = load_tensors(read_inside(directory, stage_name(row.stage), _ARRAY_BYTES))
    except MissingFile:
        return None
    except EngramError:
        raise
    except Exception as error:  # safetensors has its own error types, and NumPy and JSON raise others
        source.fail(f"it cannot be read ({error})")
    names = {"targets": "targets"} | {name: f"{PREDICTIONS}{name}" for name in row.accuracy}
    names |= {f"{TASK_PREDICTIONS}{name}": f"{TASK_PREDICTIONS}{name}" for name in row.task_accuracy}
    labels: dict[str, np.ndarray] = {}
    for key, name in names.items():
        values = tensors.get(name)
        if values is None or values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
            source.fail(f"{name} should be a list of one whole number per test image")
        if values.min() < 0 or values.max() >= row.classes:
            source.fail(f"{name} has a label outside the {row.classes} classes seen")
        labels[key] = values.astype(np.int64)
    targets = labels.pop("targets")
    born = np.repeat(np.arange(row.stage + 1), sizes[: row.stage + 1])
    if set(born[targets]) != set(born):
        source.fail("targets has no image of one of the stages")
    for key, values in labels.items():
        if len(values) != len(targets):
            source.fail(f"{names[key]} has {len(values)} labels for {len(targets)} test images")
    for name, stored in row.task_accuracy.items():
        known = labels.pop(f"{TASK_PREDICTIONS}{name}")
        if (born[known] != born[targets]).any():
            source.fail(f"{TASK_PREDICTIONS}{name} has a label of another stage than its image")
        if abs((accuracy := metrics.accuracy(targets, known)) - stored) > ACCURACY_TOLERANCE:
            source.fail(f"its {name} predictions within stages are {accuracy:.2f} % right, {RESULT} has {stored:.2f} %")
    for name, values in labels.items():
        found = [metrics.accuracy(targets, values), *metrics.accuracy_by_stage(targets, values, sizes[: row.stage + 1])]
        for accuracy, stored in zip(found, (row.accuracy[name], *row.accuracy_by_stage[name]), strict=True):
            if abs(accuracy - stored) > ACCURACY_TOLERANCE:
                source.fail(f"its {name} predictions are {accuracy:.2f} % right, {RESULT} has {stored:.2f} %")
    importance: list[np.ndarray] = []
    while (values := tensors.get(f"importance.{len(importance)}")) is not None:
        if values.ndim != 1 or not len(values) or not np.isfinite(values).all() or values.min() < 0:
            source.fail(f"importance.{len(importance)} should be one finite number >= 0 per channel")
        importance.append(values.astype(np.float64))
    return StageArrays(targets, labels, tuple(importance))


def read_log(directory: Path) -> RunLog:
    """Read events.jsonl. Lines that are cut off or have wrong types are skipped; the file may be missing."""
    losses: dict[tuple[int, str, int], LossPoint] = {}
    times: list[float] = []
    starts, reused = 0, False
    for event in read_events(directory / EVENTS):
        times += _finite({"time": event.get("time")}).values()
        starts += event.get("event") == "run_started"
        reused |= event.get("event") == "base_reused"
        if event.get("event") == "epoch_finished" and (point := _loss_point(event)) is not None:
            # A resumed run repeats the epochs after its checkpoint: the last values count, in the first position.
            losses[point.stage, point.phase, point.epoch] = point
    return RunLog(tuple(losses.values()), reused, (times[0], times[-1]) if times and starts == 1 else None)


def _loss_point(event: Mapping[str, Any]) -> LossPoint | None:
    stage, phase, epoch, terms = (event.get(each.name) for each in fields(LossPoint))
    if type(stage) is not int or type(epoch) is not int or not isinstance(phase, str) or not isinstance(terms, dict):
        return None
    return LossPoint(stage, phase, epoch, _finite(terms))


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are finite numbers."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if type(value) in (int, float) and abs(value) <= np.finfo(np.float64).max:
            found[name] = float(value)
    return found


def read_run(directory: Path) -> StoredRun:
    """Read a run directory with every check. At least one stage must be finished."""
    manifest = read_manifest(directory)
    if not os.path.lexists(directory / RESULT):
        raise EngramError(f"{directory} has no finished stage yet (no {RESULT}); let its first stage finish first")
    result = read_result(directory, manifest)
    if not result.stages:
        raise EngramError(f"{directory} has no finished stage yet; let its first stage finish first")
    arrays = read_stage(directory, result.stages[-1], manifest.stage_sizes)
    if arrays is None:
        Source(directory / stage_name(len(result.stages) - 1), _RUN_AGAIN).fail("it is missing")
    return StoredRun(directory, manifest, result, arrays, read_log(directory))


def read_progress(directory: Path, manifest: RunManifest) -> RunProgress:
    """Read how far a run is, except its position inside a stage.

    If result.json is missing or damaged, no stage counts as finished: a resumed run writes it again.
    """
    threads = manifest.hardware.get("threads")
    try:
        result = read_result(directory, manifest)
    except EngramError:
        return RunProgress("incomplete", threads=threads)
    if len(result.stages) < len(manifest.stage_sizes):
        return RunProgress("incomplete", len(result.stages), threads=threads)
    return RunProgress("done", len(result.stages), result.content, threads, code=manifest.method_code)
