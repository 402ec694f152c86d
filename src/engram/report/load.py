"""Run directories as checked, plain data: what every table and figure of the report is made from.

Nothing here trains, draws or imports torch. A file that is missing, half-written, or belongs to something else is
refused by name: a report drawn from a guess would be worse than none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from engram.core import metrics
from engram.core.errors import EngramError
from engram.core.events import read_events
from engram.runs.directory import EVENTS, FORMAT, MANIFEST, RESULT
from engram.runs.result import SECONDS

# Accuracy is recomputed from the stored predictions; anything above rounding means the files are not of one run.
_ACCURACY_TOLERANCE = 0.05

_T = TypeVar("_T")


@dataclass(frozen=True)
class StageRow:
    """One evaluation: `classes` seen, accuracy in percent by predictor, and R[t][0..t] by predictor."""

    classes: int
    accuracy: Mapping[str, float]
    by_stage: Mapping[str, tuple[float, ...]]
    seconds: float


@dataclass(frozen=True)
class LossPoint:
    """The mean loss terms of one epoch of a phase of a stage."""

    stage: int
    phase: str
    epoch: int
    terms: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory, checked: configuration, results of the finished stages, last predictions and importance."""

    directory: Path
    recipe: str
    method: str
    dataset: str
    fingerprint: str
    order: str
    seed: str
    created: str
    config: Mapping[str, Any]
    config_hash: str
    card: Mapping[str, str]
    class_names: tuple[str, ...]
    class_order: tuple[int, ...]
    stage_sizes: tuple[int, ...]
    predictors: tuple[str, ...]
    reported: str
    stages: tuple[StageRow, ...]
    metrics: Mapping[str, Mapping[str, float | None]]
    seconds: float
    seconds_by: Mapping[str, float]
    targets: np.ndarray
    predictions: Mapping[str, np.ndarray]
    importance: tuple[np.ndarray, ...]
    losses: tuple[LossPoint, ...]
    reused_base: bool  # trained by another run, so its time is not in this one
    versions: Mapping[str, str]
    hardware: Mapping[str, str]
    command: str | None

    @property
    def main_losses(self) -> list[LossPoint]:
        """The epochs of the stages' main phase."""
        return [point for point in self.losses if point.phase == "main"]

    @property
    def met(self) -> tuple[str, tuple[int, ...], str]:
        """Class order and seed: by these the runs of two configurations are paired."""
        return self.order, self.class_order, self.seed

    @property
    def arrivals(self) -> tuple[str, ...]:
        """The names of the classes in their order."""
        return tuple(self.class_names[i] for i in self.class_order)

    @property
    def has_given_order(self) -> bool:
        """True when the class order was given class by class: it has no name but itself."""
        return "," in str(self.config.get("order"))

    @property
    def is_complete(self) -> bool:
        """True when every planned stage has finished."""
        return len(self.stages) == len(self.stage_sizes)

    @property
    def stopped(self) -> str:
        """'stopped after stage k of T' for an unfinished run, else the empty string."""
        if self.is_complete:
            return ""
        return f"stopped after stage {len(self.stages) - 1} of {len(self.stage_sizes) - 1}"


class _Record:
    """A JSON object that knows its file, so that whatever is wrong with it can be said in one sentence."""

    def __init__(self, data: Any, file: Path, where: str = "") -> None:
        self.file, self.where = file, where
        if not isinstance(data, dict):
            self.fail(f"should be a JSON object, not {type(data).__name__}")
        self.data: dict[str, Any] = data

    def fail(self, what: str) -> NoReturn:
        place = f" in {self.where}" if self.where else ""
        raise EngramError(f"{self.file} cannot be used: {what}{place}; run it again or leave this run out.")

    @overload
    def get(self, key: str, kind: type[_T]) -> _T: ...
    @overload
    def get(self, key: str, kind: type[_T], default: _T) -> _T: ...
    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        if key not in self.data:
            if default is not None:
                return default
            self.fail(f"the key {key!r} is missing")
        value: Any = self.data[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(f"{key!r} should be {kind.__name__}, not {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(f"{key!r} is {value}")
        return value

    def sub(self, key: str) -> _Record:
        return _Record(self.get(key, dict), self.file, f"{self.where}.{key}" if self.where else key)

    def listed(self, key: str, kind: type[_T]) -> tuple[_T, ...]:
        items = self.get(key, list)
        wrong = [item for item in items if not isinstance(item, kind) or isinstance(item, bool)]
        if wrong:
            self.fail(f"{key!r} should hold only {kind.__name__}, not {wrong[0]!r}")
        return tuple(items)

    def texts(self, key: str) -> dict[str, str]:
        return {str(name): _text(value) for name, value in self.get(key, dict, {}).items()}

    def percent(self, key: str) -> float:
        value = self.get(key, float)
        if not -1e-6 <= value <= 100 + 1e-6:
            self.fail(f"{key!r} is {value}, not a percentage")
        return value


def load_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs of these directories, in the order given; a directory given twice is refused.

    A class order that was given class by class is called "given 1", "given 2" and so on, the same one the same.
    """
    if not directories:
        raise EngramError("No run directory was given; name at least one, such as runs/afc-mini-b10-s10.")
    seen: dict[Path, Path] = {}
    for directory in map(Path, directories):
        resolved = directory.resolve()
        if resolved in seen:
            raise EngramError(f"{directory} was given twice; name each run once, or its spread would look too small.")
        seen[resolved] = directory
    return _with_short_orders([load_run(directory) for directory in seen.values()])


def _with_short_orders(runs: list[Run]) -> list[Run]:
    """The runs with a number for each class order that was given class by class, whose name would be all of it."""
    numbers: dict[tuple[str, ...], int] = {}
    for run in runs:
        if run.has_given_order:
            numbers.setdefault(run.arrivals, len(numbers) + 1)
    return [replace(run, order=f"given {numbers[run.arrivals]}") if run.has_given_order else run for run in runs]


def load_run(directory: Path) -> Run:
    """The checked content of one run directory."""
    directory = Path(directory)
    if not directory.is_dir():
        raise EngramError(f"{directory} is not a directory; give the directory of a run.")
    if not (directory / MANIFEST).exists():
        raise EngramError(f"{directory} is not a run directory: it has no {MANIFEST}; give another one.")
    info = _Record(_json(directory / MANIFEST), directory / MANIFEST)
    if info.get("format", int) != FORMAT:
        raise EngramError(
            f"{info.file} has run format {info.data['format']} and this engram reads format {FORMAT}; "
            "make the report with the engram version that made the run."
        )
    if not (directory / RESULT).exists():
        raise EngramError(f"{directory} has no finished stage yet (no {RESULT}); let its first stage finish first.")
    result = _Record(_json(directory / RESULT), directory / RESULT)
    recipe = info.get("recipe", str)
    if result.get("recipe", str) != recipe:
        result.fail(f"its recipe is {result.data['recipe']!r} but {MANIFEST} says {recipe!r}")
    return _assemble(directory, info, result)


def _assemble(directory: Path, info: _Record, result: _Record) -> Run:
    names, class_order, sizes = _protocol(info)
    predictors = info.listed("predictors", str)
    if not predictors:
        info.fail("'predictors' is empty")
    stages = _stages(result, sizes, predictors)
    last = directory / "stages" / f"{len(stages) - 1:03d}.safetensors"
    targets, predictions, importance = _tensors(last, stages[-1], predictors)
    config, data = info.get("config", dict), info.sub("data")
    times = result.sub("seconds_by")
    events = list(read_events(directory / EVENTS))
    return Run(
        directory=directory,
        recipe=info.get("recipe", str),
        method=result.get("method", str),
        dataset=data.get("name", str),
        fingerprint=data.get("fingerprint", str),
        order=info.sub("order").get("name", str),
        seed=str(result.get("seed", int)),
        created=info.get("created", str),
        config=config,
        config_hash=info.get("config_hash", str),
        card=info.texts("card"),
        class_names=names,
        class_order=class_order,
        stage_sizes=sizes,
        predictors=predictors,
        reported=_reported(config, predictors),
        stages=stages,
        metrics={metric: _metric(result.sub(metric), predictors) for metric in metrics.METRICS},
        seconds=result.get("seconds", float),
        seconds_by={part: times.get(part, float, 0.0) for part in [*SECONDS, *sorted(set(times.data))]},
        targets=targets,
        predictions=predictions,
        importance=importance,
        losses=_losses(events, len(stages)),
        reused_base=any(event.get("event") == "base_reused" for event in events),
        versions=info.texts("versions"),
        hardware=info.texts("hardware"),
        command=info.get("command", str) if info.data.get("command") is not None else None,
    )


def _protocol(info: _Record) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    names = info.sub("data").listed("class_names", str)
    class_order = info.sub("order").listed("class_ids", int)
    sizes = info.listed("stage_sizes", int)
    if len(set(class_order)) != len(class_order) or any(not 0 <= i < len(names) for i in class_order):
        info.fail(f"'class_ids' is not an order of the {len(names)} classes")
    if not sizes or min(sizes) < 1 or sum(sizes) > len(class_order):
        info.fail(f"'stage_sizes' adds up to {sum(sizes)} classes and the class order has {len(class_order)}")
    return names, class_order, sizes


def _stages(result: _Record, sizes: tuple[int, ...], predictors: tuple[str, ...]) -> tuple[StageRow, ...]:
    entries = result.get("stages", list)
    if not entries:
        raise EngramError(f"{result.file.parent} has no finished stage yet; let its first stage finish first.")
    if len(entries) > len(sizes):
        result.fail(f"it holds {len(entries)} stages and {MANIFEST} plans {len(sizes)}")
    stages = []
    for index, (entry, seen) in enumerate(zip(entries, accumulate(sizes), strict=False)):
        record = _Record(entry, result.file, f"stages[{index}]")
        if record.get("stage", int) != index or record.get("classes", int) != seen:
            record.fail(f"stage {index} with {seen} classes was expected")
        accuracy, by_stage = record.sub("accuracy"), record.sub("accuracy_by_stage")
        rows = {}
        for predictor in predictors:
            row = by_stage.get(predictor, list)
            if len(row) != index + 1:
                by_stage.fail(f"{predictor!r} should hold {index + 1} numbers, not {len(row)}")
            numbers = _Record(
                {str(i): value for i, value in enumerate(row)}, result.file, f"{by_stage.where}.{predictor}"
            )
            rows[predictor] = tuple(numbers.percent(str(i)) for i in range(index + 1))
        percents = {predictor: accuracy.percent(predictor) for predictor in predictors}
        stages.append(StageRow(seen, percents, rows, record.get("seconds", float)))
    return tuple(stages)


def _tensors(
    file: Path, stage: StageRow, predictors: tuple[str, ...]
) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    try:
        tensors = load_tensors(file.read_bytes())
    except FileNotFoundError:
        raise EngramError(f"{file} is missing; run it again, or leave it out of the report.") from None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise EngramError(f"{file} cannot be read ({error}); run it again, or leave it out.") from None
    record = _Record(tensors, file)
    targets = record.get("targets", np.ndarray)
    predictions = {name: record.get(f"predictions.{name}", np.ndarray) for name in predictors}
    for name, labels in {
        "targets": targets,
        **{f"predictions.{k}": v for k, v in predictions.items()},
    }.items():
        if labels.ndim != 1 or labels.shape != targets.shape or not len(labels) or labels.dtype.kind not in "iu":
            record.fail(f"{name!r} should be a list of one whole number per test image")
        if labels.min() < 0 or labels.max() >= stage.classes:
            record.fail(f"{name!r} holds a label outside the {stage.classes} classes seen")
    for name, labels in predictions.items():
        accuracy = metrics.accuracy(targets, labels)
        if abs(accuracy - stage.accuracy[name]) > _ACCURACY_TOLERANCE:
            record.fail(
                f"its {name} predictions are {accuracy:.2f} % right but {RESULT} says {stage.accuracy[name]:.2f} %"
            )
    importance = []
    while (values := tensors.get(f"importance.{len(importance)}")) is not None:
        if values.ndim != 1 or not len(values) or not np.isfinite(values).all() or values.min() < 0:
            record.fail(f"'importance.{len(importance)}' should be one finite number >= 0 per channel")
        importance.append(values.astype(np.float64))
    return (
        targets.astype(np.int64),
        {k: v.astype(np.int64) for k, v in predictions.items()},
        tuple(importance),
    )


def _metric(record: _Record, predictors: tuple[str, ...]) -> dict[str, float | None]:
    # null is a value of the contract: with one stage there is nothing to forget yet.
    return {
        name: None if name in record.data and record.data[name] is None else record.get(name, float)
        for name in predictors
    }


def _reported(config: Mapping[str, Any], predictors: tuple[str, ...]) -> str:
    """The predictor the recipe is judged by; the first where it was not evaluated."""
    named = config.get("predictor")
    return named if named in predictors else predictors[0]


def _losses(events: list[dict[str, Any]], stages: int) -> tuple[LossPoint, ...]:
    """The epochs in order."""
    points: dict[tuple[int, str, int], LossPoint] = {}
    for event in events:
        if event.get("event") != "epoch_finished":
            continue
        stage, phase, epoch, terms = (event.get(key) for key in ("stage", "phase", "epoch", "terms"))
        if not (isinstance(stage, int) and stage < stages and isinstance(phase, str)):
            continue
        if not (isinstance(epoch, int) and isinstance(terms, dict)):
            continue
        numbers = {str(k): float(v) for k, v in terms.items() if isinstance(v, int | float) and math.isfinite(v)}
        # A resumed run repeats the epochs after its checkpoint: the last one counts, in the place of the first.
        points[stage, phase, epoch] = LossPoint(stage, phase, epoch, numbers)
    return tuple(points.values())


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngramError(f"{file} cannot be read ({error.strerror}); check its permissions.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        remedy = "resume the run, which writes it anew" if file.name == RESULT else "run it again"
        raise EngramError(f"{file} is not valid JSON ({error}); {remedy}, or leave it out.") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
