"""Change a model on disk without learning: remove, rename and merge classes, remove and move images, undo, save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from engram.models.digests import digest_of, digests_in
from engram.models.inputs import are_paths, read_images
from engram.models.labels import encode_label, group_similar, plain_labels
from engram.models.model import LessonRecord, Model, current_time
from engram.models.store.codec import last_lesson, manifest_of, open_model, open_previous, pack_model, read_manifest
from engram.models.store.generations import (
    FILE,
    GENERATIONS,
    LEFT_OUT,
    REMOVED,
    SAVED,
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

    what: the change that was undone: "learned", "removed", "merged", "moved" or "renamed"; empty if the model was so
        damaged that this is not known.
    gone: classes that are gone, because the change added them. back: classes that are back.
    again: classes that it learned again, now as they were before.
    classes: number of classes now.
    lesson, date: number of the last lesson now, and date of the last change before the one undone.
    steps: how many more changes can be undone.
    """

    what: str
    gone: list[Hashable]
    back: list[Hashable]
    again: list[Hashable]
    classes: int
    lesson: int
    date: str
    steps: int


@dataclass(frozen=True)
class RemovedImages:
    """Result of `remove_images`.

    given, found: number of images given, and of those that the model had.
    exemplars, heldout: number of pictures removed of each class.
    learned: number of digests removed of each class, of images it was trained on.
    before: some images were found only in earlier states. These are deleted whenever something is removed.
    exact: the model is as if it had never learned these images.
    """

    given: int
    found: int
    exemplars: dict[Hashable, int]
    heldout: dict[Hashable, int]
    learned: dict[Hashable, int]
    before: bool = False
    exact: bool = False


@dataclass(frozen=True)
class MovedImages:
    """Result of `move_images`.

    given, found: number of images given, and of those that were moved.
    exemplars, heldout, learned: number of exemplars, of held-out images and of learned images, by the class that they
        were of.
    """

    given: int
    found: int
    exemplars: dict[Hashable, int]
    heldout: dict[Hashable, int]
    learned: dict[Hashable, int]


def save_model(
    model: Model,
    path: str | Path,
    *,
    expected: Pointer | None = None,
    overwrite: bool = False,
    undoable: bool = True,
) -> Pointer:
    """Save the model at that path, which must hold no model or the expected generation; `overwrite` replaces any.

    undoable: keep the generation that was there for `undo`, if the model was made from it.
    """
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
        if not undoable:
            return writer.commit(manifest, files, why=REMOVED if "removed" in changes else LEFT_OUT)
        return writer.commit(manifest, files, previous=None if "saved" in changes else current, why=SAVED)


def _changes_since(model: Model, path: str | Path) -> list[str]:
    """Return the kinds of lessons and removals since the model was the one at that path."""
    then, now = read_manifest(path)["history"], [asdict(entry) for entry in model.history]
    return [entry["what"] for entry in now[len(then) :]] if now[: len(then)] == then else ["saved"]


def remove_class(
    path: str | Path, label: Hashable, *more: Hashable, drop_learning: bool = False, undoable: bool = True
) -> Model:
    """Remove one or several classes from the model at that path; return the model.

    undoable: keep the state before, which contains the classes, for `undo`. False deletes it and all earlier states, so
        that nothing of the classes is left in the directory.
    """
    with Writer(path) as writer:
        _refuse_unfinished_lesson(writer, drop=drop_learning)
        model, pointer = open_model(path, "cpu", without=(label, *more))  # their pictures may be damaged
        model.remove((label, *more))
        writer.commit(*pack_model(model), previous=pointer if undoable else None, why=REMOVED)
    return model


def rename_class(path: str | Path, old: Hashable, new: Hashable, *, drop_learning: bool = False) -> None:
    """Rename a class of the model at that path; refuse a name that another class has, or that is too similar to one."""
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

        writer.adopt(read_model(path, renamed), previous=pointer)


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
    """Undo the last change, a lesson or another: restore the model at that path as it was before, atomically.

    Several of the last changes can be undone one after the other.
    """
    with Writer(path) as writer:
        pointer = writer.current()
        before = open_previous(path)  # verifies every file before anything changes
        _refuse_unfinished_lesson(writer, drop=drop_learning)
        manifest = _unless_damaged(lambda: read_manifest(path))  # must not prevent an undo
        now = {} if manifest is None else {known["label"]: known["stage"] for known in manifest["classes"]}
        assert pointer is not None
        assert pointer.previous is not None
        writer.drop_learning()  # a killed process may have left the checkpoint of the lesson that is undone
        earlier = pointer.previous
        writer.adopt(earlier, previous=earlier.previous, why=earlier.why)
    then = {known.label: known.stage for known in before.classes}
    history = [] if manifest is None else manifest["history"][len(before.history) :]
    return Undone(
        what="" if manifest is None else history[-1]["what"] if history else "renamed",
        gone=[label for label in now if label not in then],
        back=[label for label in then if label not in now and manifest is not None],
        again=[label for label, stage in now.items() if then.get(label, stage) != stage],
        classes=len(then),
        **last_lesson(before.history),
        steps=len(earlier.earlier()),
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
    """Delete every picture and digest of these images from the model at that path, with all its earlier states.

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
            _relabel(model, learned, None)
            for position, own in learned.items():
                model.replace_class(position, images=max(0, model.classes[position].images - len(own)))
        for name in set(own_files.values()):
            gone[name.partition("/")[0]][class_position(name)] += 1
        _refuse_last_exemplars(manifest["classes"], gone[EXEMPLARS], model)
        before = _found_before(path, pointer, (height, width), pixels - kept - {wanted[i] for i in own_files})
        noted = {image for images in learned.values() for image in images}
        there = kept | before | noted
        found = sum(i in own_files or image in there for i, image in enumerate(wanted))
        if any(gone.values()) or noted:
            _recompute_means(model, sorted(gone[EXEMPLARS]))
            model.measure(calibrate=model.method.keeps_statistics and bool(learned))
            writer.commit(*pack_model(model), why=REMOVED)
        elif before:
            writer.adopt(pointer, why=REMOVED)
    counts = [*gone.values(), {position: len(images) for position, images in learned.items()}]
    exemplars, heldout, digests = (
        {model.labels[position]: number for position, number in sorted(own.items())} for own in counts
    )
    exact = model.method.keeps_statistics
    return RemovedImages(len(wanted), found, exemplars, heldout, digests, before=bool(before), exact=exact)


def merge_classes(path: str | Path, label: Hashable, into: Hashable, *, drop_learning: bool = False) -> Model:
    """Make the images of a class of the model at that path images of another one; return the model.

    The scores become those of a model that learned all of them as that class. Methods that keep no statistics of each
    class refuse it.
    """
    with Writer(path) as writer:
        _refuse_unfinished_lesson(writer, drop=drop_learning)
        model, pointer = open_model(path, "cpu")
        model.merge(label, into)
        writer.commit(*pack_model(model), previous=pointer)
    return model


def move_images(path: str | Path, images: Any, to: Hashable, *, drop_learning: bool = False) -> MovedImages:
    """Make images that the model at that path has learned, or kept, images of another class.

    Held-out images and exemplars become those of the other class. A method that keeps statistics counts images that it
    learned in the other class instead, exactly, or refuses it. Other methods keep in their weights what they learned
    from them, and refuse images of which they kept no copy.

    images: as X of the estimator, resized as for learning.
    """
    with Writer(path) as writer:
        _refuse_unfinished_lesson(writer, drop=drop_learning)
        model, pointer = open_model(path, "cpu")
        assert model.learner is not None
        target = model.position(to)
        own_files, wanted = _read_given(path, pointer, images, model.config.image_size)
        if CHANGED_EXEMPLARS in model.learner.buffers and len(own_files) < len(wanted):
            raise EngramError(f"{model.config.method} changes the pixels of its exemplars, so no image can be moved")
        pixels = set(wanted)
        if None in pixels:
            raise EngramError("a picture of the model is damaged and cannot be moved; remove it from the model")
        memories = {EXEMPLARS: model.learner.memory, HELDOUT: model.heldout}
        had = [{"exemplars": number} for number in _counts(model.learner.memory, len(model.classes))]
        moved = {kind: _move_pictures(memory, pixels, target) for kind, memory in memories.items()}
        kept = {image for own in moved.values() for images in own.values() for image in images}
        learned = _move_digests(model, pixels, target)
        if model.method.keeps_statistics:
            _relabel(model, learned, target)
        elif lost := [image for images in learned.values() for image in images if image not in kept]:
            raise EngramError(
                f"{model.config.method} kept no copy of {len(lost)} of these images, and has learned from them; remove "
                f"them from the model, and learn them again as more of {str(to)!r}"
            )
        exemplars, heldout, digests = (
            {position: len(images) for position, images in own.items()} for own in (*moved.values(), learned)
        )
        _refuse_last_exemplars(had, exemplars, model)
        found = kept.union(*learned.values())
        number = sum(image in found for image in wanted)
        if found:
            _recompute_means(model, sorted({*exemplars, target} if exemplars else ()))
            model.history = (*model.history, LessonRecord("moved", current_time(), images=number))
            model.measure(calibrate=model.method.keeps_statistics)
            writer.commit(*pack_model(model), previous=pointer)
    by_label = ({model.labels[place]: own[place] for place in sorted(own)} for own in (exemplars, heldout, digests))
    return MovedImages(len(wanted), number, *by_label)


def _counts(memory: Memory, classes: int) -> list[int]:
    """Return the number of pictures of each class."""
    return [len(memory.of(label)) if label in memory.labels else 0 for label in range(classes)]


def _move_pictures(memory: Memory, wanted: set[Any], target: int) -> dict[int, list[bytes]]:
    """Make the pictures with these pixels pictures of the target; return the pixels by the class they were of."""
    moved: dict[int, list[bytes]] = {}
    for label in [label for label in memory.labels if label != target]:
        pixels = [image.numpy().tobytes() for image in memory.of(label).pixels]
        rows = [row for row, image in enumerate(pixels) if image in wanted]
        if rows:
            moved[label] = [pixels[row] for row in rows]
            memory.move(label, torch.tensor(rows), target)
    return moved


def _move_digests(model: Model, wanted: set[Any], target: int) -> dict[int, list[bytes]]:
    """Make learned images with these pixels images of the target; return the pixels by the class they were of."""
    there = model.classes[target]
    learned = _remove_digests(model, wanted)
    learned.pop(target, None)
    noted = digests_in(there.digests)
    own = [digest_of(np.frombuffer(image, np.uint8)) for images in learned.values() for image in images]
    if twice := noted & set(own):
        raise EngramError(
            f"{len(twice)} of these images were learned as {str(there.label)!r} too; remove the images from the model, "
            f"and learn them again as more of {str(there.label)!r}"
        )
    for position, images in learned.items():
        model.replace_class(position, images=max(0, model.classes[position].images - len(images)))
    model.replace_class(target, images=there.images + len(own), digests=b"".join(sorted(noted.union(own))))
    return learned


def _relabel(model: Model, learned: dict[int, list[bytes]], target: int | None) -> None:
    """Count learned images, given by their pixels and classes, in the statistics of the target, or of none."""
    if not learned:
        return
    assert model.learner is not None
    shape = (*model.config.image_size, 3)
    images = [np.frombuffer(image, np.uint8).reshape(shape) for own in learned.values() for image in own]
    before = torch.tensor([position for position, own in learned.items() for _ in own])
    after = None if target is None else torch.full_like(before, target)
    features = model.features(torch.from_numpy(np.stack(images)))
    model.method.relabel(model.learner, features, before, after)
    model.method.solve(model.learner)
    model.learned_heldout = b""  # `measure` learns them again


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
    return {image.numpy().tobytes() for part in samples if part is not None for image in part.pixels}


def _remove_pictures(memory: Memory, wanted: set[Any]) -> Counter[int]:
    """Remove the pictures with these pixels; return their number by class."""
    gone: Counter[int] = Counter()
    for label in memory.labels:
        own = [image.numpy().tobytes() in wanted for image in memory.of(label).pixels]
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
            model.replace_class(position, digests=b"".join(sorted(noted - set(digests.values()))))
    return found


def _refuse_last_exemplars(had: list[dict[str, Any]], gone: Mapping[int, int], model: Model) -> None:
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
    """Return those of these pixels that an earlier state of the model has; all of them if one is unreadable."""

    def find(snapshot: Snapshot) -> set[Any]:
        names = sorted(snapshot.names - {WEIGHTS})
        return wanted & {from_png(snapshot.read(name), size, snapshot.path / name).tobytes() for name in names}

    found: set[Any] = set()
    for each in [pointer, *pointer.earlier()][:-1] if wanted else []:
        own = _unless_damaged(lambda each=each: read_previous(path, find, each))
        found |= wanted if own is None else own
    return found
