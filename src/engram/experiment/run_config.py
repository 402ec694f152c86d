"""RunConfig: everything that determines a run, as plain data that is saved with it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from engram.contract import Settings
from engram.contract.settings import with_role
from engram.core.errors import EngramError, option
from engram.core.fields import check_fields, limits
from engram.core.serialize import ADDED, flatten, replace_at
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.sources.load import DataConfig
from engram.data.store import ImageStore
from engram.data.stream import Stream, class_order, describe_order, order_text
from engram.engine.forward import Norms
from engram.experiment.learner_config import (
    Device,
    LearnerConfig,
    Precision,
    able_methods,
    resolve_device,
    take_weights,
)
from engram.methods import find_method
from engram.nn.pretrained import PretrainedWeights, describe_weights
from engram.runs.reader import config_hash

LONGEST_CHANGES = 60  # characters of a directory's name


@dataclass(frozen=True)
class RunConfig(LearnerConfig):
    """One run: a method on a stream of classes.

    Parameters
    ----------
    settings: of the class that the method registered.
    base: number of classes in the base stage; None is half of all classes.
    increment: number of classes of each later stage, or one number for each later stage.
    order: see `class_order`.
    predictor: the predictor that the recipe reports. All predictors of the method are evaluated.
    recipe: name of the recipe that this configuration was made from.
    weights: pretrained weights of the backbone that training starts from; as an argument also their name or file.
    blurry, repeat: shares of images and of classes that come again in later stages; see `arrival_stages`.
    norms: of several processes that share the run: "synchronised": a batch norm sees the whole batch, so their number
        makes no difference. "replica": it sees the part of its process, as in most other programs, which is faster.
    """

    method: str
    settings: Settings
    data: DataConfig = field(default_factory=DataConfig)
    base: int | None = None
    increment: int | tuple[int, ...] = 1
    order: str = "1"
    seed: int = 1
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    backbone: str = "resnet32"
    augmentation: Augmentation = field(default_factory=Augmentation)
    predictor: str = "cnn"
    device: Device = "auto"
    precision: Precision = "auto"
    recipe: str = "custom"
    blurry: float = field(default=0.0, metadata=limits(at_least=0, below=1))
    repeat: float = field(default=0.0, metadata=limits(at_least=0, at_most=1))
    weights: PretrainedWeights | None = field(default=None, metadata={ADDED: True})
    norms: Norms = field(default="synchronised", metadata={ADDED: True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", order_text(self.order))
        self.check_learner()
        predictors = find_method(self.method).predictors
        if self.predictor not in predictors:
            raise EngramError(f"{self.method} predicts by {', '.join(predictors)}, not by {self.predictor!r}")
        check_fields(self)
        if self.blurry and self.repeat:
            raise EngramError(f"{option('blurry')} and {option('repeat')} exclude each other; give only one of them")
        if (self.blurry or self.repeat) and not find_method(self.method).kind.returning_classes:
            raise EngramError(
                f"{self.method} cannot learn from new images of old classes, which "
                f"{option('blurry' if self.blurry else 'repeat')} brings; methods that can: "
                f"{able_methods(self.method, 'returning_classes')}"
            )
        for name in ("base", "increment"):
            count = getattr(self, name)
            if count is not None and min(count if isinstance(count, tuple) else [count], default=0) < 1:
                raise EngramError(f"{name} must be at least 1 class, got {count}")

    def with_settings(self, **changes: Any) -> RunConfig:
        """Return a copy with settings changed. "__" stands for a dot: `with_settings(train__epochs=10)`."""
        config = self
        for path, value in changes.items():
            config = config.with_value("settings." + path.replace("__", "."), value)
        return config

    def with_value(self, path: str, value: Any) -> RunConfig:
        """Return a copy with the value at a dotted path changed, such as `settings.train.epochs`.

        An order may be a number or a list of all class names or class ids. A memory may be text such as
        "per_class=7"; its selection does not change then.
        """
        if path == "memory" and isinstance(value, str):
            value = MemoryConfig.parse(value, self.memory.selection)
        if path == "weights" and value not in (None, "none"):
            weights = take_weights(value)
            return replace(self, weights=weights, backbone=weights.backbone)
        if path == "order":
            return replace(self, order=value)
        if path.startswith("settings."):
            rest = path.removeprefix("settings.")
            return replace(self, settings=replace_at(self.settings, rest, value, "settings"))
        first = path.partition(".")[0]
        if first not in (each.name for each in fields(self)):  # perhaps the end of a path: suggest the whole path
            whole = [key for key in flatten(self.to_plain()) if key.endswith(f".{path}")]
            whole = whole or ([f"settings.{path}"] if hasattr(self.settings, first) else [])
            if whole:
                raise EngramError(f"no setting {path!r}: did you mean {' or '.join(map(repr, whole))}?")
        return replace_at(self, path, value)

    def to_plain(self) -> dict[str, Any]:
        """Return the configuration as plain data; these defaults are left out, as in files of earlier versions."""
        left_out = [name for name in ("blurry", "repeat") if not getattr(self, name)]
        left_out += ["norms"] if self.norms == "synchronised" else []
        plain = {key: value for key, value in super().to_plain().items() if key not in left_out}
        if self.data.crops == "square":
            del plain["data"]["crops"]
        return plain

    def fingerprint(self) -> str:
        """Return a short digest of everything but the recipe's name and the path of the images."""
        return config_hash(self.to_plain())

    def on_this_machine(self) -> RunConfig:
        """Return a copy with this machine's device and precision instead of "auto"; a resumed run uses the same."""
        device, precision = resolve_device(self.device, self.precision)
        return replace(self, device=device, precision=precision)

    def stream(self, store: ImageStore) -> Stream:
        """Return the stages into which this run divides the store's classes."""
        order = class_order(self.order, self.data.name, store.class_names)
        base = -(-store.num_classes // 2) if self.base is None else self.base
        stream = Stream.build(order, base, self.increment)
        self.memory.check(store.num_classes)
        return stream

    def card(self, store: ImageStore, epochs: str = "-") -> dict[str, str]:
        """Return the protocol card: the facts needed to compare this run with another, label to text.

        epochs: description of the training, from `Session.card`; "-" leaves the line out.
        """
        stream = self.stream(store)
        height, width = store.image_size
        seen_height, seen_width = self.augmentation.view_size(store.image_size)
        seen = "" if self.augmentation.view is None else f", of which {seen_width}x{seen_height} are seen"
        memory = {"all": "every image", "none": "none"}.get(
            self.memory.budget, f"{self.memory}, {self.memory.selection}"
        )
        card = {
            "Recipe": self.recipe,
            "Method": f"{self.method}: {find_method(self.method).title}",
            "Data set": f"{store.name}: {store.num_classes} classes, {len(store.train)} training and {len(store.test)} "
            f"test images, {width}x{height}{seen}",
            "Base": f"{stream.sizes[0]} classes",
            "Stages": describe_stages(stream.sizes[1:]),
            "Stream": self._describe_stream(),
            "Class order": describe_order(self.order, self.data.name),
            "Memory": memory,
            "Variant": next(iter(with_role(self.settings, "variant").values()), "-"),
            "Predictor": self.predictor,
            "Backbone": self.backbone,
            "Weights": "-" if self.weights is None else describe_weights(self.weights),
            "Epochs": epochs,
            "Seed": str(self.seed),
            "Device": f"{self.device}, {self.precision}",
        }
        return {label: text for label, text in card.items() if text != "-"}

    def _describe_stream(self) -> str:
        if self.blurry:
            return f"blurry: {100 * self.blurry:g} % of each class's images come in later stages"
        if self.repeat:
            return f"repetition: {100 * self.repeat:g} % of the old classes come again at each stage, with new images"
        return "-"


def describe_stages(sizes: Sequence[int]) -> str:
    """Return the number of stages after the base and their sizes in words. sizes: of these stages."""
    if not sizes:
        return "none"
    if len(set(sizes[:-1])) > 1:
        return f"{len(sizes)}, of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} classes"
    last = f" (the last of {sizes[-1]})" if sizes[-1] != sizes[0] else ""
    return f"{len(sizes)} of {sizes[0]}{last}"


def directory_name(config: RunConfig) -> str:
    """Return the default name of the run's directory: recipe and changes to it, order, seed.

    An order that lists all classes is replaced by a digest.
    """
    name, _, changed = config.recipe.partition(" (")
    order = re.sub(r"[^\w.]+", "-", config.order)
    if "," in config.order:
        order = f"given-{_digest(','.join(item.strip() for item in config.order.split(',')))}"
    return f"{name}{_changes_in_name(changed.removesuffix(')'))}-order{order}-seed{config.seed}"


def _changes_in_name(changed: str) -> str:
    """Return the changes to a recipe as part of a file name. A long text is cut and a digest of all is appended."""
    slug = re.sub(r"[^\w.-]+", "-", changed).rstrip("-.")
    if len(slug) > LONGEST_CHANGES:
        slug = f"{slug[: LONGEST_CHANGES - 9].rstrip('-.')}-{_digest(changed)}"
    return f"-{slug}" if slug else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
