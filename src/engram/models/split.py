"""Choose which images of a lesson are learned from and which are held out to measure accuracy.

Pictures are compared by their pixels at the model's size, across all classes of the lesson and of the model. Groups of
pictures, such as near-duplicates, are within a class.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from engram.data.memory import Memory
from engram.data.store import some, stable_permutation
from engram.models.digests import digest_of, digests_in
from engram.models.hold_out import HoldOut, group_pictures
from engram.models.model import Model
from engram.models.model_config import VALIDATION_LEAST, VALIDATION_MOST

NAMED = 3  # pairs of classes, and files, in a warning


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
    two classes, is never held out. A group of pictures is held out or learned as a whole.

    images: of the lesson, followed by the held-out images given.
    rows: rows of each class to learn.
    """

    def __init__(
        self,
        model: Model,
        images: Tensor,
        rows: Mapping[Hashable, np.ndarray],
        hold_out: HoldOut | None = None,
    ) -> None:
        self._model = model
        self._hold_out = HoldOut() if hold_out is None else hold_out
        self._images = images.numpy()
        self._groups: list[tuple[int, Hashable]] = []  # sizes of the groups of more than one picture, and their classes
        self._undivided: list[Hashable] = []  # classes of which nothing is held out, because of their groups
        self._near_held = self._leaking = 0
        self._seen = _seen_by(model)
        self._held = frozenset[bytes]().union(*(seen.heldout for seen in self._seen.values()))
        self._copies: dict[Hashable, dict[bytes, list[int]]] = {label: {} for label in rows}
        for label, own in rows.items():
            for row in own.tolist():
                self._copies[label].setdefault(digest_of(self._images[row]), []).append(row)
        self._labels = self._labels_of_pictures()
        self._given: dict[Hashable, list[int]] = {}
        for row, label in enumerate(self._hold_out.labels, len(images) - len(self._hold_out.labels)):
            self._given.setdefault(label, []).append(row)

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
        groups = [[picture] for picture in pictures]
        apart = {picture for picture in pictures if len(self._labels[picture]) > 1}  # never held out
        if config.validation or seen.heldout or label in self._given:
            groups, near_held, near_learned = self._grouped(label, pictures)
            pictures = [picture for picture in pictures if picture not in near_held]
            groups = [group for group in groups if near_held.isdisjoint(group)]
            apart |= near_learned
        if self._hold_out.images is not None:
            rows = self._given_rows(label, pictures)
            held = set[bytes]()
        else:
            draws = config.validation and len(pictures) >= VALIDATION_LEAST and seen.all.isdisjoint(copies)
            if self._model.method.keeps_statistics and seen.learned:
                draws = False  # near-duplicates of what was learned are not kept, so they could not be recognised
            room = VALIDATION_MOST - len(seen.heldout)
            held = self._drawn(label, pictures, groups, apart, room) if draws and room > 0 else set[bytes]()
            rows = [copies[picture][0] for picture in held]
        learned = [picture for picture in pictures if picture not in held]
        return ClassSplit(
            _rows(row for picture in learned for row in copies[picture]),
            _rows(rows),
            b"".join(sorted(seen.learned.union(learned))),
        )

    def _drawn(
        self, label: Hashable, pictures: list[bytes], groups: list[list[bytes]], apart: set[bytes], room: int
    ) -> set[bytes]:
        """Draw groups to hold out until they have the wanted number of pictures, or up to half as many again.

        If all groups are larger, it is the smallest, unless it has more than half of the pictures.
        """
        config = self._model.config
        wanted = max(1, math.floor(len(pictures) * config.validation + 0.5))
        wanted = min(wanted, room, len(pictures) - 1)
        most = min(wanted + wanted // 2, room, len(pictures) - 1)
        order = stable_permutation(len(pictures), f"{config.seed}/{label!r}/{len(self._model.history)}")
        rank = {pictures[number]: place for place, number in enumerate(order)}
        whole = [group for group in groups if apart.isdisjoint(group)]
        whole.sort(key=lambda group: min(rank[picture] for picture in group))
        held: set[bytes] = set()
        for group in whole:
            if len(held) < wanted and len(held) + len(group) <= most:
                held.update(group)
        if not held and whole:
            smallest = min(whole, key=len)
            held.update(smallest if len(smallest) <= min(room, len(pictures) // 2) else ())
        if not held and whole:
            self._undivided.append(label)
        return held

    def _grouped(self, label: Hashable, pictures: list[bytes]) -> tuple[list[list[bytes]], set[bytes], set[bytes]]:
        """Return the pictures in groups, those with a held-out picture in their group, and those with an exemplar."""
        copies, keys = self._copies[label], self._hold_out.groups
        old = [self._old(memory, label) for memory in (self._model.heldout, _memory(self._model))]
        found = group_pictures(
            self._images[[copies[picture][0] for picture in pictures]],
            [[None if keys is None else keys[row] for row in copies[picture]] for picture in pictures],
            self._hold_out.near,
            old,
        )
        groups = [[pictures[position] for position in group] for group in found.groups]
        self._groups += [(len(group), label) for group in groups if len(group) > 1]
        near_held, near_learned = ({pictures[position] for position in near} for near in found.near_old)
        self._near_held += len(near_held)
        return groups, near_held, near_learned

    def _old(self, memory: Memory | None, label: Hashable) -> np.ndarray:
        if memory is None or label not in self._seen or (place := self._model.position(label)) not in memory.labels:
            return self._images[:0]
        return memory.of(place).pixels.numpy()

    def _given_rows(self, label: Hashable, pictures: list[bytes]) -> list[int]:
        """Return the rows of the held-out images given of a class, without those that are learned from."""
        given = self._given.get(label, [])
        learned = {*self._labels, *(picture for seen in self._seen.values() for picture in seen.learned)}
        rows = {digest_of(self._images[row]): row for row in given}
        rows = {picture: row for picture, row in rows.items() if picture not in learned and picture not in self._held}
        if rows and self._hold_out.near:
            first = self._images[[self._copies[label][picture][0] for picture in pictures]]
            found = group_pictures(self._images[list(rows.values())], [[] for _ in rows], near=True, old=[first])
            near = {list(rows)[position] for position in found.near_old[0]}
            rows = {picture: row for picture, row in rows.items() if picture not in near}
        self._leaking += len(given) - len(rows)
        return list(rows.values())

    def notes(self) -> list[str]:
        """Return what was grouped and left out, in sentences; complete after `of` every class."""
        notes: list[str] = []
        if self._groups:
            count, (most, label) = len(self._groups), max(self._groups, key=lambda group: group[0])
            what = "near-duplicates" if self._hold_out.groups is None else "images that belong together"
            notes.append(
                f"{what} are held out together or not at all: {sum(size for size, _ in self._groups)} images in "
                f"{count} group{'' if count == 1 else 's'} (the largest: {most} of {str(label)!r})"
            )
        if self._undivided:
            names = some(map(str, self._undivided))
            notes.append(f"no image is held out of {names}: too many of its images belong together")
        if self._near_held:
            many = "s" if self._near_held > 1 else ""
            notes.append(f"left out {self._near_held} near-duplicate{many} of held-out images")
        if self._leaking:
            notes.append(f"left out {self._leaking} of the images to hold out: they are, or resemble, images to learn")
        return notes

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
    memory = _memory(model)
    seen: dict[Hashable, SeenPictures] = {}
    for position, known in enumerate(model.classes):
        exemplars = _digests(memory, position)
        learned = exemplars | digests_in(known.digests)
        seen[known.label] = SeenPictures(exemplars, learned, _digests(model.heldout, position))
    return seen


def _memory(model: Model) -> Memory | None:
    return None if model.learner is None else model.learner.memory


def _digests(memory: Memory | None, position: int) -> frozenset[bytes]:
    if memory is None or position not in memory.labels:
        return frozenset()
    return frozenset(digest_of(image) for image in memory.of(position).pixels.numpy())


def _rows(rows: Iterable[int]) -> np.ndarray:
    return np.array(sorted(rows), dtype=np.int64)
