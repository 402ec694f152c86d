"""Decide what a lesson learns: which images are left out because the model knows them, and what to warn about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram.core.errors import EngramError, option
from engram.core.events import Warned
from engram.data.store import Images, some
from engram.models.model_config import VALIDATION_LEAST
from engram.models.split import knows_all
from engram.models.store.codec import open_model

COMPARED = 4096  # images at a time to compare with those the model was given before

ReadRows = Callable[[range], tuple[Images, Sequence[int]]]


@dataclass(frozen=True)
class LessonNotice(Warned):
    """A warning of its own type. In files it is an ordinary warning."""

    @property
    def name(self) -> str:
        """The event's name in files."""
        return "warned"


@dataclass(frozen=True)
class SimilarLabels(LessonNotice):
    """Labels that differ only in type, case or spaces are different classes."""


@dataclass(frozen=True)
class LearningResumed(LessonNotice):
    """Learning continues from a checkpoint."""

    message: str = "learning continues from its checkpoint"


@dataclass(frozen=True)
class LessonPlan:
    """The decisions about the images given to a lesson.

    Parameters
    ----------
    rows: images to learn from; none if the model was given all of them before.
    left_out: known classes whose images are left out.
    learned_before: classes of the images, if the model was given all of them before.
    """

    rows: list[int]
    left_out: list[Hashable]
    learned_before: list[Hashable]


def plan_lesson(
    path: str | Path, labels: Sequence[Hashable], known: Iterable[Hashable], read: ReadRows, more_of_known: bool = False
) -> LessonPlan:
    """Plan a lesson for the model at that path; refuse one with new images of known classes only.

    Parameters
    ----------
    known: labels of the classes that the model knows.
    read: reads the images of these rows; returns them and the rows that could be read.
    more_of_known: learn known classes again, from these images and their exemplars.
    """
    known = set(known)
    if more_of_known or known.isdisjoint(labels):
        return LessonPlan(list(range(len(labels))), [], [])
    rows = [row for row, label in enumerate(labels) if label not in known]
    left_out = sorted({label for label in labels if label in known}, key=str)
    if rows:
        return LessonPlan(rows, left_out, [])
    if before := _learned_before(path, labels, read):
        return LessonPlan([], [], before)
    raise EngramError(
        f"there is nothing to learn: the model knows {some(map(str, left_out))} already; "
        f"{option('more_of_known', True)} learns known classes again, from these images and their exemplars"
    )


def _learned_before(path: str | Path, labels: Sequence[Hashable], read: ReadRows) -> list[Hashable]:
    """Return the classes of the images if the model was given all of them before, else nothing."""
    model, _ = open_model(path, "cpu")
    found: dict[Hashable, None] = {}
    for start in range(0, len(labels), COMPARED):
        images, rows = read(range(start, min(start + COMPARED, len(labels))))
        own = [labels[row] for row in rows]
        if not knows_all(model, images, own):
            return []
        found.update(dict.fromkeys(own))
    return list(found)


@dataclass(frozen=True)
class LabelConcerns:
    """Possible mistakes in the labels of a lesson.

    Parameters
    ----------
    unlike_known: new labels that are text, if all known labels are not.
    is_single_class: the model will know only one class.
    few_images: number of images of each class that has too few to hold any out.
    """

    unlike_known: Sequence[Hashable]
    is_single_class: bool
    few_images: dict[Hashable, int]

    @classmethod
    def find(cls, labels: Iterable[Hashable], known: Sequence[Hashable]) -> LabelConcerns:
        """Look for mistakes in the labels of the images to learn."""
        counts = Counter(labels)
        no_text = bool(known) and not any(isinstance(label, str) for label in known)
        unlike = [label for label in counts if isinstance(label, str) and label not in known] if no_text else []
        few = {label: count for label, count in counts.items() if count < VALIDATION_LEAST}
        return cls(unlike, not known and len(counts) == 1, few)
