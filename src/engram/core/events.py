"""Events that a run emits while it trains. They are plain data; a consumer cannot change the training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engram.core.io import parse_json
from engram.core.safe_folder import MissingFile, read_inside

MAX_BYTES = 2**28  # of an events file; a long run has a few megabytes


def read_events(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run's events file as dictionaries, in order; none if the file does not exist."""
    try:
        content = read_inside(file.parent, file.name, MAX_BYTES)
    except MissingFile:
        return
    for line in content.splitlines():
        try:
            event = parse_json(line)
        except ValueError:
            continue  # a killed run may leave an incomplete last line
        if isinstance(event, dict):
            yield event


@dataclass(frozen=True)
class Event:
    """Base class of all events."""

    @property
    def name(self) -> str:
        """Name in files: `stage_finished` for `StageFinished`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    def to_json(self) -> dict[str, Any]:
        """Return the event as a dictionary for JSON."""
        return {"event": self.name, **asdict(self)}


@dataclass(frozen=True)
class RunStarted(Event):
    """A run has started. directory: None if the run writes no files. stages: their number, including the base."""

    recipe: str
    method: str
    directory: str | None
    stages: int
    card: dict[str, str]
    resumed: bool


@dataclass(frozen=True)
class StageStarted(Event):
    """A stage has started. images: number of training images, including the exemplars."""

    stage: int
    stages: int
    new_classes: list[str]
    num_seen: int
    images: int
    exemplars: int


@dataclass(frozen=True)
class ImagesPlaced(Event):
    """The many images of a stage are all on the device, or are streamed there. message: which, and why."""

    stage: int
    stages: int
    placement: str
    message: str


@dataclass(frozen=True)
class BaseReused(Event):
    """The base stage was loaded from the cache: another run with the same base stage has trained it."""

    stage: int
    path: str


@dataclass(frozen=True)
class BaseAwaited(Event):
    """This run waits for another run that trains the same base stage. holder: that run, if known."""

    stage: int
    stages: int
    holder: str


@dataclass(frozen=True)
class PhaseStarted(Event):
    """A phase has started. images, steps: in one epoch."""

    stage: int
    phase: str
    epochs: int
    images: int
    steps: int


@dataclass(frozen=True)
class Progress(Event):
    """Progress of training, a few times a second. done: completed share of all training in the run, 0 to 1.

    In a pass that computes features, `epochs` is 0 and steps are images.
    """

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
    """An epoch has finished. epoch: counted from 1. terms: mean of each loss term over the steps of the epoch."""

    stage: int
    phase: str
    epoch: int
    terms: dict[str, float]
    lr: float
    seconds: float


@dataclass(frozen=True)
class Working(Event):
    """Work other than training steps has started.

    what: "kernels" (compilation before the first step on a GPU), "importance" (what the method computes after a stage:
    AFC's importance, WA's aligned weights), "exemplars" (their selection), "evaluate".
    """

    stage: int
    stages: int
    what: str


@dataclass(frozen=True)
class StageFinished(Event):
    """A stage has finished.

    accuracy: percent over all classes seen, by predictor. average: its mean over stages. task_accuracy: the same as
    accuracy, with the stage of each image known.
    """

    stage: int
    stages: int
    classes: int
    accuracy: dict[str, float]
    accuracy_by_stage: dict[str, list[float]]
    average: dict[str, float]
    seconds: float
    task_accuracy: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpointed(Event):
    """A checkpoint was saved inside a phase (the one after a stage has no event). epoch: counted from 1."""

    stage: int
    phase: str
    epoch: int


@dataclass(frozen=True)
class Warned(Event):
    """A warning for the user; the run continues."""

    message: str


@dataclass(frozen=True)
class Stopped(Event):
    """The run was stopped on request and can be resumed."""

    stage: int
    stages: int
    reason: str
    directory: str | None


@dataclass(frozen=True)
class RunFinished(Event):
    """The run has finished. result: content of result.json."""

    result: dict[str, Any]
    directory: str | None


@dataclass(frozen=True)
class EpochsChosen(Event):
    """The number of epochs was chosen for a lesson with a time limit.

    minutes: the limit. seconds: estimated training time. fits: false if even one epoch takes longer than the time left
    after measuring.
    """

    minutes: float
    epochs: int
    seconds: float
    seconds_per_epoch: float
    fits: bool


@dataclass(frozen=True)
class ImagesRead(Event):
    """The images of a lesson were read from their files."""

    images: int
    seconds: float


@dataclass(frozen=True)
class Learned(Event):
    """A model has learned a lesson.

    new: all classes of the lesson. refreshed: those among them that the model knew before. path: where the model was
    saved, or None. Accuracies are in percent of held-out images, by predictor; empty if no image was held out. "Before"
    and "after" use the same images. before, after: known classes that were not refreshed. refreshed_before,
    refreshed_after: refreshed classes. new_accuracy: all classes of the lesson. by_class: for each class its name and
    its accuracy before (None if new) and after. These accuracies are balanced, means over classes; plain: the same of
    all images, by the names of these fields ("new" for new_accuracy). heldout: number of held-out images that "after",
    "new" and "refreshed_after" were measured on. exemplars, held_out: number of images in the model now.
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
    plain: dict[str, dict[str, float]] = field(default_factory=dict)
    heldout: dict[str, int] = field(default_factory=dict)
    held_out: int = 0


@dataclass(frozen=True)
class RunSkipped(Event):
    """One of several runs was already complete. result: content of its result.json."""

    result: dict[str, Any]
    directory: str


@dataclass(frozen=True)
class RunBusy(Event):
    """One of several runs was left to another process, which is doing it now."""

    directory: str


@dataclass(frozen=True)
class RunFailed(Event):
    """One of several runs ended with an error; the others continue.

    unexpected: the error is probably a bug and not a wrong setting. traceback: for unexpected errors only.
    """

    message: str
    directory: str | None
    unexpected: bool
    traceback: str | None
