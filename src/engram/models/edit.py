"""Change a model on disk without learning: remove classes or images, rename a class, undo a lesson, save a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from engram.contract.exemplars import unit_means
from engram.core.errors import EngramError, option, suggest
from engram.data.memory import Memory
from engram.data.stage import Samples
from engram.data.store import some
from engram.models.inputs import are_paths, read_images
from engram.models.labels import encode_label, group_similar, plain_labels
from engram.models.model import Model
from engram.models.split import digest_of, digests_in
from engram.models.store.codec import last_lesson, manifest_of, open_model, open_previous, pack_model, read_manifest
from engram.models.store.generations import (
    DAMAGED,
    FILE,
    GENERATIONS,
    REMOVED,
    SAVED,
    UNDONE,
    WEIGHTS,
    Pointer,
    Snapshot,
    read_model,
    read_previous,
)
from engram.models.store.pictures import EXEMPLARS, HELDOUT, class_position, from_png
from engram.models.store.writer import Writer

T = TypeVar("T")
CHANGED_EXEMPLARS = "exemplars.changed"  # buffer of a method that changes the pixels of its exemplars


@dataclass(frozen=True)
class Undone:
    """Result of `undo`.

    gone: classes that the lesson added.
    again: classes that it learned again, now as they were before.
    classes: number of classes now.
    lesson, date: number of the last lesson now, and date of the last change before the lesson undone.
    """

    gone: list[Hashable]
    again: list[Hashable]
    classes: int
    lesson: int
    date: str


@dataclass(frozen=True)
class RemovedImages:
    """Result of `remove_images`.

    given, found: number of images given, and of those that the model had.
    exemplars, heldout: number of pictures removed of each class.
    learned: number of digests removed of each class, of images it was trained on.
    before: some images were found only in the state before the last lesson, which was deleted therefore.
    """

    given: int
    found: int
    exemplars: dict[Hashable, int]
    heldout: dict[Hashable, int]
    learned: dict[Hashable, int]
    before: bool = False


def save_model(model: Model, path: str | Path, *, expected: Pointer | None = None, overwrite: bool = False) -> Pointer:
    """Save the model at that path, which must hold no model or the expected generation; `overwrite` replaces any."""
    if model.learner is None:
        raise EngramError("there is nothing to save: the model has not learned anything yet")
    manifest, files = pack_model(model)  # refuses before anything is written
    with Writer(path, create=True) as writer:
        current = writer.current()
        if current is not None and current != expected and not overwrite:
            raise EngramError(
                f"there is another model at {path}, or it has changed since it was loaded; "
                f"choose another path, or replace it with {option('overwrite', True)}"
            )
        _refuse_unfinished_lesson(writer, drop=overwrite, argument="overwrite")
        changes = _changes_since(model, path) if current is not None and current == expected else ["saved"]
        if current is not None and not changes:
            return writer.commit(manifest, files, previous=current.previous, why=current.why)
        previous = current if set(changes) == {"learned"} else None
        return writer.commit(manifest, files, previous=previous, why=REMOVED if "removed" in changes else SAVED)


def _changes_since(model: Model, path: str | Path) -> list[str]:
    """Return the kinds of lessons and removals since the model was the one at that path."""
    then, now = read_manifest(path)["history"], [asdict(entry) for entry in model.history]
    return [entry["what"] for entry in now[len(then) :]] if now[: len(then)] == then else ["saved"]


def remove_class(path: str | Path, label: Hashable, *more: Hashable, drop_learning: bool = False) -> Model:
    """Remove one or several classes and their files from the model at that path; return the model.

    The state before the last lesson is deleted too, because it contained the class.
    """
    with Writer(path) as writer:
        _refuse_unfinished_lesson(writer, drop=drop_learning)
        model, _ = open_model(path, "cpu", without=(label, *more))  # their pictures may be damaged
        model.remove((label, *more))
        writer.commit(*pack_model(model), why=REMOVED)
    return model


def rename_class(path: str | Path, old: Hashable, new: Hashable, *, drop_learning: bool = False) -> None:
    """Rename a class of the model at that path, also in the state before the last lesson.

    Refuses a name that another class has, or that is too similar to one.
    """
    (new,) = plain_labels([new], "new")
    encode_label(new)
    with Writer(path) as writer:
        _refuse_unfinished_lesson(writer, drop=drop_learning)
        _check_names([known["label"] for known in read_manifest(path)["classes"]], old, new)
        pointer = writer.current()
        assert pointer is not None

        def renamed(snapshot: Snapshot) -> Pointer:
            files = [(name, partial(snapshot.read, name)) for name in sorted(snapshot.names)]
            return writer.write_generation(manifest_of(snapshot).rename(old, new).to_plain(), files)

        keeps = pointer.previous is not None and _unless_damaged(lambda: open_previous(path)) is not None
        previous = read_previous(path, renamed) if keeps else None
        writer.adopt(read_model(path, renamed), previous=previous, why=pointer.why if not pointer.previous else DAMAGED)


def _check_names(labels: Sequence[Hashable], old: Hashable, new: Hashable) -> None:
    """Refuse to rename an unknown class, or to use a name that is taken."""
    if old not in labels:
        raise EngramError(f"the model knows no class {old!r}: {suggest(str(old), map(str, labels))}")
    if new == old:
        raise EngramError(f"the class is called {new!r} already; give another name")
    for label in labels:
        if label != old and (label == new or group_similar([label, new])):
            raise EngramError(f"the model has a class {label!r} already; choose a name that differs more")


def undo(path: str | Path, *, drop_learning: bool = False) -> Undone:
    """Undo the last lesson: restore the model at that path as it was before, atomically."""
    with Writer(path) as writer:
        pointer = writer.current()
        before = open_previous(path)  # verifies every file before anything changes
        _refuse_unfinished_lesson(writer, drop=drop_learning)
        manifest = _unless_damaged(lambda: read_manifest(path)) or {"classes": []}  # must not prevent an undo
        now = {known["label"]: known["stage"] for known in manifest["classes"]}
        assert pointer is not None
        assert pointer.previous is not None
        writer.drop_learning()  # a killed process may have left the checkpoint of the lesson that is undone
        writer.adopt(pointer.previous, why=UNDONE)
    then = {known.label: known.stage for known in before.classes}
    return Undone(
        gone=[label for label in now if label not in then],
        again=[label for label, stage in now.items() if then.get(label, stage) != stage],
        classes=len(then),
        **last_lesson(before.history),
    )


def _unless_damaged(read: Callable[[], T]) -> T | None:
    """Return what is read, or None if it cannot be read."""
    try:
        return read()
    except EngramError:
        return None


def _refuse_unfinished_lesson(writer: Writer, drop: bool, argument: str = "drop_learning") -> None:
    """Refuse to change a model with an unfinished lesson, which could not be resumed afterwards.

    drop: drop that lesson instead. argument: the argument that drops it, for the message.
    """
    if drop:
        writer.drop_learning()
        return
    checkpoint, base = writer.learning(), writer.current()
    if checkpoint is not None and checkpoint.data.get("base") == (None if base is None else base.digest):
        raise EngramError(
            f"learning in {writer.path} was interrupted; finish it first, or drop it with {option(argument, True)}"
        )


def remove_images(path: str | Path, images: Any, *, drop_learning: bool = False) -> RemovedImages:
    """Delete every picture and digest of these images from the model at that path.

    The network keeps what it learned from them in its weights.

    images: as X of the estimator, resized as for learning. A path may be a file in the model's own directory, which
        may be damaged.
    """
    with Writer(path) as writer:
        _refuse_unfinished_lesson(writer, drop=drop_learning)
        manifest, pointer = read_manifest(path), writer.current()
        assert pointer is not None
        height, width = manifest["config"]["image_size"]
        own_files, wanted = _read_given(path, pointer, images, (height, width))
        model, _ = open_model(path, "cpu", sparing=own_files.values())
        assert model.learner is not None
        if CHANGED_EXEMPLARS in model.learner.buffers and len(own_files) < len(wanted):
            raise EngramError(
                f"{model.config.method} changes the pixels of its exemplars, so they cannot be found by an image; "
                "name their files in the model's directory, or remove the class"
            )
        memories = {EXEMPLARS: model.learner.memory, HELDOUT: model.heldout}
        kept, pixels = _pixels(memories.values()), set(wanted) - {None}
        gone = {kind: _remove_pictures(memory, pixels) for kind, memory in memories.items()}
        learned = _remove_digests(model, pixels)
        if learned and model.method.keeps_statistics:
            names = some([str(model.labels[position]) for position in learned])
            raise EngramError(
                f"{model.config.method} learned these images of {names} into what it keeps of the class, from which "
                "single images cannot be taken out; remove the class, and learn it again from the other images"
            )
        for name in set(own_files.values()):
            gone[name.partition("/")[0]][class_position(name)] += 1
        _refuse_last_exemplars(manifest["classes"], gone[EXEMPLARS], model)
        before = _found_before(path, pointer, (height, width), pixels - kept - {wanted[i] for i in own_files})
        noted = {image for images in learned.values() for image in images}
        there = kept | before | noted
        found = sum(i in own_files or image in there for i, image in enumerate(wanted))
        if any(gone.values()) or noted:
            _recompute_means(model, sorted(gone[EXEMPLARS]))
            model.measure()
            writer.commit(*pack_model(model), why=REMOVED)
        elif before:
            writer.adopt(pointer, why=REMOVED)
    counts = [*gone.values(), {position: len(images) for position, images in learned.items()}]
    exemplars, heldout, digests = (
        {model.labels[position]: number for position, number in sorted(own.items())} for own in counts
    )
    return RemovedImages(len(wanted), found, exemplars, heldout, digests, before=bool(before))


def _read_given(
    path: str | Path, pointer: Pointer, images: Any, size: tuple[int, int]
) -> tuple[dict[int, str], list[bytes | None]]:
    """Return the names of those images that are the model's own files, by index, and the pixels of every image.

    The pixels of a damaged file of the model are None.
    """
    if not are_paths(images):
        return {}, [image.tobytes() for image in read_images(images, size)]
    root = Path(path).resolve() / GENERATIONS / pointer.generation
    own_files: dict[int, str] = {}
    for i, file in enumerate(images):
        real = Path(file).resolve()
        name = real.relative_to(root).as_posix() if real.is_relative_to(root) else WEIGHTS
        if name != WEIGHTS and FILE.fullmatch(name) and real.exists():
            own_files[i] = name
    others = [file for i, file in enumerate(images) if i not in own_files]
    read = iter(read_images(others, size) if others else ())
    pixels: list[bytes | None] = []
    for i, file in enumerate(images):
        image = _unless_damaged(partial(read_images, [file], size)) if i in own_files else next(read)[None]
        pixels.append(None if image is None else image.tobytes())
    return own_files, pixels


def _pixels(memories: Any) -> set[bytes]:
    """Return the pixels of every picture in these memories."""
    samples = [memory.samples() for memory in memories]
    return {image.numpy().tobytes() for part in samples if part is not None for image in part.images}


def _remove_pictures(memory: Memory, wanted: set[Any]) -> Counter[int]:
    """Remove the pictures with these pixels; return their number by class."""
    gone: Counter[int] = Counter()
    for label in memory.labels:
        own = [image.numpy().tobytes() in wanted for image in memory.of(label).images]
        if any(own):
            gone[label] = sum(own)
            memory.keep(label, torch.tensor([row for row, is_gone in enumerate(own) if not is_gone], dtype=torch.int64))
    return gone


def _remove_digests(model: Model, wanted: set[Any]) -> dict[int, list[bytes]]:
    """Remove the digests of images with these pixels from all classes; return the pixels found by class."""
    digests = {pixels: digest_of(np.frombuffer(pixels, np.uint8)) for pixels in wanted}
    found: dict[int, list[bytes]] = {}
    for position, known in enumerate(model.classes):
        noted = digests_in(known.digests)
        if own := [pixels for pixels, digest in digests.items() if digest in noted]:
            found[position] = own
            left = b"".join(sorted(noted - set(digests.values())))
            changed = replace(known, digests=left)
            model.classes = (*model.classes[:position], changed, *model.classes[position + 1 :])
    return found


def _refuse_last_exemplars(had: list[dict[str, Any]], gone: Counter[int], model: Model) -> None:
    """Refuse to leave a class without exemplars, which later lessons and NME need."""
    last = [position for position, number in gone.items() if number >= had[position]["exemplars"]]
    if last:
        names = ", ".join(repr(model.labels[position]) for position in sorted(last))
        raise EngramError(f"these are all the exemplars of {names}; nothing was removed; remove the class instead")


def _recompute_means(model: Model, positions: list[int]) -> None:
    """Recompute the means of these classes from the exemplars that are left."""
    learner = model.learner
    assert learner is not None
    if learner.class_means is None or not positions:
        return
    parts = [learner.memory.of(position) for position in positions]
    own = [replace(part, labels=torch.full_like(part.labels, number)) for number, part in enumerate(parts)]
    learner.class_means = learner.class_means.clone()
    learner.class_means[positions] = unit_means(learner, Samples.concatenate(own), len(own), model.engine)


def _found_before(path: str | Path, pointer: Pointer, size: tuple[int, int], wanted: set[Any]) -> set[Any]:
    """Return those of these pixels that the model had before its last lesson; all of them if that is unreadable."""

    def find(snapshot: Snapshot) -> set[Any]:
        names = sorted(snapshot.names - {WEIGHTS})
        return wanted & {from_png(snapshot.read(name), size, snapshot.path / name).tobytes() for name in names}

    if pointer.previous is None or not wanted:
        return set()
    found = _unless_damaged(lambda: read_previous(path, find))
    return wanted if found is None else found
