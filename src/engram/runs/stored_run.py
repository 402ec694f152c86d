"""The content of a run directory as frozen dataclasses; `engram.runs.reader` reads and checks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engram.core import metrics
from engram.core.provenance import own_code
from engram.runs.checked import Count, Percent, Seconds, Size
from engram.runs.comparison import compare_results
from engram.runs.curve_svg import curve_svg
from engram.runs.result_table import ResultTable


@dataclass(frozen=True)
class ClassOrder:
    """The class order: its name, and the class ids in the order of their labels."""

    name: str
    class_ids: tuple[Count, ...]


@dataclass(frozen=True)
class DataSummary:
    """The data set of a run, as run.json describes it. photographs: digest of the files that it crops from, if any."""

    name: str
    fingerprint: str
    class_names: tuple[str, ...]
    image_size: tuple[Size, ...]
    photographs: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RunIdentity:
    """Which run it is and what it was computed with: part of run.json and of a line of results.

    content: the whole JSON object.
    """

    recipe: str
    created: str
    config: Mapping[str, Any]
    config_hash: str
    order: ClassOrder
    stage_sizes: tuple[Size, ...]
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    content: dict[str, Any] = field(repr=False)

    @property
    def method_code(self) -> str:
        """Digest of the code of the user's method, backbone etc. ("a, b" if it was edited during the run), or empty."""
        return own_code(self.versions)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunManifest(RunIdentity):
    """The content of run.json."""

    data: DataSummary
    predictors: tuple[str, ...]
    card: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None


@dataclass(frozen=True)
class StageRow:
    """One stage in result.json. accuracy and accuracy_by_stage (R[t][0..t]) are in percent, by predictor.

    task_accuracy: with the stage of each image known; empty for runs of earlier versions.
    """

    stage: Count
    classes: Count
    accuracy: Mapping[str, Percent]
    accuracy_by_stage: Mapping[str, tuple[Percent, ...]]
    seconds: Seconds
    task_accuracy: Mapping[str, Percent] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult(Mapping[str, Any]):
    """The result of a run; the metrics are in percent, by predictor: `result.average["cnn"]`.

    It is also a mapping with the content of result.json: `result["stages"][0]["accuracy"]`. docs/run-directory.md
    defines each number. A notebook shows it as a table and a curve.

    average_task_accuracy, final_task_accuracy: empty for runs of earlier versions. content: a dictionary for JSON.

    >>> from engram import recipe, train
    >>> result = train(recipe("replay-mini-b10-s5").with_settings(train__epochs=2))
    >>> print(result.final["cnn"], result.curve["cnn"])
    """

    recipe: str
    method: str
    seed: int
    stages: tuple[StageRow, ...] = field(repr=False)
    average_incremental_accuracy: Mapping[str, float]
    final_accuracy: Mapping[str, float]
    forgetting: Mapping[str, float | None]
    backward_transfer: Mapping[str, float | None]
    average_task_accuracy: Mapping[str, float] = field(default_factory=dict, repr=False)
    final_task_accuracy: Mapping[str, float] = field(default_factory=dict, repr=False)
    seconds: Seconds
    seconds_by: Mapping[str, Seconds] = field(repr=False)
    content: dict[str, Any] = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)

    @property
    def average(self) -> Mapping[str, float]:
        """Average incremental accuracy."""
        return self.average_incremental_accuracy

    @property
    def final(self) -> Mapping[str, float]:
        """Accuracy after the last stage."""
        return self.final_accuracy

    @property
    def classes(self) -> tuple[int, ...]:
        """Classes seen after each stage."""
        return tuple(row.classes for row in self.stages)

    @property
    def curve(self) -> dict[str, list[float]]:
        """Accuracy after each stage."""
        return {name: [row.accuracy[name] for row in self.stages] for name in self.predictors}

    def table(self) -> ResultTable:
        """Return a row for each stage: classes seen, accuracy by predictor, seconds."""
        rows = ((row.stage, row.classes, *row.accuracy.values(), row.seconds) for row in self.stages)
        return ResultTable(("stage", "classes", *self.predictors, "seconds"), tuple(rows))

    def to_frame(self) -> Any:
        """Return `table()` as a pandas frame."""
        return self.table().to_frame()

    def to_latex(self) -> str:
        """Return average, final accuracy and forgetting as a LaTeX table with one row; `compare` makes larger ones."""
        return compare_results([self]).to_latex()

    def _repr_html_(self) -> str:
        name = f"<strong>{escape(self.recipe)}</strong>"
        drawn = curve_svg(self.classes, self.curve) if self.stages else ""
        order = escape(str(self.get("order", "-"))[:40])
        return f"<div>{name}, order {order}, seed {self.seed}{self._metrics_html()}{drawn}</div>"

    def _metrics_html(self) -> str:
        measures = ("average", "final", "forgetting")
        rows = ((by, *(getattr(self, measure).get(by) for measure in measures)) for by in self.predictors)
        return ResultTable(("%", *measures), tuple(rows))._repr_html_()

    @property
    def metrics(self) -> dict[str, Mapping[str, float | None]]:
        """Each metric by name, then by predictor."""
        return {name: getattr(self, name) for name in (*metrics.METRICS, *metrics.TASK_METRICS)}

    @property
    def predictors(self) -> tuple[str, ...]:
        """The predictors that the stages were evaluated with."""
        return tuple(self.stages[0].accuracy) if self.stages else ()


@dataclass(frozen=True, eq=False)
class StageArrays:
    """Labels and predictions of the test images after a stage, and the importance of each feature map's channels."""

    targets: np.ndarray
    predictions: Mapping[str, np.ndarray]
    importance: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class LossPoint:
    """The mean loss terms of one epoch."""

    stage: int
    phase: str
    epoch: int
    terms: Mapping[str, float]


@dataclass(frozen=True)
class RunLog:
    """The content of events.jsonl. wall: start and end, if the run was never interrupted.

    reused_base: the base stage was trained by another run, whose time is not counted in this run.
    """

    losses: tuple[LossPoint, ...]
    reused_base: bool
    wall: tuple[float, float] | None


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run directory with at least one finished stage. arrays: of the last finished stage."""

    directory: Path
    manifest: RunManifest
    result: RunResult
    arrays: StageArrays
    log: RunLog

    @property
    def stages(self) -> tuple[StageRow, ...]:
        """The finished stages."""
        return self.result.stages

    @property
    def recipe(self) -> str:
        """Name of the recipe, with its changes."""
        return self.manifest.recipe

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.result.method

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return str(self.result.seed)

    @property
    def class_order(self) -> tuple[int, ...]:
        """Class ids in the order of their labels."""
        return self.manifest.order.class_ids

    @property
    def arrivals(self) -> tuple[str, ...]:
        """Class names in the order of their labels."""
        return tuple(self.manifest.data.class_names[i] for i in self.class_order)

    @property
    def losses(self) -> tuple[LossPoint, ...]:
        """The epochs of the finished stages."""
        return tuple(point for point in self.log.losses if 0 <= point.stage < len(self.stages))

    @property
    def main_losses(self) -> list[LossPoint]:
        """The epochs of the main phase of each stage."""
        return [point for point in self.losses if point.phase == "main"]

    @property
    def stopped(self) -> str:
        """ "stopped after stage 2 of 5" if the run is incomplete, otherwise an empty string."""
        finished, total = len(self.stages), len(self.manifest.stage_sizes)
        return "" if finished == total else f"stopped after stage {finished - 1} of {total - 1}"


@dataclass(frozen=True)
class StagePosition:
    """The next training step inside a stage: number of the phase, epoch, step."""

    number: Count
    epoch: Count
    step: Count


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    finished: number of finished stages. result: content of result.json of a complete run. threads: CPU threads that the
    run started with. position: where the checkpoint is inside the next stage. code: see `RunIdentity.method_code`.
    """

    state: Literal["new", "incomplete", "done"]
    finished: int = 0
    result: dict[str, Any] | None = None
    threads: int | None = None
    position: StagePosition | None = None
    code: str = ""
