"""Teach a model on disk new classes. Readers see the old model until the lesson is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engram.core.checkpoint import Checkpoint
from engram.core.errors import EngramError, option
from engram.core.events import Event, Stopped
from engram.data.store import Images
from engram.experiment.learner_config import Device, Precision
from engram.models.inputs import read_images
from engram.models.labels import encode_label, plain_labels, similar_label_warnings
from engram.models.lesson import CheckpointPolicy, Known, Lesson, LessonOptions
from engram.models.lesson_plan import LearningResumed, SimilarLabels
from engram.models.model import Model
from engram.models.model_config import ModelConfig, plain_number
from engram.models.store.codec import open_model, pack_model
from engram.models.store.generations import FIRST, LEARNING, LEFT_OUT, Pointer
from engram.models.store.writer import STATE, Writer
from engram.models.time_budget import epochs_that_fit

SHOWN = 3  # differences between an interrupted lesson and the one given now


def learn_into(
    path: str | Path,
    images: Any,
    labels: Any,
    *,
    config: ModelConfig | None = None,
    known: Known = "refuse",
    epochs: int | None = None,
    minutes: float | None = None,
    restart: bool = False,
    undoable: bool = True,
    stop: Callable[[], bool] | None = None,
    checkpoint_minutes: float = 2.0,
    device: Device = "auto",
    precision: Precision = "auto",
) -> Iterator[Event]:
    """Teach the model at that path the classes of these images, or create it; yield events.

    The model on disk does not change before the last event, Learned. A lesson that was interrupted continues from its
    checkpoint if the same images are given again; other images are refused.

    Parameters
    ----------
    images: as X of the estimator.
    config: of a new model; None chooses one for the images.
    known: what to do with images of known classes, see `LessonOptions`.
    minutes: instead of epochs; trains as many epochs as fit, estimated from the first steps.
    restart: drop an interrupted lesson.
    undoable: keep the model as it was before, for `undo`.
    stop: called after every step; if it returns True, a checkpoint is saved and the last event is Stopped.
    """
    if minutes is not None and (epochs is not None or not minutes > 0):
        raise EngramError(f"{option('minutes')} must be above 0 and replaces {option('epochs')}; give one of them")
    epochs, given = plain_number(epochs), plain_labels(labels)
    for label in dict.fromkeys(given):
        encode_label(label)  # refuses a label that cannot be saved, before learning it
    with Writer(path, create=True) as writer:
        model, pixels = _model_to_teach(writer, images, config, device, precision)
        base = writer.current()
        yield from map(SimilarLabels, similar_label_warnings(dict.fromkeys(given), model.labels))
        if restart:
            writer.drop_learning()
        if minutes is not None:
            epochs = _epochs_of_checkpoint(writer, base)
            if epochs is None:
                fit = epochs_that_fit(Lesson(model, pixels, given, LessonOptions(known)), minutes, stop)
                yield fit
                epochs = fit.epochs
        lesson = Lesson(model, pixels, given, LessonOptions(known, epochs))
        identity = {"lesson": lesson.fingerprint(), "base": None if base is None else base.digest}

        def save(checkpoint: Checkpoint) -> None:
            data = identity | {"epochs": epochs, "asked": lesson.request()}
            writer.save_learning(Checkpoint(checkpoint.tensors, checkpoint.data | data))

        resume = _checkpoint_to_resume(writer, identity, lesson)
        if resume is not None:
            yield LearningResumed()
        policy = CheckpointPolicy(stop or (lambda: False), save, 60 * checkpoint_minutes)
        learned = yield from lesson.take(policy, resume)
        if learned is None:
            yield Stopped(lesson.stage.index, lesson.stage.index + 1, "interrupted", str(path))
            return
        why = FIRST if base is None else LEFT_OUT
        writer.commit(*pack_model(learned), previous=base if undoable else None, why=why)
    yield lesson.learned(str(path))


def _model_to_teach(
    writer: Writer, images: Any, config: ModelConfig | None, device: Device, precision: Precision
) -> tuple[Model, Images]:
    """Return the model at the writer's path or a new one, and the images at its size."""
    if writer.current() is None:
        pixels = read_images(images, None if config is None else config.image_size)
        if config is None:
            size = (pixels.shape[1], pixels.shape[2])
            config = ModelConfig.choose(image_size=size, images=len(pixels), device=device)
        return Model(config, device, precision), pixels
    model, _ = open_model(writer.path, device, precision)
    if config is not None and config != model.config:
        raise EngramError(
            f"the model at {writer.path} has another configuration, which cannot be changed; "
            f"leave {option('config')} out"
        )
    return model, read_images(images, model.config.image_size)


def _epochs_of_checkpoint(writer: Writer, base: Pointer | None) -> int | None:
    """Return the epochs of the interrupted lesson, which do not change when it continues; None if there is none."""
    checkpoint = writer.learning()
    if checkpoint is None or checkpoint.data.get("base") != (None if base is None else base.digest):
        return None
    epochs = checkpoint.data.get("epochs")
    return epochs if isinstance(epochs, int) else None


def _checkpoint_to_resume(writer: Writer, identity: dict[str, Any], lesson: Lesson) -> Checkpoint | None:
    checkpoint = writer.learning()
    if checkpoint is None:
        return None
    if checkpoint.data.get("base") != identity["base"]:
        writer.drop_learning()  # the lesson was finished, but the process was killed before it deleted this
        return None
    if checkpoint.data.get("lesson") != identity["lesson"]:
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
    keys = [key for key, value in now.items() if key in then and then[key] != value]
    return f" ({', '.join(f'{key}: {then[key]} then, {now[key]} now' for key in keys[:SHOWN])})" if keys else ""


def has_learning(path: str | Path) -> bool:
    """Return whether there is an interrupted lesson at that path."""
    return (Path(path) / LEARNING / STATE).is_file()
