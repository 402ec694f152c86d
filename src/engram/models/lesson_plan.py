"""Plan a lesson: which images it learns, what to warn about, and how many epochs fit into the time."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from engram.contract.method import stage_phases
from engram.core.errors import EngramError, option, spelled
from engram.core.events import EpochsChosen, Event, ImagesRead, Warned
from engram.data.store import some
from engram.experiment.stage_work import AFTER, PhasePlan, StageWork, StepTaken
from engram.methods import find_method
from engram.models.accuracies import is_harmed
from engram.models.history import LessonRecord
from engram.models.inputs import LessonImages
from engram.models.labels import similar_label_warnings
from engram.models.lesson import Lesson
from engram.models.model import Model
from engram.models.model_config import VALIDATION_LEAST, ModelConfig
from engram.models.split import knows_all

COMPARED = 4096  # images at a time to compare with those the model was given before
NAMED = 5  # classes in a warning
MOST_EPOCHS = 300
WARM_UP, STEPS = 2, 40  # untimed steps, and the largest number of timed steps
SHARE, LONGEST = 0.1, 10.0  # limits of the measurement: fraction of the budget, and seconds

Known = Literal["refuse", "ignore", "refresh"]


@dataclass(frozen=True)
class LessonNotice(Warned):
    """A warning before the training begins. In files it is an ordinary warning."""

    @property
    def name(self) -> str:
        """The event's name in files."""
        return "warned"


@dataclass(frozen=True)
class LearningResumed(LessonNotice):
    """Learning continues from a checkpoint."""

    message: str = "learning continues from its checkpoint"


@dataclass(frozen=True)
class LessonRead(ImagesRead):
    """The images of a lesson were read. labels: of these images. config: of a new model; None for any other."""

    labels: Sequence[Hashable]
    config: ModelConfig | None

    def to_json(self) -> dict[str, Any]:
        """Return the event as files have it."""
        return {"event": "images_read", "images": self.images, "seconds": self.seconds}


@dataclass(frozen=True)
class LearnedBefore(Event):
    """The model was given all of these images before, with these labels; nothing was done.

    last_lesson: date and time of its last lesson.
    """

    classes: list[str]
    last_lesson: str


def plan_lesson(
    model: Model, labels: Sequence[Hashable], images: LessonImages, known: Known
) -> tuple[list[int], list[Hashable]] | LearnedBefore:
    """Return the images to learn and the known classes that are left out, or that there is nothing new.

    Raises an error for images of known classes that it may not leave out, and if no image is left.
    """
    old = set(model.labels)
    again = [label for label in dict.fromkeys(labels) if label in old]
    if known == "refresh" or not again:
        return list(range(len(labels))), []
    rows = [row for row, label in enumerate(labels) if label not in old]
    if not rows and (before := _learned_before(model, labels, images)):
        lessons = [entry.date for entry in model.history if entry.what == "learned"]
        return LearnedBefore(list(map(str, before)), lessons[-1][:16].replace("T", " "))
    names, how = some(map(str, again)), "learns known classes again, from these images and their exemplars"
    if known == "refuse":
        raise EngramError(
            f"the model knows the class {names} already; {option('known', 'ignore')} leaves its images out, "
            f"{option('known', 'refresh')} {how}"
        )
    if not rows:
        raise EngramError(
            f"there is nothing to learn: the model knows {names} already; {option('known', 'refresh')} {how}"
        )
    return rows, again


def _learned_before(model: Model, labels: Sequence[Hashable], images: LessonImages) -> list[Hashable]:
    """Return the classes of the images if the model was given all of them before, else nothing."""
    found: dict[Hashable, None] = {}
    for start in range(0, len(labels), COMPARED):
        pixels, rows = images.read(range(start, min(start + COMPARED, len(labels))), model.config.image_size)
        own = [labels[row] for row in rows]
        if not knows_all(model, pixels, own):
            return []
        found.update(dict.fromkeys(own))
    return list(found)


def label_notices(labels: Sequence[Hashable], known: Sequence[Hashable]) -> Iterator[LessonNotice]:
    """Yield warnings about possible mistakes in the labels of the images to learn."""
    counts = Counter(labels)
    yield from map(LessonNotice, similar_label_warnings(counts, known))
    new = [label for label in counts if label not in known]
    texts = [label for label in new if isinstance(label, str)]
    if known and texts and not any(isinstance(label, str) for label in known):
        yield LessonNotice(f"the model's labels are not text, but these are: {some(texts)}")
    if not known and len(counts) == 1:
        yield LessonNotice("with a single class there is nothing to tell apart; learn a second one too")
    few = [f"{str(label)!r} ({counts[label]})" for label in new if counts[label] < VALIDATION_LEAST]
    if few:
        more = f" and {len(few) - NAMED} more" if len(few) > NAMED else ""
        yield LessonNotice(
            f"classes with fewer than {VALIDATION_LEAST} images are learned badly, and none of them is held out to "
            f"measure accuracy: {', '.join(few[:NAMED])}{more}"
        )


def forgetting_warnings(entry: LessonRecord, undoable: bool) -> Iterator[Warned]:
    """Yield a warning for each group of known classes that a lesson harmed, by balanced or plain accuracy."""
    groups = (
        ("the old classes", "before", "after"),
        ("those learned again", "refreshed_before", "refreshed_after"),
    )
    for which, before, after in groups:
        kinds = (
            ("", getattr(entry, before), getattr(entry, after)),
            ("plain ", entry.plain.get(before, {}), entry.plain.get(after, {})),
        )
        images = entry.heldout.get(after, 0)
        lost = [
            f"{kind}{by} from {then[by]:.1f} to {now[by]:.1f} %"
            for kind, then, now in kinds
            for by in now
            if by in then and is_harmed(then[by], now[by], images)
        ]
        if lost:
            on = f" on {images} held-out images" if images else ""
            back = "take it back (undo) and learn again" if undoable else "learn again"
            yield Warned(
                spelled(
                    f"the lesson lowered the held-out accuracy of {which} ({', '.join(lost)}{on}); {back} with more "
                    f"{option('epochs')}, or start a model with more {option('memory')}"
                )
            )


def epochs_that_fit(lesson: Lesson, minutes: float, stop: Callable[[], bool] | None = None) -> EpochsChosen:
    """Return the largest number of epochs (at least 1) that fits. The lesson cannot be used afterwards."""
    budget, started = 60 * minutes, time.monotonic()
    rate = _seconds_per_work(lesson, min(LONGEST, SHARE * budget), stop or (lambda: False))
    left = budget - (time.monotonic() - started)
    epoch = rate * _work(lesson, MOST_EPOCHS) / MOST_EPOCHS

    def seconds(epochs: int) -> float:
        return rate * _work(lesson, epochs) + AFTER * epoch

    epochs = max(1, bisect_right(range(1, MOST_EPOCHS + 1), left, key=seconds))
    return EpochsChosen(minutes, epochs, seconds(epochs), epoch, fits=seconds(epochs) <= left)


def _seconds_per_work(lesson: Lesson, longest: float, stop: Callable[[], bool]) -> float:
    """Measure the seconds per unit of work in the first phase."""
    model, learner = lesson.model, lesson.model.learner
    assert learner is not None
    work = StageWork(model.method, learner, model.engine, lesson.stage, lesson.stage.index + 1)
    begun = time.monotonic()
    first, taken = begun, 0
    for event in work.train():
        if not isinstance(event, StepTaken):
            continue
        taken += 1
        if taken == WARM_UP:
            _wait(model.engine.device)
            first = time.monotonic()
        if taken >= WARM_UP + STEPS or stop() or (taken > WARM_UP and time.monotonic() - begun > longest):
            break
    _wait(model.engine.device)
    if not taken:
        raise EngramError(f"{model.config.method} has no steps that could be timed; leave {option('minutes')} out")
    if taken <= WARM_UP:  # the phase has no more steps
        first, steps = begun, taken
    else:
        steps = taken - WARM_UP
    plan = PhasePlan.of(work.phases[0])
    return (time.monotonic() - first) / steps * plan.epochs * plan.steps / plan.work


def _work(lesson: Lesson, epochs: int) -> float:
    """Return the work of all phases of the lesson with that many epochs."""
    model, learner = lesson.model, lesson.model.learner
    assert learner is not None
    method = find_method(model.config.method).make(model.config.lesson_settings(epochs))
    phases = stage_phases(method, learner, lesson.stage, model.engine)
    return sum(PhasePlan.of(phase).work for phase in phases)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
