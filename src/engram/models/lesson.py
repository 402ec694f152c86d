"""Lesson: the images of new classes, prepared for a model, and the training on them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from engram.contract.settings import with_role
from engram.core.checkpoint import Checkpoint
from engram.core.errors import EngramError, option
from engram.core.events import Checkpointed, Event, Learned, StageStarted, Warned, Working
from engram.core.serialize import flatten, to_plain
from engram.data.stage import Samples, Stage, content_ids
from engram.data.store import pixel_statistics, some
from engram.experiment.feature_pass import PHASE, FeaturesTaken
from engram.experiment.stage_work import PhasePlan, StageWork, StepTaken, TimeEstimate
from engram.methods import find_method
from engram.models.accuracies import balanced_accuracy, plain_accuracy
from engram.models.heldout_features import forget_features
from engram.models.history import KnownClass, LessonRecord, current_time
from engram.models.hold_out import HoldOut
from engram.models.labels import in_order
from engram.models.lesson_checkpoint import feature_checkpoint, restore_lesson, step_checkpoint
from engram.models.model import Model
from engram.models.model_config import ModelConfig
from engram.models.split import ClassSplit, LessonSplit

CHECKED = 64  # images whose scores must be finite after a lesson


@dataclass(frozen=True)
class LessonOptions:
    """Options of a lesson.

    known: for images of known classes, "refuse" raises an error, "refresh" learns the class again from these images and
        its exemplars. A method that keeps statistics adds the images to them instead.
    epochs: of this lesson; None uses those of the configuration.
    """

    known: Literal["refuse", "refresh"] = "refuse"
    epochs: int | None = None


@dataclass(frozen=True)
class LessonStarted(StageStarted):
    """A lesson has started. config: the model's, with the epochs of this lesson. In files it is a stage's start."""

    config: ModelConfig

    @property
    def name(self) -> str:
        """The event's name in files."""
        return "stage_started"

    def to_json(self) -> dict[str, Any]:
        """Return the event as files have it."""
        return {name: value for name, value in super().to_json().items() if name != "config"}


@dataclass(eq=False)
class CheckpointPolicy:
    """When to stop, how to save a checkpoint, and how many seconds to wait between two checkpoints."""

    stop: Callable[[], bool] = lambda: False
    save: Callable[[Checkpoint], None] | None = None
    seconds: float = 120.0
    saved_at: float = field(default_factory=time.monotonic)

    def is_due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        return self.save is not None and time.monotonic() - self.saved_at >= self.seconds

    def write(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint."""
        assert self.save is not None
        self.save(checkpoint)
        self.saved_at = time.monotonic()


class Lesson:
    """A lesson with uint8 images (N, H, W, 3), learned by a copy of the model; the model itself does not change.

    names: of the images, for warnings. hold_out: how held-out images are chosen.
    """

    def __init__(
        self,
        model: Model,
        images: np.ndarray,
        labels: Sequence[Hashable],
        options: LessonOptions,
        names: Sequence[str] | None = None,
        hold_out: HoldOut | None = None,
    ) -> None:
        if len(images) != len(labels):
            raise EngramError(f"{len(images)} images need {len(images)} labels, got {len(labels)}")
        self._hold_out = HoldOut() if hold_out is None else hold_out
        self._hold_out.check(images)
        images = self._hold_out.with_given(images)
        self.before = model
        self.options = options
        self.model = model.copy()
        self.model.method = find_method(model.config.method).make(model.config.lesson_settings(options.epochs))
        rows_by_label = self._rows_to_learn(labels)
        self._given = sum(len(rows) for rows in rows_by_label.values())
        self.refreshed = [label for label in rows_by_label if label in set(model.labels)]
        self.new = in_order(rows_by_label)
        kept = {} if model.method.keeps_statistics else self._drop_refreshed()
        self._images = torch.from_numpy(images)
        # Index of each image's class among the classes of the lesson; -1 if it is left out.
        self._places = np.full(len(images), -1)
        for place, label in enumerate(self.new):
            self._places[rows_by_label[label]] = place
        self._prepare(rows_by_label, kept, names)

    def _rows_to_learn(self, labels: Sequence[Hashable]) -> dict[Hashable, np.ndarray]:
        """Return the rows of each class to learn."""
        rows: dict[Hashable, list[int]] = {}
        for row, label in enumerate(labels):
            rows.setdefault(label, []).append(row)
        known = set(self.before.labels)
        again = [label for label in rows if label in known]
        if again and self.options.known == "refuse":
            raise EngramError(
                f"the model knows the class {some(map(str, again))} already; leave its images out, "
                f"or learn it again from them and its exemplars with {option('more_of_known', True)}"
            )
        if not rows:
            raise EngramError("there is nothing to learn: no image was given")
        return {label: np.array(own) for label, own in rows.items()}

    def _drop_refreshed(self) -> dict[Hashable, tuple[Tensor, Tensor]]:
        """Drop the classes that are learned again; return their exemplars and held-out images."""
        kept: dict[Hashable, tuple[Tensor, Tensor]] = {}
        model, learner = self.model, self.model.learner
        if learner is None or not self.refreshed:
            return kept
        none = torch.empty(0, *model.config.image_size, 3, dtype=torch.uint8)
        for label in self.refreshed:
            place = model.position(label)
            held = [
                memory.of(place).pixels if place in memory.labels else none
                for memory in (learner.memory, model.heldout)
            ]
            kept[label] = (held[0], held[1])
        model.drop([model.position(label) for label in self.refreshed])
        return kept

    def _prepare(
        self,
        rows: dict[Hashable, np.ndarray],
        kept: dict[Hashable, tuple[Tensor, Tensor]],
        names: Sequence[str] | None,
    ) -> None:
        """Hold out images, create the first network if needed, and create the stage to train on."""
        model = self.model
        first = len(model.classes)
        index = len(model.sizes) if first else 0
        # A class that gets more images keeps its place if the method adds them to its statistics.
        place_of = {label: place for place, label in enumerate(model.labels)}
        added = [label for label in self.new if label not in place_of]
        place_of |= {label: place for place, label in enumerate(added, start=first)}
        model.config.memory.check(first + len(added))
        split = LessonSplit(self.before, self._images, rows, self._hold_out)
        self._warning = split.warning(names)
        parts = {label: split.of(label) for label in self.new}
        self.notes = [*split.notes(), *self._leave_out_unchanged(parts)]
        train, held = [], []
        none = self._images[:0]
        for label in self.new:
            place, part = place_of[label], parts[label]
            exemplars, before = kept.get(label, (none, none))
            if place in model.heldout.labels:
                before = model.heldout.of(place).pixels
            if not len(part.learned) and not len(exemplars):
                raise EngramError(
                    f"there is nothing new of the class {str(label)!r}: these images are learned or held out already"
                )
            train.append((place, torch.cat([self._images[part.learned], exemplars])))
            held.append((place, torch.cat([before, self._images[part.heldout]])))
        pool = _labelled(train)
        if model.learner is None:
            weights = model.config.weights
            mean, std = pixel_statistics(pool.pixels.numpy()) if weights is None else (weights.mean, weights.std)
            model.learner = model.make_learner(mean, std, len(added), start=True)
            model.check_network()
        elif not first:
            model.reset_head()
        model.learner.reserve(first + len(added), model.method.class_buffers)
        model.sizes = (*model.sizes, len(added))
        out = _labelled(held)
        model.heldout.update(out, {place: out.rows_of(place) for place, own in held if len(own)}, len(self.new))
        stage, learned = len(model.history), {known.label: known for known in model.classes}
        for label, (_, own) in zip(self.new, train, strict=True):
            images = len(own) + (learned[label].images if label in learned else 0)
            learned[label] = KnownClass(label, stage, images, digests=parts[label].digests)
        model.classes = tuple(learned[label] for label in place_of)
        exemplars = model.learner.memory.samples()
        everything = pool if exemplars is None else Samples.concatenate([pool, exemplars])
        self.stage = Stage(index, first, len(added), everything, model.sizes)

    def _leave_out_unchanged(self, parts: Mapping[Hashable, ClassSplit]) -> list[str]:
        """Leave out known classes of which every image is in the statistics already; return a sentence about them."""
        same = [label for label in self.refreshed if not len(parts[label].learned)]
        if not self.model.method.keeps_statistics or not same or len(same) == len(self.new):
            return []
        self.new, self.refreshed = ([label for label in own if label not in same] for own in (self.new, self.refreshed))
        return [f"left out classes without a new image: {some(map(str, same))}"]

    def fingerprint(self) -> str:
        """Return 32 hex digits that depend on the images, the labels and the options of training."""
        model = self.before
        how = {
            "config": to_plain(model.config, for_digest=True),
            "known": [repr(label) for label in model.labels],
            "history": len(model.history),
            "options": [self.options.known, self.options.epochs],
            "new": [repr(label) for label in self.new],
            "place": [str(model.engine.device), model.engine.precision],
            "shape": list(self._images.shape),
        }
        if hold_out := self._hold_out.digest():
            how["hold_out"] = hold_out
        digest = hashlib.blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=16)
        digest.update(self._places.data)
        digest.update(np.ascontiguousarray(self._images.numpy()).data)
        return digest.hexdigest()

    def request(self) -> dict[str, Any]:
        """Return what was asked for, by name, to describe how another lesson differs."""
        model, main = self.before, with_role(self.model.method.settings, "main")
        return {
            "epochs": next((training.epochs for training in main.values()), None),
            "known": self.options.known,
            "images": len(self._images),
            "classes": some(map(str, self.new)),
            "device": str(model.engine.device),
            "precision": model.engine.precision,
            **flatten(model.config.to_plain()),
        }

    def take(self, policy: CheckpointPolicy, resume: Checkpoint | None = None) -> Generator[Event, None, Model | None]:
        """Train from the start or from a checkpoint; return the trained model, or None if it was stopped."""
        model, stage = self.model, self.stage
        learner = model.learner
        assert learner is not None
        clock: dict[str, float] = {}
        work = StageWork(model.method, learner, model.engine, stage, stage.index + 1, clock=clock)
        names = [str(label) for label in self.new]
        kept = int(stage.pool.exemplar.sum())
        config = replace(model.config, settings=model.method.settings)
        yield LessonStarted(stage.index, stage.index + 1, names, stage.num_seen, len(stage.pool), kept, config)
        if self._warning is not None:
            yield Warned(self._warning)
        at = None if resume is None else restore_lesson(resume, model.method, learner, stage, clock)
        outlook: TimeEstimate | None = None
        for event in work.train(at):
            if isinstance(event, FeaturesTaken):
                yield event.progress(stage.index + 1)
                stopping = policy.stop()
                if policy.save is not None and (stopping or policy.is_due()):
                    policy.write(feature_checkpoint(learner, len(work.phases), clock))
                    yield Checkpointed(stage.index, PHASE, 0)
                if stopping:
                    return None
                continue
            if not isinstance(event, StepTaken):
                yield event
                continue
            if outlook is None:
                outlook = TimeEstimate([[PhasePlan.of(phase) for phase in work.phases]], first=stage.index)
            outlook.step(event)
            if event.timer.due():
                yield outlook.progress(stage.index, stage.index + 1, event)
            stopping = policy.stop()
            if policy.save is not None and (stopping or policy.is_due()):
                yield from event.ended()
                policy.write(step_checkpoint(learner, event, clock))
                yield Checkpointed(stage.index, event.loop.phase.name, event.loop.epoch + 1)
            if stopping:
                return None
        yield from work.finish()
        for note in learner.notes:
            yield Warned(note)
        learner.notes.clear()
        yield Working(stage.index, stage.index + 1, "evaluate")
        started = time.perf_counter()
        if work.phases:
            forget_features(model.heldout)
        model.refuse_not_finite(stage.pool.pixels[: CHECKED if work.phases else 0])
        self._record(work.phases[0].training.epochs if work.phases else 0, started - sum(clock.values()))
        return model

    def _record(self, epochs: int, started: float) -> None:
        """Measure the accuracy on held-out images and add the lesson to the history.

        epochs: of the main phase. started: when the lesson would have started if it had not been interrupted.
        """
        model = self.model
        model.method = self.before.method
        model.learned_heldout = b""  # the lesson has set the head to the images learned
        model.measure(calibrate=True)
        self._past, now = self._accuracy_before(), {known.label: known.accuracy for known in model.classes}
        lesson = set(self.new)
        old = [known.label for known in model.classes if known.label not in lesson]
        groups: dict[str, tuple[Mapping[Hashable, dict[str, float]], Sequence[Hashable]]] = {
            "before": (self._past, old),
            "after": (now, old),
            "new": (now, self.new),
            "refreshed_before": (self._past, self.refreshed),
            "refreshed_after": (now, self.refreshed),
        }
        held = {known.label: len(model.heldout.of(place)) for place, known in _with_heldout(model)}
        plain = {name: plain_accuracy(group[0], held, group[1]) for name, group in groups.items()}
        counts = {name: sum(held.get(label, 0) for label in group[1]) for name, group in groups.items()}
        entry = LessonRecord(
            what="learned",
            date=current_time(),
            images=self._given,
            epochs=epochs,
            seconds=time.perf_counter() - started,
            device=str(model.engine.device),
            precision=model.engine.precision,
            classes=len(self.new),
            plain={name: shares for name, shares in plain.items() if shares},
            heldout={name: counts[name] for name in ("after", "new", "refreshed_after") if counts[name]},
            **{name: balanced_accuracy(*group) for name, group in groups.items()},
        )
        model.history = (*model.history, entry)

    def _accuracy_before(self) -> dict[Hashable, dict[str, float]]:
        """Return the accuracy before the lesson on the classes known then, on the images that are held out now."""
        past = {known.label: known.accuracy for known in self.before.classes}
        past |= {label: {} for label in self.refreshed}  # these may have more held-out images now
        heldout, place_of = self.model.heldout, {label: place for place, label in enumerate(self.model.labels)}
        parts = [
            (self.before.position(label), heldout.of(place_of[label]).pixels)
            for label in self.refreshed
            if place_of[label] in heldout.labels
        ]
        for by, shares in (self.before.measurable().accuracy_on(_labelled(parts)) if parts else {}).items():
            for place, share in shares.items():
                past[self.before.labels[place]][by] = share
        return past

    def learned(self, path: str | None) -> Learned:
        """Return the event that reports the finished lesson."""
        model, entry = self.model, self.model.history[-1]
        assert model.learner is not None
        by_class: list[dict[str, Any]] = [
            {"class": str(known.label), "before": self._past.get(known.label), "after": known.accuracy}
            for known in model.classes
        ]
        names, again = [str(label) for label in self.new], [str(label) for label in self.refreshed]
        return Learned(
            new=names,
            refreshed=again,
            num_classes=len(model.classes),
            exemplars=len(model.learner.memory),
            before=entry.before,
            after=entry.after,
            refreshed_before=entry.refreshed_before,
            refreshed_after=entry.refreshed_after,
            new_accuracy=entry.new,
            by_class=by_class,
            seconds=entry.seconds,
            path=path,
            plain=entry.plain,
            heldout=entry.heldout,
            held_out=len(model.heldout),
        )


def _labelled(parts: list[tuple[int, Tensor]]) -> Samples:
    """Return the images of several labels as samples that are not exemplars."""
    labels = torch.cat([torch.full((len(images),), place) for place, images in parts])
    images = torch.cat([images for _, images in parts])
    return Samples(images, labels, content_ids(images), torch.zeros(len(labels), dtype=torch.bool))


def _with_heldout(model: Model) -> list[tuple[int, KnownClass]]:
    """Return the classes that have held-out images, with their positions."""
    return [(place, known) for place, known in enumerate(model.classes) if place in model.heldout.labels]
