"""Which images of a lesson are learned from and which are held out, to measure accuracy on.

Pictures are compared by their pixels as the model has them, across all classes of the lesson and of the model.
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
from engram.data.store import stable_permutation
from engram.models.model import Model
from engram.models.model_config import VALIDATION_LEAST, VALIDATION_MOST

DIGEST_BYTES = 8
NAMED = 3  # pairs of classes in a notice


def digest_of(image: np.ndarray) -> bytes:
    """A few bytes that tell the picture from any other."""
    return hashlib.blake2b(image.tobytes(), digest_size=DIGEST_BYTES).digest()


def digests_in(joined: bytes) -> frozenset[bytes]:
    """The digests that stand one behind the other."""
    return frozenset(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))


@dataclass(frozen=True)
class Kept:
    """The pictures of a class that the model knows; learned: those it was trained on, the exemplars among them."""

    exemplars: frozenset[bytes] = frozenset()
    learned: frozenset[bytes] = frozenset()
    heldout: frozenset[bytes] = frozenset()

    @property
    def seen(self) -> frozenset[bytes]:
        """All of them."""
        return self.learned | self.heldout


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of a class to learn and to measure on, and the digests of all that it was or will be trained on."""

    learned: np.ndarray
    heldout: np.ndarray
    digests: bytes


@final
class Split:
    """The images of a lesson, to be learned or held out; rows: those of each class.

    A picture that is held out, under whatever name, is not learned. One that was learned, or has two names, is not held
    out.
    """

    def __init__(self, model: Model, images: Tensor, rows: Mapping[Hashable, np.ndarray]) -> None:
        self._model = model
        self._kept = _kept_by(model)
        self._held = frozenset[bytes]().union(*(kept.heldout for kept in self._kept.values()))
        pixels = images.numpy()
        self._copies: dict[Hashable, dict[bytes, list[int]]] = {label: {} for label in rows}
        for label, own in rows.items():
            for row in own.tolist():
                self._copies[label].setdefault(digest_of(pixels[row]), []).append(row)
        self._names = self._names_of_pictures()

    def _names_of_pictures(self) -> dict[bytes, list[Hashable]]:
        """The classes that each picture of the lesson is in, here or in the model."""
        names: dict[bytes, list[Hashable]] = {picture: [] for copies in self._copies.values() for picture in copies}
        for label in dict.fromkeys([*self._kept, *self._copies]):
            known = self._kept[label].seen if label in self._kept else frozenset()
            for picture in {*self._copies.get(label, ()), *(known & names.keys())}:
                names[picture].append(label)
        return names

    def of(self, label: Hashable) -> Part:
        """What to do with the images of a class.

        Copies of a picture are on one side, and exemplars and pictures held out before on neither. Where it was given
        some of these pictures before, the others may have been learned too, and none of them is held out.
        """
        config, copies, kept = self._model.config, self._copies[label], self._kept.get(label, Kept())
        left_out = self._held | kept.exemplars
        pictures = [picture for picture in copies if picture not in left_out]
        count = 0
        if config.validation and len(pictures) >= VALIDATION_LEAST and kept.seen.isdisjoint(copies):
            share = max(1, math.floor(len(pictures) * config.validation + 0.5))
            count = max(0, min(share, VALIDATION_MOST - len(kept.heldout), len(pictures) - 1))
        order = stable_permutation(len(pictures), f"{config.seed}/{label!r}/{len(self._model.history)}")
        alone = [pictures[number] for number in order if len(self._names[pictures[number]]) == 1]
        held = set(alone[:count])
        learned = [picture for picture in pictures if picture not in held]
        return Part(
            _rows(row for picture in learned for row in copies[picture]),
            _rows(copies[picture][0] for picture in held),
            b"".join(sorted(kept.learned.union(learned))),
        )

    def notice(self) -> str | None:
        """What is done with pictures that have two names, where there are some."""
        pairs: Counter[tuple[str, str]] = Counter()
        coming = set(self._copies)  # so that two classes of the lesson are one pair
        for label, copies in self._copies.items():
            coming.discard(label)
            for picture in copies:
                others = [other for other in self._names[picture] if other != label]
                later = {other for other in others if other in coming and picture in self._copies[other]}
                pairs.update((str(label), str(other)) for other in others if other not in later)
        if not pairs:
            return None
        shared = [picture for picture, names in self._names.items() if len(names) > 1]
        held = sum(picture in self._held for picture in shared)
        parts = [f"{held} held out before and not learned from"] if held else []
        parts += [f"{len(shared) - held} learned under each name and not held out"] if held < len(shared) else []
        told = [f"{_images(count)} of {one!r} also in {other!r}" for (one, other), count in pairs.most_common(NAMED)]
        more = f" and {len(pairs) - NAMED} more such pairs" if len(pairs) > NAMED else ""
        return f"the same pictures in two classes (a folder renamed?): {', '.join(told)}{more}; {', '.join(parts)}"


def knows_all(model: Model, images: np.ndarray, labels: Sequence[Hashable]) -> bool:
    """Whether the model was given every one of these images before, under its label, to learn from or to hold out."""
    kept = _kept_by(model)
    return all(
        label in kept and digest_of(image) in kept[label].seen for image, label in zip(images, labels, strict=True)
    )


def _kept_by(model: Model) -> dict[Hashable, Kept]:
    """What the model knows of each class."""
    memory = None if model.learner is None else model.learner.memory
    kept: dict[Hashable, Kept] = {}
    for place, known in enumerate(model.classes):
        exemplars = _digests(memory, place)
        kept[known.label] = Kept(exemplars, exemplars | digests_in(known.digests), _digests(model.heldout, place))
    return kept


def _digests(memory: Memory | None, place: int) -> frozenset[bytes]:
    if memory is None or place not in memory.labels:
        return frozenset()
    return frozenset(digest_of(image) for image in memory.of(place).images.numpy())


def _rows(rows: Iterable[int]) -> np.ndarray:
    return np.array(sorted(rows), dtype=np.int64)


def _images(count: int) -> str:
    return f"{count} image{'' if count == 1 else 's'}"
