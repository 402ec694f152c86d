"""Records of a model: its classes and its lessons."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime


@dataclass(frozen=True)
class KnownClass:
    """A class that a model knows.

    stage: index in the model's history of the lesson that taught it.
    images: number of images it was trained on in that lesson.
    accuracy: percent of its held-out images, by predictor; empty without held-out images.
    digests: concatenated digests of all images it was ever trained on; empty in models of early versions.
    """

    label: Hashable
    stage: int
    images: int
    accuracy: dict[str, float] = field(default_factory=dict)
    digests: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class LessonRecord:
    """An entry of a model's history: a lesson ("learned"), the removal of a class ("removed"), two classes that became
    one ("merged"), or images that are of another class now ("moved").

    images: number of images given, or moved.
    before, after: accuracy on the classes known before and not learned again, in percent, by predictor.
    new: accuracy on all classes of the lesson.
    classes: number of classes of the lesson; 0 if an early version did not record it.
    refreshed_before, refreshed_after: accuracy on the classes learned again, both on the images held out after it.
        These accuracies are balanced: means over classes.
    plain: the same accuracies of all images, by the names of these fields. heldout: number of held-out images of the
        classes of "after", "new" and "refreshed_after". Both are empty if an early version did not record them.
    """

    what: str
    date: str
    images: int = 0
    epochs: int = 0
    seconds: float = 0.0
    device: str = ""
    precision: str = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    new: dict[str, float] = field(default_factory=dict)
    classes: int = 0
    refreshed_before: dict[str, float] = field(default_factory=dict)
    refreshed_after: dict[str, float] = field(default_factory=dict)
    plain: dict[str, dict[str, float]] = field(default_factory=dict)
    heldout: dict[str, int] = field(default_factory=dict)


def current_time() -> str:
    """Return the time of now, as the history records it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
