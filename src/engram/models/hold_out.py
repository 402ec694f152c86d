"""HoldOut: which images of a lesson stay together, and images given to measure accuracy instead of drawn ones."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from engram.core.errors import EngramError
from engram.models.near_duplicates import Details, DisjointSets


@dataclass(frozen=True, eq=False)
class HoldOut:
    """How the held-out images of a lesson are chosen.

    groups: a key for each image. Images of a class with equal keys are all held out or all learned; None is alone.
    near: near-duplicates stay together, too.
    images, labels: held-out images; None draws a share of the lesson's images.
    """

    groups: Sequence[Hashable | None] | None = None
    near: bool = True
    images: np.ndarray | None = None
    labels: Sequence[Hashable] = ()

    def check(self, images: np.ndarray) -> None:
        """Refuse groups that are not one for each image, and held-out images of another shape."""
        if self.groups is not None and len(self.groups) != len(images):
            raise EngramError(f"{len(images)} images need {len(images)} groups, got {len(self.groups)}")
        if self.images is not None and self.images.shape[1:] != images.shape[1:]:
            raise EngramError("the held-out images must have the size of the images to learn")

    def with_given(self, images: np.ndarray) -> np.ndarray:
        """Return the images of the lesson, followed by the held-out images given."""
        return images if self.images is None else np.concatenate([images, self.images])

    def digest(self) -> str:
        """Return a digest of everything but the pixels; empty for the default."""
        if self.groups is None and self.near and self.images is None:
            return ""
        text = repr((self.groups and list(map(repr, self.groups)), self.near, list(map(repr, self.labels))))
        return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class PictureGroups:
    """Pictures of a class in groups that must not be divided, by the positions of the pictures.

    near_old: positions of pictures that are in a group with one of the old pictures, for each kind of these.
    """

    groups: list[list[int]]
    near_old: list[set[int]]


def group_pictures(
    pictures: np.ndarray, keys: Sequence[Sequence[Hashable | None]], near: bool, old: Sequence[np.ndarray]
) -> PictureGroups:
    """Group the pictures (N, H, W, 3) of a class.

    keys: of the copies of each picture. near: also group near-duplicates. old: kinds of pictures that the model keeps.
    """
    sets = DisjointSets(len(pictures) + sum(map(len, old)))
    first_with: dict[Hashable, int] = {}
    for position, of_copies in enumerate(keys):
        for key in of_copies:
            if key is not None:
                sets.join(first_with.setdefault(key, position), position)
    if near:
        for one, other in Details(np.concatenate([pictures, *old])).pairs():
            sets.join(one, other)
    groups: dict[int, list[int]] = {}
    for position in range(len(pictures)):
        groups.setdefault(sets.find(position), []).append(position)
    near_old: list[set[int]] = []
    first = len(pictures)
    for kind in old:
        roots = {sets.find(position) for position in range(first, first + len(kind))}
        near_old.append({position for root in roots for position in groups.get(root, ())})
        first += len(kind)
    return PictureGroups(list(groups.values()), near_old)
