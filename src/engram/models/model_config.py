"""ModelConfig: what determines how a model learns, chosen once and saved with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from engram.contract import MethodInfo, Settings
from engram.core.errors import EngramError
from engram.core.serialize import differences, from_plain, replace_at, to_plain
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.experiment.recipes import recipe
from engram.experiment.run_config import Device, Precision, RunConfig, refuse_no_epochs
from engram.methods import METHODS, find_method

LARGEST_SIDE = 1024
LARGEST_NUMBER = 2**63
VALIDATION_MOST = 50
VALIDATION_LEAST = 5  # images of a class: of fewer all are learned from
LATER_LEAST = 10
_MAIN = ("train", "rehearse")  # rehearse: in the place of train, in the lessons after the first


@dataclass(frozen=True)
class ModelConfig:
    """How a model learns.

    image_size: height and width in pixels. validation: the share of each class's images, VALIDATION_MOST at most and
    of fewer than VALIDATION_LEAST none, that is held out to measure accuracy on, now and after later learning; they are
    kept in the model. epochs_given: the settings' epochs were asked for, and are those of every lesson.
    """

    method: str
    settings: Settings
    image_size: tuple[int, int]
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    backbone: str = "resnet32"
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 1
    validation: float = 0.0
    epochs_given: bool = False

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            _check_kind(name, getattr(self, name), *kinds)
        if len(self.image_size) != 2 or not all(8 <= side <= LARGEST_SIDE for side in self.image_size):
            shown = "x".join(map(str, self.image_size))
            raise EngramError(f"images must have 8 to {LARGEST_SIDE} pixels on each side, got {shown}")
        if not 0 <= self.validation < 1:
            raise EngramError(f"validation must be a share of 0 or more and below 1, got {self.validation}")
        if self.augmentation.view is not None:
            raise EngramError(f"a model sees its images whole; leave view={self.augmentation.view} out")
        if self.augmentation.pad > max(self.image_size):
            raise EngramError(f"the crop padding must be no more than the image, got {self.augmentation.pad} pixels")
        self._as_run()  # which checks the rest
        _refuse_too_large(self.to_plain())

    def _as_run(self, device: Device = "cpu", precision: Precision = "auto") -> RunConfig:
        return RunConfig(
            method=self.method,
            settings=self.settings,
            seed=self.seed,
            memory=self.memory,
            backbone=self.backbone,
            augmentation=self.augmentation,
            predictor=find_method(self.method).predictors[0],
            device=device,
            precision=precision,
        )

    def place(
        self, device: Device, precision: Precision
    ) -> tuple[Literal["cpu", "cuda"], Literal["float32", "tf32", "bf16"]]:
        """The device and precision that "auto" stands for on this machine; refuses what it cannot do."""
        return self._as_run(device, precision).place()

    def with_epochs(self, epochs: int | None) -> ModelConfig:
        """The same with another number of epochs; the phases after the main one keep their share."""
        if epochs is None:
            return self
        epochs = plain(epochs)
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise EngramError(f"epochs must be a whole number of 1 or more, got {epochs!r}")
        return replace(self, settings=_with_epochs(self.settings, epochs))

    def lesson_epochs(self, images: int, device: Device) -> int | None:
        """The epochs of a later lesson of so many images, exemplars included; None: the settings' own, once given."""
        return None if self.epochs_given else fitting_epochs(images, self.image_size, device)

    def lesson_settings(self, epochs: int | None) -> Settings:
        """The settings of a lesson of so many epochs (None: the configuration's own).

        A phase after the main one, where there is one, has LATER_LEAST epochs: it is short, and with a few of them the
        scores of old classes stay far below those of new ones.
        """
        settings = self.with_epochs(epochs).settings
        for name in _phases(settings):
            training = getattr(settings, name)
            if name not in _MAIN and 0 < training.epochs < LATER_LEAST:
                settings = replace(settings, **{name: replace(training, epochs=LATER_LEAST)})
        return settings

    def to_plain(self) -> dict[str, Any]:
        """The configuration as plain data."""
        return to_plain(self)

    @classmethod
    def from_plain(cls, data: Any) -> ModelConfig:
        """The configuration that plain data describes."""
        if not isinstance(data, dict) or not isinstance(data.get("method"), str):
            raise EngramError("a model's configuration must name its method")
        settings = from_plain(find_method(data["method"]).settings, data.get("settings", {}), "settings")
        return from_plain(cls, {**data, "settings": settings})

    @classmethod
    def choose(
        cls,
        method: str = "afc",
        *,
        image_size: int | tuple[int, int],
        images: int,
        epochs: int | None = None,
        memory: MemoryConfig | int | str | None = None,
        backbone: str | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
        augmentation: Augmentation | None = None,
        seed: int = 1,
        validation: float = 0.0,
        device: Device = "auto",
    ) -> ModelConfig:
        """A configuration for so many images of that size; what is not given is chosen.

        memory: exemplars a class, or as `MemoryConfig.parse` reads it. settings: the method's own, or some of them by
        dotted path (`{"train.lr": 0.05}`). NumPy's numbers are taken for Python's.
        """
        _check_kind("method", method, str)
        start = recipe(f"{find_method(method).name}-folder")
        size = as_size(image_size)
        chosen = settings if isinstance(settings, Settings) else _fitted(start, images, size, device)
        if not isinstance(settings, Settings | None):
            _check_kind("settings", settings, Mapping)
            for path, value in settings.items():
                chosen = replace_at(chosen, str(path).replace("__", "."), plain(value))
        refuse_no_epochs(chosen)
        config = cls(
            method=method,
            settings=chosen,
            image_size=size,
            memory=_memory(plain(memory), start.memory, find_method(method)),
            backbone=("resnet10" if max(size) <= 24 else "resnet32") if backbone is None else backbone,
            augmentation=_default_augmentation(size) if augmentation is None else augmentation,
            seed=plain(seed),
            validation=plain(validation),
            epochs_given=_names_epochs(settings),
        )
        return config.with_epochs(epochs)


_KINDS: dict[str, tuple[type, ...]] = {
    "backbone": (str,),
    "augmentation": (Augmentation,),
    "seed": (int,),
    "validation": (float, int),
}


def _check_kind(name: str, value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = {str: "a name", int: "a whole number", float: "a number", Mapping: "a dictionary by dotted path"}
        kind = wanted.get(kinds[0], f"of the kind {kinds[0].__name__}")
        raise EngramError(f"{name} must be {kind}, got {value!r:.60}")


def _refuse_too_large(value: Any) -> None:
    """Refuses numbers that a model's file cannot have."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_too_large(item)
    elif isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
        raise EngramError(f"{value} is larger than any number of a model may be (2^63 - 1)")


def plain(value: Any) -> Any:
    """A number of NumPy's as Python's; all else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def as_size(given: Any) -> tuple[int, int]:
    """Height and width, of both or of the one side of a square."""
    sides = [plain(side) for side in (given if isinstance(given, (tuple, list, np.ndarray)) else (given, given))]
    if len(sides) != 2 or not all(
        isinstance(side, int) and not isinstance(side, bool) and 8 <= side <= LARGEST_SIDE for side in sides
    ):
        raise EngramError(
            f"image_size must be a side or (height, width) of 8 to {LARGEST_SIDE} whole pixels, got {given!r:.60}"
        )
    return sides[0], sides[1]


def _default_augmentation(size: tuple[int, int]) -> Augmentation:
    return Augmentation(pad=max(1, round(min(size) / 8)))


def short(value: Any, method: str, image_size: int | tuple[int, int] | None) -> Any:
    """What can be given to `choose` instead of the value and says the same; None where it would choose just that.

    Of memory, settings and augmentation; all else, and what does not fit the method, is returned as it is.
    """
    if method not in METHODS:
        return value
    info, start = find_method(method), recipe(f"{method}-folder")
    if isinstance(value, MemoryConfig):
        if value.selection != info.selection and value != start.memory:
            return value
        usual = value == start.memory and value.budget != "per_class"
        return MemoryConfig().size if usual else value.size if value.budget == "per_class" else str(value)
    if isinstance(value, Settings) and type(value) is type(start.settings):
        return differences(start.settings, value) or None
    if isinstance(value, Augmentation) and image_size is not None:
        return None if value == _default_augmentation(as_size(image_size)) else value
    return value


def _memory(given: MemoryConfig | int | str | None, default: MemoryConfig, method: MethodInfo) -> MemoryConfig:
    if given is None:
        return default
    if isinstance(given, str):
        return MemoryConfig.parse(given, method.selection)
    if isinstance(given, int) and not isinstance(given, bool):
        if method.memory in ("none", "all"):
            return default  # what the method is defined with
        return MemoryConfig("per_class", given, method.selection)
    if isinstance(given, MemoryConfig):
        return given
    raise EngramError(f"the memory must be a number of exemplars a class, a text or a MemoryConfig, got {given!r}")


def _names_epochs(settings: Settings | Mapping[str, Any] | None) -> bool:
    """Whether the settings say how long to train: all of them do, and some of them where the epochs are among them."""
    if isinstance(settings, Mapping):
        return any(str(path).replace("__", ".") in ("train.epochs", "rehearse.epochs") for path in settings)
    return settings is not None


def fitting_epochs(images: int, size: tuple[int, int], device: Device) -> int:
    """The epochs that so many images of that size are learned in if nobody says: on a CPU less the more there are."""
    place, _ = replace(recipe("afc-folder"), device=device, precision="auto").place()
    work = images * max(1.0, size[0] * size[1] / 32**2)
    return 60 if place == "cuda" else min(60, max(15, round(120_000 / max(1, work))))


def _fitted(start: RunConfig, images: int, size: tuple[int, int], device: Device) -> Settings:
    """The recipe's settings with batches that a small set fills, and on a CPU with less epochs for a large one."""
    settings, batch = start.settings, 128
    while batch > 16 and images < 20 * batch:
        batch //= 2
    for phase in _phases(settings):
        training = replace(getattr(settings, phase), batch_size=min(batch, getattr(settings, phase).batch_size))
        settings = replace(settings, **{phase: training})
    return _with_epochs(settings, fitting_epochs(images, size, device))


def _phases(settings: Settings) -> list[str]:
    return [name for name in ("train", "finetune", "rehearse", "correction") if hasattr(settings, name)]


def _with_epochs(settings: Settings, epochs: int) -> Settings:
    main = getattr(settings, "train", None)
    if main is None:
        return settings
    for name in _phases(settings):
        training = getattr(settings, name)
        share = training.epochs / max(1, main.epochs)
        count = epochs if name in _MAIN else math.ceil(epochs * share)
        settings = replace(settings, **{name: replace(training, epochs=count)})
    return settings
