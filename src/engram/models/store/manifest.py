"""Manifest: the content of model.json, with the type and range of every value checked."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from engram.contract.settings import check_fields, setting
from engram.core.errors import EngramError
from engram.core.provenance import versions
from engram.core.serialize import to_plain
from engram.data.memory import Memory
from engram.models.calibration import COLDEST, HOTTEST
from engram.models.digests import DIGEST_BYTES
from engram.models.history import KnownClass, LessonRecord
from engram.models.labels import decode_label, encode_label
from engram.models.model import Model
from engram.models.model_config import ModelConfig
from engram.runs.checked import Source, checked

MOST_CLASSES, MOST_IMAGES = 30_000, 10**9


def _count() -> Any:
    return setting(at_least=0, at_most=MOST_IMAGES)


@dataclass(frozen=True, kw_only=True)
class ClassEntry:
    """A class as model.json lists it: the label as JSON, the number of pictures kept, the digests in base64."""

    label: Any
    stage: int = _count()
    images: int = _count()
    exemplars: int = _count()
    heldout: int = _count()
    accuracy: dict[str, float]
    digests: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def to_known(self) -> KnownClass:
        """Return the class with its label and digests decoded."""
        try:
            label = decode_label(self.label)
        except EngramError as error:
            raise EngramError(f"a label cannot be read: {error}") from None
        return KnownClass(label, self.stage, self.images, self.accuracy, decode_digests(self.digests))


def decode_digests(text: str) -> bytes:
    """Return the digests in a text in base64."""
    try:
        digests = b64decode(text, validate=True)
    except ValueError:
        raise EngramError("the digests of its images cannot be read") from None
    if len(digests) % DIGEST_BYTES:
        raise EngramError("the digests of its images cannot be read")
    return digests


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of model.json, without its format and its list of files.

    mean, std: normalisation of the three channels. learned_heldout: digests of the held-out images that the head has
    learned after they measured it, in base64. versions: of the packages that the model was written with.
    """

    config: ModelConfig
    predictors: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[ClassEntry, ...]
    stage_sizes: tuple[int, ...]
    temperatures: dict[str, float] = field(default_factory=dict)
    learned_heldout: str = ""
    history: tuple[LessonRecord, ...]
    versions: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("standard deviation", self.std)):
            if len(values) != 3 or not all(abs(value) < 1e6 for value in values):
                raise EngramError(f"the {name} is {values!r:.60} and should be three numbers")
        if min(self.std) <= 0:
            raise EngramError(f"the standard deviation {min(self.std)} is not above 0")
        if len(self.classes) > MOST_CLASSES:
            raise EngramError(f"it lists {len(self.classes)} classes, and a model has {MOST_CLASSES} at most")
        if len({known.label for known in self.known_classes()}) != len(self.classes):
            raise EngramError("it lists a class twice")
        if any(size < 0 for size in self.stage_sizes) or sum(self.stage_sizes) != len(self.classes):
            raise EngramError(f"the sizes of the stages do not add up to its {len(self.classes)} classes")
        if any(known.stage >= len(self.history) for known in self.classes):
            raise EngramError("it has a class of a lesson that is not in its history")
        decode_digests(self.learned_heldout)
        if not all(COLDEST <= value <= HOTTEST for value in self.temperatures.values()):
            raise EngramError(f"a temperature is not between {COLDEST} and {HOTTEST}")

    @classmethod
    def of(cls, model: Model) -> Self:
        """Describe a model; refuse a label that JSON cannot hold."""
        memory = None if model.learner is None else model.learner.memory
        mean, std = model.normalisation
        return cls(
            config=model.config,
            predictors=model.predictors,
            mean=mean,
            std=std,
            classes=tuple(
                ClassEntry(
                    label=encode_label(known.label),
                    stage=known.stage,
                    images=known.images,
                    exemplars=_number_kept(memory, position),
                    heldout=_number_kept(model.heldout, position),
                    accuracy=known.accuracy,
                    digests=b64encode(known.digests).decode(),
                )
                for position, known in enumerate(model.classes)
            ),
            stage_sizes=model.sizes,
            temperatures=model.temperatures,
            learned_heldout=b64encode(model.learned_heldout).decode(),
            history=model.history,
            versions=versions(),
        )

    @classmethod
    def read(cls, data: dict[str, Any], path: Path) -> Self:
        """Read the JSON of a model.json; refuse a value of another type or outside its range. path: for messages."""
        try:
            config = ModelConfig.from_plain(data.get("config"))
        except EngramError as error:
            raise EngramError(f"this version cannot use the configuration in {path}: {error}") from None
        source = Source(path, "restore it from a copy of the model", "is damaged")
        return checked(cls, {**data, "config": config}, source)

    def to_plain(self) -> dict[str, Any]:
        """Return the manifest as plain data.

        Empty values that early versions do not know are left out.
        """
        history = [
            {
                name: value
                for name, value in entry.items()
                if value or not name.startswith(("refreshed_", "plain", "heldout"))
            }
            for entry in to_plain(self.history)
        ]
        plain = to_plain(self) | {"history": history}
        return {name: value for name, value in plain.items() if value or name != "learned_heldout"}

    def known_classes(self) -> tuple[KnownClass, ...]:
        """Return the classes with their labels and digests decoded."""
        return tuple(entry.to_known() for entry in self.classes)

    def rename(self, old: Hashable, new: Hashable) -> Self:
        """Return a copy in which a class has another label."""
        classes = tuple(
            replace(entry, label=encode_label(new)) if decode_label(entry.label) == old else entry
            for entry in self.classes
        )
        return replace(self, classes=classes)


def _number_kept(memory: Memory | None, label: int) -> int:
    return len(memory.of(label)) if memory is not None and label in memory.labels else 0
