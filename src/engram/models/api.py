"""Models on disk: a directory that learns new classes as a transaction, and can be read at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engram.core.checkpoint import Checkpoint
from engram.core.errors import EngramError
from engram.core.events import Event, Stopped, Warned
from engram.data.store import Images
from engram.experiment.learner_config import Device, Precision
from engram.models.edit import Undone, refuse_learning, remove_class, rename_class, undo
from engram.models.inputs import read_images
from engram.models.labels import doubts, encode_label, plain_labels
from engram.models.lesson import Keeping, Known, Lesson, Options
from engram.models.model import Entry, KnownClass, Model
from engram.models.model_config import ModelConfig, plain_number
from engram.models.remove_images import RemovedImages, remove_images
from engram.models.store.codec import open_model, pack_model, read_manifest
from engram.models.store.generations import FIRST, LEARNING, LEFT_OUT, REMOVED, SAVED, NoModelYet, Pointer
from engram.models.store.writer import STATE, Writer
from engram.models.time_budget import epochs_that_fit

__all__ = [
    "RESUMED",
    "Entry",
    "KnownClass",
    "Model",
    "ModelConfig",
    "NoModelYet",
    "Pointer",
    "RemovedImages",
    "Undone",
    "has_learning",
    "learn_into",
    "open_model",
    "read_manifest",
    "remove_class",
    "remove_images",
    "rename_class",
    "save_model",
    "undo",
]

RESUMED = "learning goes on where it stood"
SHOWN = 3  # of the differences from the lesson that was begun


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
    """Teaches the model at that path, made here if there is none, the classes of these images; yields events.

    Until the last event, Learned, the model is what it was, for every reader and whatever happens. Learning that was
    stopped or cut off goes on where it stood when the same images are given again; other images are refused then,
    unless `restart` drops it. images: as the estimator's X. config: for a new model; chosen by the images if None.
    minutes: instead of epochs, as many as fit, by the time of the first steps. undoable: keep what the model was before
    it, for `undo`.
    """
    if minutes is not None and (epochs is not None or not minutes > 0):
        raise EngramError("the minutes of a lesson must be more than 0, and take the place of epochs; give one of them")
    epochs, given = plain_number(epochs), plain_labels(labels)
    for label in dict.fromkeys(given):
        encode_label(label)  # what cannot be saved is refused before it is learned
    with Writer(path, create=True) as writer:
        model, pixels = _model_to_teach(writer, images, config, device, precision)
        base = writer.current()
        yield from map(Warned, doubts(dict.fromkeys(given), model.labels))
        if restart:
            writer.drop_learning()
        if minutes is not None:
            epochs = _begun_with(writer, base)
            if epochs is None:
                fit = epochs_that_fit(Lesson(model, pixels, given, Options(known)), minutes, stop)
                yield fit
                epochs = fit.epochs
        lesson = Lesson(model, pixels, given, Options(known, epochs))
        identity = {"lesson": lesson.fingerprint(), "base": None if base is None else base.digest}

        def save(checkpoint: Checkpoint) -> None:
            begun = identity | {"epochs": epochs, "asked": lesson.asked()}
            writer.save_learning(Checkpoint(checkpoint.tensors, checkpoint.data | begun))

        resume = _to_resume(writer, identity, lesson)
        if resume is not None:
            yield Warned(RESUMED)
        keeping = Keeping(stop or (lambda: False), save, 60 * checkpoint_minutes)
        learned = yield from lesson.take(keeping, resume)
        if learned is None:
            yield Stopped(lesson.stage.index, lesson.stage.index + 1, "interrupted", str(path))
            return
        why = FIRST if base is None else LEFT_OUT
        writer.commit(*pack_model(learned), previous=base if undoable else None, why=why)
    yield lesson.learned(str(path))


def _model_to_teach(
    writer: Writer, images: Any, config: ModelConfig | None, device: Device, precision: Precision
) -> tuple[Model, Images]:
    """The model at the writer's path, or a new one, and the images at its size."""
    if writer.current() is None:
        pixels = read_images(images, None if config is None else config.image_size)
        if config is None:
            size = (pixels.shape[1], pixels.shape[2])
            config = ModelConfig.choose(image_size=size, images=len(pixels), device=device)
        return Model(config, device, precision), pixels
    model, _ = open_model(writer.path, device, precision)
    if config is not None and config != model.config:
        raise EngramError(
            f"the model at {writer.path} learns with a configuration of its own, which cannot be changed; give none"
        )
    return model, read_images(images, model.config.image_size)


def _begun_with(writer: Writer, base: Pointer | None) -> int | None:
    """The epochs of the learning to go on with, whatever was asked for now."""
    checkpoint = writer.learning()
    if checkpoint is None or checkpoint.data.get("base") != (None if base is None else base.digest):
        return None
    epochs = checkpoint.data.get("epochs")
    return epochs if isinstance(epochs, int) else None


def _to_resume(writer: Writer, identity: dict[str, Any], lesson: Lesson) -> Checkpoint | None:
    checkpoint = writer.learning()
    if checkpoint is None:
        return None
    if checkpoint.data.get("base") != identity["base"]:
        writer.drop_learning()  # it was finished: a kill left it behind
        return None
    if checkpoint.data.get("lesson") != identity["lesson"]:
        raise EngramError(
            f"learning in {writer.path} was interrupted, and these are not the same images, labels and options"
            f"{_differences(checkpoint.data.get('asked'), lesson.asked())}; "
            "give the same to go on with it, or drop it (restart=True) to begin anew"
        )
    return checkpoint


def _differences(then: Any, now: dict[str, Any]) -> str:
    """In what a lesson differs from the one that was begun, in brackets; nothing where that is not known."""
    if not isinstance(then, dict):
        return ""
    keys = [key for key, value in now.items() if key in then and then[key] != value]
    return f" ({', '.join(f'{key}: {then[key]} then, {now[key]} now' for key in keys[:SHOWN])})" if keys else ""


def has_learning(path: str | Path) -> bool:
    """Whether there is learning to go on with at that path."""
    return (Path(path) / LEARNING / STATE).is_file()


def save_model(model: Model, path: str | Path, *, expected: Pointer | None = None, overwrite: bool = False) -> Pointer:
    """Makes the model the one at that path: a new one, or in place of the generation expected or of any (overwrite)."""
    if model.learner is None:
        raise EngramError("there is nothing to save: the model has not learned anything yet")
    manifest, files = pack_model(model)  # what cannot be saved is refused before anything is written
    with Writer(path, create=True) as writer:
        current = writer.current()
        if current is not None and current != expected and not overwrite:
            raise EngramError(
                f"there is another model at {path}, or it has changed since it was loaded; "
                "choose another place, or replace it with overwrite=True"
            )
        refuse_learning(writer, drop=overwrite, argument="overwrite")
        lessons = _lessons_since(model, path) if current is not None and current == expected else ["saved"]
        if current is not None and not lessons:
            return writer.commit(manifest, files, previous=current.previous, why=current.why)
        previous = current if set(lessons) == {"learned"} else None
        return writer.commit(manifest, files, previous=previous, why=REMOVED if "removed" in lessons else SAVED)


def _lessons_since(model: Model, path: str | Path) -> list[str]:
    """What happened to the model since it was the one at that path, lessons and removals, as its history has them."""
    then, now = read_manifest(path)["history"], [asdict(entry) for entry in model.history]
    return [entry["what"] for entry in now[len(then) :]] if now[: len(then)] == then else ["saved"]
