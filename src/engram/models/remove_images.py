"""Single pictures taken out of a model: those that it kept as exemplars or held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.contract.exemplars import unit_means
from engram.core.errors import EngramError
from engram.data.memory import Memory
from engram.data.stage import Samples
from engram.models.edit import refuse_learning
from engram.models.inputs import are_paths, read_images
from engram.models.model import Model
from engram.models.split import digest_of, digests_in
from engram.models.store.codec import open_model, pack_model, read_manifest
from engram.models.store.generations import FILE, GENERATIONS, REMOVED, WEIGHTS, Pointer, Snapshot, read_previous
from engram.models.store.pictures import EXEMPLARS, from_png, place_of
from engram.models.store.writer import Writer

TUNED = "exemplars.changed"  # what a method keeps that changes the pixels of exemplars


@dataclass(frozen=True)
class RemovedImages:
    """How many images were given, how many of them the model had, and how many pictures went of each class.

    learned: how many of them were noted as trained on, kept or not; the notes go. before: whether some were found in
    what the model was before its last lesson alone, which is deleted then.
    """

    given: int
    found: int
    exemplars: dict[Hashable, int]
    heldout: dict[Hashable, int]
    learned: dict[Hashable, int]
    before: bool = False


def remove_images(path: str | Path, images: Any, *, drop_learning: bool = False) -> RemovedImages:
    """Deletes every kept picture of the model at that path that has the pixels of one of these images, and its digest.

    images: as the estimator's X, brought to the model's size as for learning; a path may be that of a file in the
    model's own directory, which may be damaged. What the network learned from them stays in its weights.
    """
    with Writer(path) as writer:
        refuse_learning(writer, drop=drop_learning, argument="drop_learning")
        manifest, pointer = read_manifest(path), writer.current()
        assert pointer is not None
        height, width = manifest["config"]["image_size"]
        named, wanted = _given(path, pointer, images, (height, width))
        model, _ = open_model(path, "cpu", sparing=named.values())
        assert model.learner is not None
        if TUNED in model.learner.buffers and len(named) < len(wanted):
            raise EngramError(
                f"{model.config.method} changes the pixels of its exemplars, which cannot be told from an image then; "
                "name their files in the model's directory, or remove the class"
            )
        kept, pixels = _pixels(model), set(wanted) - {None}
        gone = {kind: _take_out(memory, pixels) for kind, memory in _memories(model).items()}
        learned = _forget_digests(model, pixels)
        for name in set(named.values()):
            gone[name.partition("/")[0]][place_of(name)] += 1
        _refuse_last(manifest["classes"], gone[EXEMPLARS], model)
        before = _before(path, pointer, (height, width), pixels - kept - {wanted[i] for i in named})
        noted = {image for images in learned.values() for image in images}
        there = kept | before | noted
        found = sum(i in named or image in there for i, image in enumerate(wanted))
        if any(gone.values()) or noted:
            _take_means(model, sorted(gone[EXEMPLARS]))
            model.measure()
            writer.commit(*pack_model(model), why=REMOVED)
        elif before:
            writer.adopt(pointer, why=REMOVED)
    counts = [*gone.values(), {place: len(images) for place, images in learned.items()}]
    by_class = [{model.labels[place]: number for place, number in sorted(own.items())} for own in counts]
    return RemovedImages(len(wanted), found, *by_class, before=bool(before))


def _memories(model: Model) -> dict[str, Memory]:
    assert model.learner is not None
    return {EXEMPLARS: model.learner.memory, "heldout": model.heldout}


def _given(path: str | Path, pointer: Pointer, images: Any, size: tuple[int, int]) -> tuple[dict[int, str], list[Any]]:
    """Which of the images are the model's own files, by name; and the pixels of each, None of such that are damaged."""
    if not are_paths(images):
        return {}, [image.tobytes() for image in read_images(images, size)]
    root = Path(path).resolve() / GENERATIONS / pointer.generation
    named: dict[int, str] = {}
    for i, file in enumerate(images):
        real = Path(file).resolve()
        name = real.relative_to(root).as_posix() if real.is_relative_to(root) else WEIGHTS
        if name != WEIGHTS and FILE.fullmatch(name) and real.exists():
            named[i] = name
    others = [file for i, file in enumerate(images) if i not in named]
    read = iter(read_images(others, size) if others else ())
    return named, [_if_readable(file, size) if i in named else next(read).tobytes() for i, file in enumerate(images)]


def _if_readable(file: Any, size: tuple[int, int]) -> bytes | None:
    try:
        return read_images([file], size)[0].tobytes()
    except EngramError:
        return None


def _pixels(model: Model) -> set[bytes]:
    """The pixels of every picture that the model kept."""
    samples = [memory.samples() for memory in _memories(model).values()]
    return {image.numpy().tobytes() for part in samples if part is not None for image in part.images}


def _take_out(memory: Memory, wanted: set[bytes]) -> Counter[int]:
    """Drops the pictures with these pixels; how many, by class."""
    gone: Counter[int] = Counter()
    for label in memory.labels:
        own = [image.numpy().tobytes() in wanted for image in memory.of(label).images]
        if any(own):
            gone[label] = sum(own)
            memory.keep(label, torch.tensor([row for row, is_gone in enumerate(own) if not is_gone], dtype=torch.int64))
    return gone


def _forget_digests(model: Model, wanted: set[bytes]) -> dict[int, list[bytes]]:
    """Drops the notes that classes were trained on images with these pixels; which, by class."""
    digests = {pixels: digest_of(np.frombuffer(pixels, np.uint8)) for pixels in wanted}
    found: dict[int, list[bytes]] = {}
    for place, known in enumerate(model.classes):
        noted = digests_in(known.digests)
        if own := [pixels for pixels, digest in digests.items() if digest in noted]:
            found[place] = own
            left = b"".join(sorted(noted - set(digests.values())))
            model.classes = (*model.classes[:place], replace(known, digests=left), *model.classes[place + 1 :])
    return found


def _refuse_last(had: list[dict[str, Any]], gone: Counter[int], model: Model) -> None:
    """Refuses to leave a class without exemplars, which later lessons and NME need."""
    last = [place for place, number in gone.items() if number >= had[place]["exemplars"]]
    if last:
        names = ", ".join(repr(model.labels[place]) for place in sorted(last))
        raise EngramError(f"these are all the exemplars of {names}; nothing was removed; remove the class instead")


def _take_means(model: Model, places: list[int]) -> None:
    """Takes the means of these classes anew from the exemplars that are left; the others' stay as they are."""
    learner = model.learner
    assert learner is not None
    if learner.class_means is None or not places:
        return
    parts = [learner.memory.of(place) for place in places]
    own = [replace(part, labels=torch.full_like(part.labels, number)) for number, part in enumerate(parts)]
    learner.class_means = learner.class_means.clone()
    learner.class_means[places] = unit_means(learner, Samples.concatenate(own), len(own), model.engine)


def _before(path: str | Path, pointer: Pointer, size: tuple[int, int], wanted: set[bytes]) -> set[bytes]:
    """Those of these pixels that the model had before its last lesson; all of them where that cannot be read."""

    def find(snapshot: Snapshot) -> set[bytes]:
        names = sorted(snapshot.names - {WEIGHTS})
        return wanted & {from_png(snapshot.read(name), size, snapshot.path / name).tobytes() for name in names}

    if pointer.previous is None or not wanted:
        return set()
    try:
        return read_previous(path, find)
    except EngramError:
        return wanted
