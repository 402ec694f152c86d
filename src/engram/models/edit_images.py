"""Change single images of a model on disk: remove them, or move them to another class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.contract.exemplars import unit_means
from engram.core.errors import EngramError
from engram.data.memory import Memory
from engram.data.stage import Samples
from engram.models.digests import digest_of, digests_in
from engram.models.edit import refuse_unfinished_lesson, unless_damaged
from engram.models.history import LessonRecord, current_time
from engram.models.inputs import are_paths, read_images
from engram.models.model import Model
from engram.models.store.codec import open_model, pack_model, read_manifest
from engram.models.store.generations import (
    FILE,
    GENERATIONS,
    REMOVED,
    WEIGHTS,
    Pointer,
    Snapshot,
    read_previous,
)
from engram.models.store.pictures import EXEMPLARS, HELDOUT, class_position, from_png
from engram.models.store.writer import Writer

CHANGED_EXEMPLARS = "exemplars.changed"  # buffer of a method that changes the pixels of its exemplars


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


def remove_images(path: str | Path, images: Any, *, drop_learning: bool = False) -> RemovedImages:
    """Delete every picture and digest of these images from the model at that path, with all its earlier states.

    The network keeps what it learned from them in its weights.

    images: as X of the estimator, resized as for learning. A path may be a file in the model's own directory, which
        may be damaged.
    """
    with Writer(path) as writer:
        refuse_unfinished_lesson(writer, drop=drop_learning)
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


def move_images(path: str | Path, images: Any, to: Hashable, *, drop_learning: bool = False) -> MovedImages:
    """Make images that the model at that path has learned, or kept, images of another class.

    Held-out images and exemplars become those of the other class. A method that keeps statistics counts images that it
    learned in the other class instead, exactly, or refuses it. Other methods keep in their weights what they learned
    from them, and refuse images of which they kept no copy.

    images: as X of the estimator, resized as for learning.
    """
    with Writer(path) as writer:
        refuse_unfinished_lesson(writer, drop=drop_learning)
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
        image = unless_damaged(partial(read_images, [file], size)) if i in own_files else next(read)[None]
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
        own = unless_damaged(lambda each=each: read_previous(path, find, each))
        found |= wanted if own is None else own
    return found
