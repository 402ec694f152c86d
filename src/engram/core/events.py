"""Events: what a run says as it goes. They are plain data; whoever consumes them cannot change training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


def read_events(file: Path) -> Iterator[dict[str, Any]]:
    """What a run's file of events holds, as plain data and in order; nothing where there is no such file."""
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a killed run may leave its last line torn
            if isinstance(event, dict):
                yield event


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    @property
    def name(self) -> str:
        """The event's name in files: `StageFinished` is `stage_finished`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    def to_json(self) -> dict[str, Any]:
        """The event as plain data."""
        return {"event": self.name, **asdict(self)}


@dataclass(frozen=True)
class RunStarted(Event):
    """directory is None for a run that writes nothing. stages counts evaluations, the base included."""

    recipe: str
    method: str
    directory: str | None
    stages: int
    card: dict[str, str]
    resumed: bool


@dataclass(frozen=True)
class StageStarted(Event):
    """images: what the stage trains on, of which so many are exemplars."""

    stage: int
    stages: int
    new_classes: list[str]
    num_seen: int
    images: int
    exemplars: int


@dataclass(frozen=True)
class BaseReused(Event):
    """The base stage is not trained: another run with the same one has done so."""

    stage: int
    path: str


@dataclass(frozen=True)
class BaseAwaited(Event):
    """Another run is training the same base stage, and this one waits for it. holder: which run, where it is known."""

    stage: int
    stages: int
    holder: str


@dataclass(frozen=True)
class PhaseStarted(Event):
    """images and steps are those of one epoch."""

    stage: int
    phase: str
    epochs: int
    images: int
    steps: int


@dataclass(frozen=True)
class Progress(Event):
    """Where training stands, a few times a second. done is the share of the whole run's training work, 0 to 1."""

    stage: int
    stages: int
    phase: str
    epoch: int
    epochs: int
    step: int
    steps: int
    terms: dict[str, float]
    images_per_second: float
    done: float
    seconds_left: float | None


@dataclass(frozen=True)
class EpochFinished(Event):
    """epoch counts from 1. terms: the mean of each loss term over the epoch's steps."""

    stage: int
    phase: str
    epoch: int
    terms: dict[str, float]
    lr: float
    seconds: float


@dataclass(frozen=True)
class Working(Event):
    """A piece of work beside the steps of training has begun.

    what: "kernels" (compiled before the first step on a GPU), "importance" (whatever the method does once a stage is
    trained: AFC's importance, WA's aligned weights), "exemplars", "evaluate".
    """

    stage: int
    stages: int
    what: str


@dataclass(frozen=True)
class StageFinished(Event):
    """accuracy: percent over the classes seen, by predictor. average: the mean of it over the stages so far."""

    stage: int
    stages: int
    classes: int
    accuracy: dict[str, float]
    accuracy_by_stage: dict[str, list[float]]
    average: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Checkpointed(Event):
    """The run can be resumed from here, inside a phase; epoch counts from 1. Saving after a stage has no event."""

    stage: int
    phase: str
    epoch: int


@dataclass(frozen=True)
class Warned(Event):
    """Something the user should know that did not stop the run."""

    message: str


@dataclass(frozen=True)
class Stopped(Event):
    """The run was asked to stop and can be resumed."""

    stage: int
    stages: int
    reason: str
    directory: str | None


@dataclass(frozen=True)
class RunFinished(Event):
    """result is the content of result.json."""

    result: dict[str, Any]
    directory: str | None


@dataclass(frozen=True)
class EpochsChosen(Event):
    """A lesson that may take so many minutes gets so many epochs, which will take about so many seconds.

    fits: not where even one epoch takes longer than what is left after the measuring.
    """

    minutes: float
    epochs: int
    seconds: float
    seconds_per_epoch: float
    fits: bool


@dataclass(frozen=True)
class ImagesRead(Event):
    """The images of a lesson are read from their files."""

    images: int
    seconds: float


@dataclass(frozen=True)
class Learned(Event):
    """A model has learned a lesson; it is on disk where there is a path.

    new, refreshed: the classes learned, and which of them it knew before. Accuracies are percent of held-out images, by
    predictor, empty where none was held out: before, after over the classes known before and not refreshed,
    refreshed_before, refreshed_after over the refreshed, new_accuracy over all learned now. by_class: for each class
    its name and its accuracy before (None: it is new) and after. Before and after are of the same images.
    """

    new: list[str]
    refreshed: list[str]
    num_classes: int
    exemplars: int
    before: dict[str, float]
    after: dict[str, float]
    refreshed_before: dict[str, float]
    refreshed_after: dict[str, float]
    new_accuracy: dict[str, float]
    by_class: list[dict[str, Any]]
    seconds: float
    path: str | None


@dataclass(frozen=True)
class RunSkipped(Event):
    """One of several runs was complete before they began. result is the content of its result.json."""

    result: dict[str, Any]
    directory: str


@dataclass(frozen=True)
class RunFailed(Event):
    """One of several runs ended in an error; the others go on.

    unexpected: a mistake in the program rather than in what was asked of it; traceback is given for those alone.
    """

    message: str
    directory: str | None
    unexpected: bool
    traceback: str | None
