"""Choose which images of a lesson are learned from and which are held out to measure accuracy.

Pictures are compared by their pixels at the model's size, across all classes of the lesson and of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from engram.data.memory import Memory
from engram.data.store import some, stable_permutation
from engram.models.model import Model
from engram.models.model_config import VALIDATION_LEAST, VALIDATION_MOST

DIGEST_BYTES = 8
NAMED = 3  # pairs of classes, and files, in a warning


def digest_of(image: np.ndarray) -> bytes:
    """Return a short digest of an image's pixels."""
    return hashlib.blake2b(image.tobytes(), digest_size=DIGEST_BYTES).digest()


def digests_in(joined: bytes) -> frozenset[bytes]:
    """Return the digests in their concatenation."""
    return frozenset(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))


@dataclass(frozen=True)
class SeenPictures:
    """Digests of the pictures of a known class. learned: all it was trained on, exemplars included."""

    exemplars: frozenset[bytes] = frozenset()
    learned: frozenset[bytes] = frozenset()
    heldout: frozenset[bytes] = frozenset()

    @property
    def all(self) -> frozenset[bytes]:
        """Digests of all pictures that were given of the class, as far as the model knows."""
        return self.learned | self.heldout


@dataclass(frozen=True, eq=False)
class ClassSplit:
    """Rows of a class to learn from and to hold out, and digests of all pictures it was or will be trained on."""

    learned: np.ndarray
    heldout: np.ndarray
    digests: bytes


@final
class LessonSplit:
    """Division of a lesson's images into those to learn from and those to hold out.

    A picture that is held out, in any class, is never learned from. A picture that was learned before, or that is in
    two classes, is never held out.

    rows: rows of each class.
    """

    def __init__(self, model: Model, images: Tensor, rows: Mapping[Hashable, np.ndarray]) -> None:
        self._model = model
        self._seen = _seen_by(model)
        self._held = frozenset[bytes]().union(*(seen.heldout for seen in self._seen.values()))
        pixels = images.numpy()
        self._copies: dict[Hashable, dict[bytes, list[int]]] = {label: {} for label in rows}
        for label, own in rows.items():
            for row in own.tolist():
                self._copies[label].setdefault(digest_of(pixels[row]), []).append(row)
        self._labels = self._labels_of_pictures()

    def _labels_of_pictures(self) -> dict[bytes, list[Hashable]]:
        """Return the classes that contain each picture of the lesson, here or in the model."""
        labels: dict[bytes, list[Hashable]] = {picture: [] for copies in self._copies.values() for picture in copies}
        for label in dict.fromkeys([*self._seen, *self._copies]):
            known = self._seen[label].all if label in self._seen else frozenset()
            for picture in {*self._copies.get(label, ()), *(known & labels.keys())}:
                labels[picture].append(label)
        return labels

    def of(self, label: Hashable) -> ClassSplit:
        """Divide the images of a class.

        Copies of a picture are on the same side. Exemplars and pictures held out before are on neither, and no picture
        that is in the statistics of a method that keeps some. If the model was given some of these pictures before, it
        may have learned the others too, so none is held out.
        """
        config, copies, seen = self._model.config, self._copies[label], self._seen.get(label, SeenPictures())
        counted = seen.learned if self._model.method.keeps_statistics else seen.exemplars
        left_out = self._held | counted
        pictures = [picture for picture in copies if picture not in left_out]
        count = 0
        if config.validation and len(pictures) >= VALIDATION_LEAST and seen.all.isdisjoint(copies):
            wanted = max(1, math.floor(len(pictures) * config.validation + 0.5))
            count = max(0, min(wanted, VALIDATION_MOST - len(seen.heldout), len(pictures) - 1))
        order = stable_permutation(len(pictures), f"{config.seed}/{label!r}/{len(self._model.history)}")
        in_one_class = [pictures[number] for number in order if len(self._labels[pictures[number]]) == 1]
        held = set(in_one_class[:count])
        learned = [picture for picture in pictures if picture not in held]
        return ClassSplit(
            _rows(row for picture in learned for row in copies[picture]),
            _rows(copies[picture][0] for picture in held),
            b"".join(sorted(seen.learned.union(learned))),
        )

    def warning(self, names: Sequence[str] | None = None) -> str | None:
        """Return a warning about pictures that are in two classes, or None. names: of the images."""
        pairs: Counter[tuple[str, str]] = Counter()
        coming = set(self._copies)  # counts two classes of the lesson as one pair
        for label, copies in self._copies.items():
            coming.discard(label)
            for picture in copies:
                others = [other for other in self._labels[picture] if other != label]
                later = {other for other in others if other in coming and picture in self._copies[other]}
                pairs.update((str(label), str(other)) for other in others if other not in later)
        if not pairs:
            return None
        shared = [picture for picture, labels in self._labels.items() if len(labels) > 1]
        held = sum(picture in self._held for picture in shared)
        parts = [f"{held} held out before and not learned from"] if held else []
        parts += [f"{len(shared) - held} learned under each name and not held out"] if held < len(shared) else []
        found = [
            f"{count} image{'' if count == 1 else 's'} of {one!r} also in {other!r}"
            for (one, other), count in pairs.most_common(NAMED)
        ]
        more = f" and {len(pairs) - NAMED} more such pairs" if len(pairs) > NAMED else ""
        files = "" if names is None else f": {some([names[row] for row in self._rows_of(shared)], NAMED)}"
        return (
            f"the same pictures in two classes (a folder renamed?): {', '.join(found)}{more}; {', '.join(parts)}{files}"
        )

    def _rows_of(self, pictures: Iterable[bytes]) -> list[int]:
        """Return the rows of these pictures, in their order."""
        return sorted(
            row for picture in pictures for copies in self._copies.values() for row in copies.get(picture, ())
        )


def knows_all(model: Model, images: np.ndarray, labels: Sequence[Hashable]) -> bool:
    """Return whether the model was given every one of these images before, with the same label."""
    seen = _seen_by(model)
    return all(
        label in seen and digest_of(image) in seen[label].all for image, label in zip(images, labels, strict=True)
    )


def _seen_by(model: Model) -> dict[Hashable, SeenPictures]:
    """Return the pictures that the model has seen of each class."""
    memory = None if model.learner is None else model.learner.memory
    seen: dict[Hashable, SeenPictures] = {}
    for position, known in enumerate(model.classes):
        exemplars = _digests(memory, position)
        learned = exemplars | digests_in(known.digests)
        seen[known.label] = SeenPictures(exemplars, learned, _digests(model.heldout, position))
    return seen


def _digests(memory: Memory | None, position: int) -> frozenset[bytes]:
    if memory is None or position not in memory.labels:
        return frozenset()
    return frozenset(digest_of(image) for image in memory.of(position).images.numpy())


def _rows(rows: Iterable[int]) -> np.ndarray:
    return np.array(sorted(rows), dtype=np.int64)
