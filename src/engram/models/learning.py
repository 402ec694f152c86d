"""Teach a model on disk new classes. Readers see the old model until the lesson is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from engram.contract.settings import MAIN_ROLES, with_role
from engram.core.checkpoint import Checkpoint
from engram.core.errors import EngramError, UnknownNameError, option, spelled
from engram.core.events import Event, Stopped
from engram.core.serialize import flatten
from engram.data.arrays import is_dataset, read_dataset, refuse_without_labels
from engram.data.store import some
from engram.experiment.learner_config import Device, Precision, take_weights
from engram.models.from_run import model_from_run
from engram.models.hold_out import HoldOut
from engram.models.inputs import LessonImages
from engram.models.labels import encode_label, in_order, plain_labels
from engram.models.lesson import CheckpointPolicy, Lesson, LessonOptions
from engram.models.lesson_plan import (
    Known,
    LearnedBefore,
    LearningResumed,
    LessonNotice,
    LessonRead,
    epochs_that_fit,
    forgetting_warnings,
    label_notices,
    plan_lesson,
)
from engram.models.model import Model
from engram.models.model_config import ModelConfig, plain_number
from engram.models.starting_point import starting_point
from engram.models.store.codec import open_model, pack_model
from engram.models.store.generations import (
    FIRST,
    LEARNING,
    LEFT_OUT,
    MOST_UNDO_STEPS,
    UNDO_STEPS,
    Pointer,
)
from engram.models.store.writer import STATE, Writer

SHOWN = 3  # differences between an interrupted lesson and the one given now


def learn_into(
    path: str | Path,
    images: Any,
    labels: Any = None,
    *,
    config: ModelConfig | Mapping[str, Any] | None = None,
    start: str | Path | None = None,
    known: Known = "refuse",
    epochs: int | Literal["auto"] | None = None,
    minutes: float | None = None,
    restart: bool = False,
    undoable: bool = True,
    undo_steps: int = UNDO_STEPS,
    groups: Sequence[Hashable | None] | None = None,
    near_duplicates: bool = True,
    validate: tuple[Any, Any] | None = None,
    stop: Callable[[], bool] | None = None,
    checkpoint_minutes: float = 2.0,
    device: Device = "auto",
    precision: Precision = "auto",
) -> Iterator[Event]:
    """Teach the model at that path the classes of these images, or create it; yield events.

    The model on disk does not change before the last event, Learned. If the model was given all images before, with
    the same labels, the only event is LearnedBefore. A lesson that was interrupted continues from its checkpoint if the
    same images are given again; other images are refused.

    images: as X of the estimator, or ImageFiles. A data set of torch or Hugging Face has the labels too.
    config: of a new model, complete or as arguments of `ModelConfig.choose`; what is missing is chosen for the images.
        For files without a method, a network or an option of training, a pretrained network if its weights are here.
        For an existing model, other values than its own are refused.
    start: directory of a finished run, whose network, classes, exemplars and settings a new model has. Of config, only
        the validation may be given then.
    known: for images of known classes, "refuse" raises an error, "ignore" leaves them out with a warning, "refresh"
        learns these classes again, from these images and their exemplars.
    epochs: None uses those of the configuration; "auto" chooses by the number of images, unless the settings of the
        configuration name them.
    minutes: instead of epochs; trains as many epochs as fit, estimated from the first steps.
    restart: drop an interrupted lesson.
    undoable: keep the model as it was before, for `undo`. undo_steps: how many earlier states to keep.
    groups: a key for each image; images of a class with equal keys are all held out or all learned. None is alone.
    near_duplicates: hold out near-duplicates together, too.
    validate: images and their labels, to be held out instead of a share of the images.
    stop: called after every step; if it returns True, a checkpoint is saved and the last event is Stopped.
    """
    if minutes is not None and (epochs is not None or not minutes > 0):
        raise EngramError(f"{option('minutes')} must be above 0 and replaces {option('epochs')}; give one of them")
    if known not in ("refuse", "ignore", "refresh"):
        raise EngramError(f"known must be refuse, ignore or refresh, got {known!r}", parameter="known", value=known)
    if not 1 <= undo_steps <= MOST_UNDO_STEPS:
        raise EngramError(f"{option('undo_steps')} must be 1 to {MOST_UNDO_STEPS}, got {undo_steps}")
    if labels is None:
        if not is_dataset(images):
            refuse_without_labels(images, "images")
            raise EngramError("there are no labels; give one for each image, or a data set of images and labels")
        images, labels = read_dataset(images, "images")
    epochs, given = plain_number(epochs), plain_labels(labels)
    if groups is not None and len(groups) != len(given):
        raise EngramError(f"{len(given)} images need {len(given)} groups, got {len(groups)}")
    for label in dict.fromkeys(given):
        encode_label(label)  # refuses a label that cannot be saved, before learning it
    source = LessonImages(images)
    with Writer(path, create=True) as writer:
        base = writer.current()
        training = {"epochs": epochs if epochs != "auto" else None, "minutes": minutes}
        training = {name: value for name, value in training.items() if value is not None}
        if start is None:
            model, begun = _model_to_teach(writer, source, len(given), config, training, device, precision)
        else:
            model, begun = _model_of_run(writer, start, config, device, precision)
        _refuse_training(model, training)
        source.check_count(len(given), model.config.image_size)
        planned = plan_lesson(model, given, source, known)
        if isinstance(planned, LearnedBefore):
            with suppress(EngramError):
                _unfinished(writer, base)
            yield planned
            return
        rows, left_out = planned
        if left_out:
            how = option("known", "refresh")
            yield LessonNotice(spelled(f"left out what the model knows already: {some(map(str, left_out))} ({how})"))
        started = time.perf_counter()
        pixels, read = source.read(rows, model.config.image_size)
        seconds = time.perf_counter() - started
        lost = sorted({given[row] for row in rows} - {given[row] for row in read}, key=str)
        if not read:
            raise EngramError(f"no image could be read of {some(map(str, lost))}; repair the images or give others")
        if lost:
            yield LessonNotice(f"left out classes of which no image could be read: {some(map(str, lost))}")
        given = [given[row] for row in read]
        keys = None if groups is None else [groups[row] for row in read]
        hold_out = HoldOut(keys, near_duplicates)
        if validate is not None:
            hold_out, notices = _images_to_hold_out(hold_out, *validate, set(given), model.config.image_size)
            yield from notices
        if restart:
            writer.drop_learning()
        is_new = base is None and not has_learning(path)
        if begun and is_new:
            yield LessonNotice(begun)
        yield LessonRead(len(pixels), seconds, given, model.config if is_new else None)
        yield from label_notices(given, model.labels)
        again = "refresh" if known == "refresh" else "refuse"
        if minutes is not None:
            epochs = _epochs_of_checkpoint(writer, base)
            if epochs is None:
                fit = epochs_that_fit(
                    Lesson(model, pixels, given, LessonOptions(again), hold_out=hold_out), minutes, stop
                )
                yield fit
                epochs = fit.epochs
        elif epochs == "auto":
            kept = 0 if model.learner is None else len(model.learner.memory)
            epochs = None if not model.classes else model.config.lesson_epochs(len(pixels) + kept, device)
        lesson = Lesson(model, pixels, given, LessonOptions(again, epochs), source.names(read), hold_out)
        yield from map(LessonNotice, lesson.notes)
        identity = {"lesson": lesson.fingerprint(), "base": None if base is None else base.digest}

        def save(checkpoint: Checkpoint) -> None:
            data = identity | {"epochs": epochs, "asked": lesson.request()}
            writer.save_learning(Checkpoint(checkpoint.tensors, checkpoint.data | data))

        resume = _checkpoint_to_resume(writer, base, identity["lesson"], lesson)
        if resume is not None:
            yield LearningResumed()
        policy = CheckpointPolicy(stop or (lambda: False), save, 60 * checkpoint_minutes)
        learned = yield from lesson.take(policy, resume)
        if learned is None:
            yield Stopped(lesson.stage.index, lesson.stage.index + 1, "interrupted", str(path))
            return
        why = FIRST if base is None else LEFT_OUT
        writer.commit(*pack_model(learned), previous=base if undoable else None, why=why, steps=undo_steps)
    yield from forgetting_warnings(learned.history[-1], undoable)
    yield lesson.learned(str(path))


def _images_to_hold_out(
    hold_out: HoldOut, images: Any, labels: Any, classes: set[Hashable], size: tuple[int, int]
) -> tuple[HoldOut, list[LessonNotice]]:
    """Read the images to hold out of the classes of the lesson; return them and notices about the others."""
    source, given = LessonImages(images), plain_labels(labels, "labels")
    source.check_count(len(given), size)
    others = [label for label in dict.fromkeys(given) if label not in classes]
    missing = [label for label in in_order(classes) if label not in given]
    if len(missing) == len(classes):
        raise EngramError(
            f"{option('validate')} has no image of {some(map(str, missing))}; give the classes the names that they have"
        )
    notices = [f"left out of the images to hold out: {some(map(str, others))}, not in this lesson"] if others else []
    notices += [f"no image is held out of {some(map(str, missing))}"] if missing else []
    pixels, read = source.read([row for row, label in enumerate(given) if label in classes], size)
    own = [given[row] for row in read]
    return replace(hold_out, images=pixels, labels=own), [LessonNotice(notice) for notice in notices]


def _model_to_teach(
    writer: Writer,
    images: LessonImages,
    count: int,
    config: ModelConfig | Mapping[str, Any] | None,
    training: Mapping[str, Any],
    device: Device,
    precision: Precision,
) -> tuple[Model, str]:
    """Return the model at the writer's path, or a new one for that many images, and what a new one starts from."""
    if not isinstance(config, ModelConfig):
        config = {name: value for name, value in (config or {}).items() if value is not None}
        valid = [name for name in signature(ModelConfig.choose).parameters if name != "images"]
        if unknown := [name for name in config if name not in valid]:
            raise UnknownNameError("argument of ModelConfig.choose", unknown[0], valid)
    if writer.current() is not None:
        model, _ = open_model(writer.path, device, precision)
        _refuse_changes(model.config, config, writer.path)
        return model, ""
    start = ""
    if not isinstance(config, ModelConfig):
        added, start = starting_point(config, images.files, training)
        config |= added
        if "weights" in config:
            config["weights"] = take_weights(config["weights"], config.get("backbone"))
        preferred = config["weights"].image_size if "weights" in config else None
        size = config["image_size"] if "image_size" in config else images.own_size(preferred)
        config = ModelConfig.choose(**{"device": device, **config, "image_size": size, "images": count})
    return Model(config, device, precision), start


def _model_of_run(
    writer: Writer,
    start: str | Path,
    config: ModelConfig | Mapping[str, Any] | None,
    device: Device,
    precision: Precision,
) -> tuple[Model, str]:
    """Return a new model that is made of a run, and a sentence about it."""
    if writer.current() is not None:
        raise EngramError(f"there is a model at {writer.path} already; leave {option('start')} out to teach it more")
    given = config.to_plain() if isinstance(config, ModelConfig) else config or {}
    more = [name for name, value in given.items() if value is not None and name != "validation"]
    if more:
        raise EngramError(f"a model made of a run has the settings of the run; leave {option(more[0])} out")
    model = model_from_run(start, device, precision, plain_number(given.get("validation") or 0.0))
    return model, f"a new model of the run in {start}: {len(model.classes)} classes, {model.config.method}"


def _refuse_training(model: Model, training: Mapping[str, Any]) -> None:
    """Refuse options that only training uses, for a method that trains nothing."""
    if training and not with_role(model.config.settings, *MAIN_ROLES):
        raise EngramError(
            f"{model.config.method} trains nothing: leave {' and '.join(map(option, training))} out, or start a model "
            f"with another {option('method')}"
        )


def _refuse_changes(ours: ModelConfig, wanted: ModelConfig | Mapping[str, Any], path: Path) -> None:
    """Refuse a configuration that is not the model's."""
    if isinstance(wanted, ModelConfig):
        mine, theirs = flatten(ours.to_plain()), flatten(wanted.to_plain())
        changed = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
        if changed:
            raise EngramError(
                f"the model at {path} has another configuration ({some(changed, SHOWN)}), which cannot be changed; "
                f"leave {option('config')} out"
            )
        return
    for name, value in ours.changed_by(wanted).items():
        made = f"with {option(name, value)}"
        if name == "flip" or (name == "weights" and not value):
            made = f"with{'' if value else 'out'} {'mirrored images' if name == 'flip' else 'pretrained weights'}"
        raise EngramError(
            f"the model at {path} was made {made}, which cannot be changed; leave {option(name)} out, or start a new "
            "model"
        )
    if wanted.get("settings"):
        raise EngramError(f"the settings of the model at {path} cannot be changed; leave {option('settings')} out")


def _epochs_of_checkpoint(writer: Writer, base: Pointer | None) -> int | None:
    """Return the epochs of the interrupted lesson, which do not change when it continues; None if there is none."""
    checkpoint = _unfinished(writer, base)
    epochs = None if checkpoint is None else checkpoint.data.get("epochs")
    return epochs if isinstance(epochs, int) else None


def _unfinished(writer: Writer, base: Pointer | None) -> Checkpoint | None:
    """Return the checkpoint of an unfinished lesson of this generation, or None; delete that of a finished one."""
    checkpoint = writer.learning()
    if checkpoint is not None and checkpoint.data.get("base") == (None if base is None else base.digest):
        return checkpoint
    writer.drop_learning()  # the lesson was finished, but the process was killed before or while it deleted this
    return None


def _checkpoint_to_resume(
    writer: Writer, base: Pointer | None, fingerprint: str | None, lesson: Lesson
) -> Checkpoint | None:
    checkpoint = _unfinished(writer, base)
    if checkpoint is not None and checkpoint.data.get("lesson") != fingerprint:
        raise EngramError(
            f"learning in {writer.path} was interrupted, and these are not the same images, labels and options"
            f"{_differences(checkpoint.data.get('asked'), lesson.request())}; "
            f"give the same to continue, or drop it with {option('restart', True)} to start again"
        )
    return checkpoint


def _differences(then: Any, now: dict[str, Any]) -> str:
    """Describe how a lesson differs from the interrupted one, in parentheses; empty if that is unknown."""
    if not isinstance(then, dict):
        return ""
    then, now = ({key: "the default" if value is None else value for key, value in how.items()} for how in (then, now))
    keys = [key for key, value in now.items() if key in then and then[key] != value]
    return f" ({', '.join(f'{key}: {then[key]} then, {now[key]} now' for key in keys[:SHOWN])})" if keys else ""


def has_learning(path: str | Path) -> bool:
    """Return whether there is a checkpoint of an unfinished lesson at that path."""
    return (Path(path) / LEARNING / STATE).is_file()
