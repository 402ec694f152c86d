"""RunConfig: all that determines a run, as plain data that is saved with it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch

from engram.contract import Settings
from engram.core.errors import EngramError, option, suggest
from engram.core.serialize import convert_setting, flatten, from_plain, replace_at, to_plain
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.sources.load import DataConfig
from engram.data.store import ImageStore
from engram.data.stream import Stream, class_order, describe_order, order_text
from engram.methods import METHODS, find_method
from engram.nn.backbones import BACKBONES
from engram.runs.reader import config_hash

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "tf32", "bf16"]
LONGEST_CHANGES = 60  # characters of a directory's name


@dataclass(frozen=True)
class RunConfig:
    """One run: a method on a stream of classes.

    settings are the method's own, of the class it registered. base: None is half of the classes. order: see
    `class_order`. predictor: the one the recipe reports; all of the method's are evaluated. recipe: the name it
    started from.
    """

    method: str
    settings: Settings
    data: DataConfig = field(default_factory=DataConfig)
    base: int | None = None
    increment: int = 1
    order: str = "1"
    seed: int = 1
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    backbone: str = "resnet32"
    augmentation: Augmentation = field(default_factory=Augmentation)
    predictor: str = "cnn"
    device: Device = "auto"
    precision: Precision = "auto"
    recipe: str = "custom"

    def __post_init__(self) -> None:
        method = find_method(self.method)
        if type(self.settings) is not method.settings:
            raise EngramError(
                f"{self.method} takes {method.settings.__name__} as its settings, got {type(self.settings).__name__}"
            )
        object.__setattr__(self, "order", order_text(self.order))
        for setting in fields(self):  # of the kind that it will be read back as, or refused by name
            if setting.name != "settings":
                object.__setattr__(
                    self, setting.name, convert_setting(RunConfig, setting.name, getattr(self, setting.name))
                )
        for name in ("settings", "augmentation"):  # as it will be read back: a 1 for a float is 1.0
            value = getattr(self, name)
            object.__setattr__(self, name, from_plain(type(value), to_plain(value), name))
        if self.predictor not in method.predictors:
            raise EngramError(f"{self.method} predicts by {', '.join(method.predictors)}, not by {self.predictor}")
        for name, valid in (("device", get_args(Device)), ("precision", get_args(Precision))):
            if getattr(self, name) not in valid:
                raise EngramError(f"{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}")
        if self.backbone not in BACKBONES:
            raise EngramError(f"no backbone {self.backbone!r}: {suggest(self.backbone, BACKBONES)}")
        if method.memory in ("none", "all") and self.memory.budget != method.memory:
            raise EngramError(
                f"{self.method} is defined with memory={method.memory}, got {self.memory}; "
                "choose another method for another memory"
            )
        if method.memory == "needed" and self.memory.budget == "none":
            without = ", ".join(name for name, other in METHODS.items() if other.memory in ("none", "optional"))
            raise EngramError(f"{self.method} needs a memory, got none; methods that learn without one: {without}")
        if self.seed < 0:
            raise EngramError(f"the seed must be 0 or more, got {self.seed}")
        for name in ("base", "increment"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise EngramError(f"{name} must be at least 1 class, got {count}")

    def with_settings(self, **changes: Any) -> RunConfig:
        """A copy with settings changed by dotted path, with "__" for the dot: `with_settings(train__epochs=10)`."""
        config = self
        for path, value in changes.items():
            config = config.with_value("settings." + path.replace("__", "."), value)
        return config

    def with_value(self, path: str, value: Any) -> RunConfig:
        """A copy with the value at a dotted path changed, such as `settings.train.epochs`.

        An order may be its number, or a list of all classes by name or by id, and the memory a text, such as
        "per_class=7", which keeps its selection.
        """
        if path == "memory" and isinstance(value, str):
            value = MemoryConfig.parse(value, self.memory.selection)
        if path == "order":
            return replace(self, order=value)
        if path.startswith("settings."):
            rest = path.removeprefix("settings.")
            return replace(self, settings=replace_at(self.settings, rest, value, "settings"))
        first = path.partition(".")[0]
        if first not in (setting.name for setting in fields(self)):  # the end of a path, as a changed run's name has it
            whole = [key for key in flatten(self.to_plain()) if key.endswith(f".{path}")]
            whole = whole or ([f"settings.{path}"] if hasattr(self.settings, first) else [])
            if whole:
                raise EngramError(f"no setting {path!r}: did you mean {' or '.join(map(repr, whole))}?")
        return replace_at(self, path, value)

    def to_plain(self) -> dict[str, Any]:
        """The configuration as plain data."""
        return to_plain(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> RunConfig:
        """The configuration that plain data describes."""
        if not isinstance(data, Mapping) or not isinstance(data.get("method"), str):
            raise EngramError("a run's configuration must name its method")
        settings = from_plain(find_method(data["method"]).settings, data.get("settings", {}), "settings")
        return from_plain(cls, {**data, "settings": settings})

    def fingerprint(self) -> str:
        """A short digest of everything here but the recipe's name and where the images lie."""
        return config_hash(self.to_plain())

    def place(self) -> tuple[Literal["cpu", "cuda"], Literal["float32", "tf32", "bf16"]]:
        """The device and precision that "auto" stands for on this machine; refuses what it cannot do."""
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise EngramError(f"no CUDA device is available here; a new run can use {option('device', 'cpu')}")
        device = "cuda" if available and self.device != "cpu" else "cpu"
        if self.precision in ("bf16", "tf32") and device == "cpu":
            raise EngramError(f"{self.precision} is for CUDA devices; on a CPU use {option('precision', 'float32')}")
        if self.precision == "auto":
            return device, "bf16" if device == "cuda" else "float32"
        return device, self.precision

    def on_this_machine(self) -> RunConfig:
        """The same with this machine's device and precision in place of "auto", so that a run resumes with them."""
        device, precision = self.place()
        return replace(self, device=device, precision=precision)

    def stream(self, store: ImageStore) -> Stream:
        """The stages that this run cuts the store's classes into."""
        order = class_order(self.order, self.data.name, store.class_names)
        base = -(-store.num_classes // 2) if self.base is None else self.base
        stream = Stream.build(order, base, self.increment)
        self.memory.check(store.num_classes)
        return stream

    def card(self, store: ImageStore, epochs: str = "-") -> dict[str, str]:
        """The protocol card: what a reader must know to compare this run with another, label to text.

        epochs: what is trained, which `Session.card` knows; "-" leaves it out.
        """
        stream = self.stream(store)
        later = stream.sizes[1:]
        increments = "none" if not later else f"{len(later)} of {later[0]}"
        if later and later[-1] != later[0]:
            increments += f" (the last of {later[-1]})"
        height, width = store.image_size
        seen_height, seen_width = self.augmentation.view_size(store.image_size)
        seen = "" if self.augmentation.view is None else f", of which {seen_width}x{seen_height} are seen"
        memory = {"all": "every image", "none": "none"}.get(
            self.memory.budget, f"{self.memory}, {self.memory.selection}"
        )
        variant = getattr(self.settings, "variant", None)
        card = {
            "Recipe": self.recipe,
            "Method": f"{self.method}: {find_method(self.method).title}",
            "Data set": f"{store.name}: {store.num_classes} classes, {len(store.train)} training and {len(store.test)} "
            f"test images, {width}x{height}{seen}",
            "Base": f"{stream.sizes[0]} classes",
            "Stages": increments,
            "Class order": describe_order(self.order, self.data.name),
            "Memory": memory,
            "Variant": variant or "-",
            "Predictor": self.predictor,
            "Backbone": self.backbone,
            "Epochs": epochs,
            "Seed": str(self.seed),
            "Device": f"{self.device}, {self.precision}",
        }
        return {label: text for label, text in card.items() if text != "-"}


def refuse_no_epochs(settings: Settings, where: str = "") -> None:
    """Refuses settings with which stages would learn nothing; later phases may have 0 epochs, which leaves them out.

    A RunConfig may have them, for whoever wants to look at an untrained network; typed on a command line it is a slip.
    """
    for phase in ("train", "rehearse"):
        training = getattr(settings, phase, None)
        if training is not None and training.epochs < 1:
            raise EngramError(
                f"{where}{phase}.epochs must be at least 1, got {training.epochs}: it would learn nothing"
            )


def directory_name(config: RunConfig) -> str:
    """The name of the run's directory where none was given: recipe and what was changed of it, order and seed.

    Of an order that is given class by class it has a digest.
    """
    name, _, changed = config.recipe.partition(" (")
    order = re.sub(r"[^\w.]+", "-", config.order)
    if "," in config.order:
        order = f"given-{_digest(','.join(item.strip() for item in config.order.split(',')))}"
    return f"{name}{_spelled(changed.removesuffix(')'))}-order{order}-seed{config.seed}"


def _spelled(changed: str) -> str:
    """Changes of a recipe as part of a file's name; of many the first, and a digest of all."""
    slug = re.sub(r"[^\w.-]+", "-", changed).rstrip("-.")
    if len(slug) > LONGEST_CHANGES:
        slug = f"{slug[: LONGEST_CHANGES - 9].rstrip('-.')}-{_digest(changed)}"
    return f"-{slug}" if slug else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
