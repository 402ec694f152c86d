"""ModelConfig: how a model learns, chosen once and saved with the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engram.contract import MethodInfo, Settings
from engram.contract.settings import MAIN_ROLES, TRAINING_ROLES, SettingsT, change_training, with_role
from engram.core.errors import EngramError, option
from engram.core.serialize import ADDED, differences, replace_at
from engram.data.augment import Augmentation
from engram.data.memory import RESERVOIR, MemoryConfig
from engram.experiment.learner_config import Device, LearnerConfig, refuse_no_epochs, resolve_device, take_weights
from engram.experiment.recipes import recipe
from engram.methods import METHODS, find_method
from engram.methods.defaults import DEFAULT_METHOD
from engram.nn.pretrained import PretrainedWeights
from engram.nn.weights_catalogue import KNOWN

LARGEST_SIDE = 1024
LARGEST_NUMBER = 2**63
VALIDATION_MOST = 50
VALIDATION_LEAST = 5  # no image is held out of a class with fewer images
LATER_LEAST = 10  # epochs of a phase after the main one


@dataclass(frozen=True)
class ModelConfig(LearnerConfig):
    """How a model learns.

    image_size: height and width in pixels.
    validation: fraction of each class's images that is held out to measure accuracy, now and after later lessons. At
        most VALIDATION_MOST images, and none of a class with fewer than VALIDATION_LEAST. The model keeps them.
    epochs_given: the user chose the epochs in the settings, so every lesson uses them.
    weights: pretrained weights that the network starts from.
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
    weights: PretrainedWeights | None = field(default=None, metadata={ADDED: True})

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            _check_kind(name, getattr(self, name), *kinds)
        if len(self.image_size) != 2 or not all(8 <= side <= LARGEST_SIDE for side in self.image_size):
            shown = "x".join(map(str, self.image_size))
            raise EngramError(f"images must have 8 to {LARGEST_SIDE} pixels on each side, got {shown}")
        if not 0 <= self.validation < 1:
            raise EngramError(f"validation must be a fraction of 0 or more and below 1, got {self.validation}")
        if self.augmentation.view is not None:
            raise EngramError(f"a model sees its images whole; leave view={self.augmentation.view} out")
        if self.augmentation.pad > max(self.image_size):
            raise EngramError(f"the crop padding must be no more than the image, got {self.augmentation.pad} pixels")
        self.check_learner()
        if self.memory.selection == RESERVOIR:
            raise EngramError(
                "a reservoir is for runs; a model keeps exemplars of every class: choose another selection"
            )
        _refuse_too_large(self.to_plain())

    def with_epochs(self, epochs: int | None) -> ModelConfig:
        """Return a copy with another number of epochs; the phases after the main one keep their ratio to it."""
        if epochs is None:
            return self
        epochs = plain_number(epochs)
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise EngramError(f"epochs must be a whole number of 1 or more, got {epochs!r}")
        return replace(self, settings=_with_epochs(self.settings, epochs))

    def lesson_epochs(self, images: int, device: Device) -> int | None:
        """Return the epochs of a later lesson; None means those in the settings, because the user chose them.

        images: number of images to train on, exemplars included.
        """
        return None if self.epochs_given else default_epochs(images, self.image_size, device)

    def lesson_settings(self, epochs: int | None) -> Settings:
        """Return the settings for a lesson of that many epochs; None means the epochs of the configuration.

        A phase after the main one gets at least LATER_LEAST epochs. It is short, and with only a few epochs the scores
        of old classes stay far below those of new ones.
        """
        settings = self.with_epochs(epochs).settings
        for role in TRAINING_ROLES:
            for training in with_role(settings, role).values():
                if role not in MAIN_ROLES and 0 < training.epochs < LATER_LEAST:
                    settings = change_training(settings, (role,), epochs=LATER_LEAST)
        return settings

    def changed_by(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of this configuration that these arguments of `choose` would change.

        Settings and epochs are not compared.
        """
        ours = {name: getattr(self, name) for name in _COMPARED} | {
            "flip": self.augmentation.flip,
            "augment": self.augmentation.policy,
        }
        theirs = {name: plain_number(value) for name, value in wanted.items() if name in ours}
        if "image_size" in theirs:
            theirs["image_size"] = as_size(theirs["image_size"])
        if isinstance(theirs.get("weights"), str | Path):
            theirs["weights"] = self._same_weights(theirs["weights"])
        if not isinstance(theirs.get("memory", self.memory), MemoryConfig):
            memory = _memory(theirs["memory"], self.memory, find_method(self.method))
            theirs["memory"] = replace(memory, selection=self.memory.selection)
        changed = {name: ours[name] for name, value in theirs.items() if value != ours[name]}
        if "weights" in changed:
            changed["weights"] = "" if self.weights is None else self.weights.name
        if "image_size" in changed and len(set(self.image_size)) == 1:
            changed["image_size"] = self.image_size[0]
        return changed

    def _same_weights(self, given: str | Path) -> PretrainedWeights | str:
        """Return the weights of that file; of a name, the model's own if they have it, else the name."""
        if self.weights is not None and str(given) == self.weights.name:
            return self.weights
        return str(given) if str(given) in KNOWN else take_weights(given, self.backbone)

    @classmethod
    def choose(
        cls,
        method: str = DEFAULT_METHOD,
        *,
        image_size: int | tuple[int, int],
        images: int,
        epochs: int | None = None,
        memory: MemoryConfig | int | str | None = None,
        backbone: str | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
        augmentation: Augmentation | None = None,
        flip: bool | None = None,
        augment: str | None = None,
        seed: int = 1,
        validation: float = 0.0,
        weights: str | Path | PretrainedWeights | None = None,
        device: Device = "auto",
    ) -> ModelConfig:
        """Choose a configuration for that many images of that size.

        Parameters
        ----------
        memory: exemplars per class, or text as for `MemoryConfig.parse`.
        settings: of the method, or some of them by dotted path (`{"train.lr": 0.05}`).
        flip: mirror images in training; None: as the augmentation says.
        augment: policy of strong augmentation, such as "trivial"; None: as the augmentation says.
        weights: pretrained weights, by name or file; they choose the backbone.
        device: the default number of epochs depends on it.
        """
        _check_kind("method", method, str)
        start = recipe(f"{find_method(method).name}-folder")
        size = as_size(image_size)
        chosen = settings
        if not isinstance(chosen, Settings):
            chosen = _default_settings(start.settings, images, size, device)
        epochs_given = isinstance(settings, Settings)
        if not isinstance(settings, Settings | None):
            _check_kind("settings", settings, Mapping)
            main = {f"{name}.epochs" for name in with_role(chosen, *MAIN_ROLES)}
            for key, value in settings.items():
                path = str(key).replace("__", ".")
                chosen = replace_at(chosen, path, plain_number(value))
                epochs_given |= path in main
        if flip is False and not isinstance(settings, Settings):
            named = {str(key) for key in settings or ()}
            views = {name: value for name, value in with_role(chosen, "views").items() if name not in named}
            unmirrored = {name: "centre" if value == "mirror+centre" else "one" for name, value in views.items()}
            chosen = replace(chosen, **unmirrored)
        refuse_no_epochs(chosen)
        augmentation = _default_augmentation(size) if augmentation is None else augmentation
        given = {name: value for name, value in (("flip", flip), ("policy", augment)) if value is not None}
        augmentation = replace(augmentation, **given) if given else augmentation
        pretrained = None if weights is None else take_weights(weights, backbone)
        if pretrained is not None:
            backbone = pretrained.backbone
        config = cls(
            method=method,
            settings=chosen,
            image_size=size,
            memory=_memory(plain_number(memory), start.memory, find_method(method)),
            backbone=("resnet10" if max(size) <= 24 else "resnet32") if backbone is None else backbone,
            augmentation=augmentation,
            seed=plain_number(seed),
            validation=plain_number(validation),
            epochs_given=epochs_given,
            weights=pretrained,
        )
        config.augmentation.check_cutout(size)
        return config.with_epochs(epochs)


_COMPARED = ("method", "backbone", "image_size", "memory", "augmentation", "seed", "validation", "weights")
_KINDS: dict[str, tuple[type, ...]] = {
    "backbone": (str,),
    "augmentation": (Augmentation,),
    "seed": (int,),
    "validation": (float, int),
}


def _check_kind(name: str, value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = {str: "a name", int: "a whole number", float: "a number", Mapping: "a dictionary by dotted path"}
        kind = wanted.get(kinds[0], f"an object of type {kinds[0].__name__}")
        raise EngramError(f"{name} must be {kind}, got {value!r:.60}", parameter=name, value=value)


def _refuse_too_large(value: Any) -> None:
    """Refuse integers that do not fit into 64 bits."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_too_large(item)
    elif isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
        raise EngramError(f"{value} is too large for a model: numbers are at most 2^63 - 1")


def plain_number(value: Any) -> Any:
    """Return a NumPy number as a Python number, and anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def as_size(given: Any) -> tuple[int, int]:
    """Return height and width, given both or the side of a square."""
    sides = [plain_number(side) for side in (given if isinstance(given, (tuple, list, np.ndarray)) else (given, given))]
    if len(sides) != 2 or not all(
        isinstance(side, int) and not isinstance(side, bool) and 8 <= side <= LARGEST_SIDE for side in sides
    ):
        raise EngramError(
            f"{option('image_size')} must be a side or (height, width) of 8 to {LARGEST_SIDE} whole pixels, "
            f"got {given!r:.60}",
            parameter="image_size",
            value=given,
        )
    return sides[0], sides[1]


def _default_augmentation(size: tuple[int, int]) -> Augmentation:
    return Augmentation(pad=max(1, round(min(size) / 8)))


def shortest_argument(value: Any, method: str, image_size: int | tuple[int, int] | None) -> Any:
    """Return a shorter argument of `choose` with the same meaning; None if `choose` would select the value itself.

    Shortens a memory, settings, an augmentation or weights. Everything else is returned unchanged.
    """
    if isinstance(value, PretrainedWeights) and value.name in KNOWN:
        return value.name
    if method not in METHODS:
        return value
    info, start = find_method(method), recipe(f"{method}-folder")
    if isinstance(value, MemoryConfig):
        if value.selection != info.selection and value != start.memory:
            return value
        is_default = value == start.memory and value.budget != "per_class"
        return MemoryConfig().size if is_default else value.size if value.budget == "per_class" else str(value)
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
        # A number means nothing to a method that is defined with no memory or with all images.
        return default if method.memory in ("none", "all") else MemoryConfig("per_class", given, method.selection)
    if isinstance(given, MemoryConfig):
        return given
    raise EngramError(f"the memory must be a number of exemplars per class, text or a MemoryConfig, got {given!r}")


def default_epochs(images: int, size: tuple[int, int], device: Device) -> int:
    """Return the default number of epochs. On a CPU, more or larger images mean fewer epochs."""
    work = images * max(1.0, size[0] * size[1] / 32**2)
    on_cpu = min(60, max(15, round(120_000 / max(1, work))))
    return on_cpu if resolve_device(device, "auto")[0] == "cpu" else 60


def _default_settings(settings: SettingsT, images: int, size: tuple[int, int], device: Device) -> SettingsT:
    """Return the settings with smaller batches for few images, and with the default number of epochs."""
    batch = 128
    while batch > 16 and images < 20 * batch:
        batch //= 2
    for role in TRAINING_ROLES:
        for training in with_role(settings, role).values():
            settings = change_training(settings, (role,), batch_size=min(batch, training.batch_size))
    return _with_epochs(settings, default_epochs(images, size, device))


def _with_epochs(settings: SettingsT, epochs: int) -> SettingsT:
    """Return the settings with that many epochs in the main phases; the other phases keep their ratio."""
    for main in with_role(settings, "main").values():
        for role in TRAINING_ROLES:
            for training in with_role(settings, role).values():
                ratio = training.epochs / max(1, main.epochs)
                count = epochs if role in MAIN_ROLES else math.ceil(epochs * ratio)
                settings = change_training(settings, (role,), epochs=count)
    return settings
