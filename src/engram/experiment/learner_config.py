"""The part of a configuration that runs and models share: the method, its settings, and the device it trains on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch

from engram.contract import Settings
from engram.contract.predictors import PREDICTORS
from engram.contract.settings import MAIN_ROLES, OPTIMISERS, SCHEDULES, trainings, with_role
from engram.core.errors import EngramError, UnknownNameError, option, suggest
from engram.core.registry import Registry, joined_versions, origin_of
from engram.core.serialize import convert_setting, from_plain, to_plain
from engram.data.augment import Augmentation
from engram.data.memory import RESERVOIR, SELECTIONS, MemoryConfig
from engram.data.policies import NO_POLICY, POLICIES
from engram.methods import METHODS, find_method
from engram.nn.backbones import BACKBONES
from engram.nn.pretrained import PretrainedWeights, keep, load_weights

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "tf32", "bf16"]


class LearnerConfig:
    """Base of the frozen dataclasses `RunConfig` and `ModelConfig`.

    Each of them declares these fields itself, because the order of its fields is the order of its saved JSON.
    """

    method: str
    settings: Settings
    seed: int
    memory: MemoryConfig
    backbone: str
    augmentation: Augmentation
    weights: PretrainedWeights | None

    def check_learner(self) -> None:
        """Convert every field to its declared type, and refuse values that do not fit the method."""
        method = find_method(self.method)
        if type(self.settings) is not method.settings:
            again = origin_of(type(self.settings)) == origin_of(method.settings)
            raise EngramError(
                f"{self.method} was registered again since these settings were made; make the configuration again"
                if again
                else f"{self.method} takes {method.settings.__name__} as its settings, got "
                f"{type(self.settings).__name__}"
            )
        if isinstance(self.weights, str | Path):
            object.__setattr__(self, "weights", take_weights(self.weights, self.backbone))
        for each in fields(self):  # pyright: ignore[reportArgumentType]
            if each.name != "settings":
                object.__setattr__(self, each.name, convert_setting(type(self), each.name, getattr(self, each.name)))
        for name in ("settings", "augmentation"):  # an integer given for a float becomes a float, as in the file
            value = getattr(self, name)
            object.__setattr__(self, name, from_plain(type(value), to_plain(value), name))
        BACKBONES.find(self.backbone)
        if self.weights is not None and self.weights.backbone != self.backbone:
            raise EngramError(
                f"the weights {self.weights.name} are for the backbone {self.weights.backbone}, not for "
                f"{self.backbone}; leave {option('backbone')} or {option('weights')} out"
            )
        if method.memory in ("none", "all") and self.memory.budget != method.memory:
            raise EngramError(
                f"{self.method} is defined with memory={method.memory}, got {self.memory}; "
                "choose another method for another memory"
            )
        if method.memory == "needed" and self.memory.budget == "none":
            without = ", ".join(name for name, other in sorted(METHODS.items()) if other.memory in ("none", "optional"))
            raise EngramError(f"{self.method} needs a memory, got none; methods that learn without one: {without}")
        if self.memory.selection == RESERVOIR and not method.kind.unbalanced_memory:
            raise EngramError(
                f"{self.method} needs as many exemplars of every class, which a reservoir does not keep; "
                f"choose another selection, or a method that can: {able_methods(self.method, 'unbalanced_memory')}"
            )
        if self.seed < 0:
            raise EngramError(f"the seed must be 0 or more, got {self.seed}")

    def code_versions(self) -> dict[str, str]:
        """Return file and digest of the user's code that the configuration names, for run.json; empty if none."""
        return {**find_method(self.method).versions, **joined_versions(self._parts())}

    def own_parts(self) -> dict[str, list[str]]:
        """Return what comes from files of the user, by kind, such as "optimiser sgd2"; kinds as in `code_versions`."""
        found = {"method": [f"method {self.method}"]} if find_method(self.method).versions else {}
        for registry, name in dict.fromkeys(self._parts()):
            if registry.versions(name):
                found.setdefault(registry.kind.replace(" ", "_"), []).append(f"{registry.kind} {name}")
        return found

    def _parts(self) -> list[tuple[Registry[Any], str]]:
        """Return all registered parts in use except the method: registry and name of each."""
        used = [*self.training_parts(), *((PREDICTORS, name) for name in find_method(self.method).predictors)]
        if self.memory.is_selected:
            used.append((SELECTIONS, self.memory.selection))
        return used

    def training_parts(self) -> list[tuple[Registry[Any], str]]:
        """Return the backbone, augmentation policy, optimisers and schedules in use, each with its registry."""
        parts: list[tuple[Registry[Any], str]] = [(BACKBONES, self.backbone)]
        if self.augmentation.policy != NO_POLICY:
            parts.append((POLICIES, self.augmentation.policy))
        for each in trainings(self.settings):
            parts += [(OPTIMISERS, each.optimiser), (SCHEDULES, each.schedule)]
        return parts

    def to_plain(self) -> dict[str, Any]:
        """Return the configuration as plain data; without weights, as in files of earlier versions."""
        plain = to_plain(self)
        if plain["weights"] is None:
            del plain["weights"]
        return plain

    @classmethod
    def from_plain(cls, data: Any, of: str = "") -> Self:
        """Return the configuration that plain data describes. of: whose it is, for messages, if it was recorded."""
        if not isinstance(data, dict) or not isinstance(data.get("method"), str):
            raise EngramError("a configuration must name its method")
        kind = find_method(data["method"]).settings
        try:
            settings = from_plain(kind, data.get("settings", {}), "settings")
        except EngramError as error:
            if not of:
                raise
            what = f"there is no setting {error.value!r}" if isinstance(error, UnknownNameError) else error
            raise EngramError(
                f"the recorded settings of {of} do not fit the method {data['method']} any more ({what}); restore "
                "the code that it was made with, or start a new run"
            ) from error
        return from_plain(cls, {**data, "settings": settings})


def able_methods(name: str, attribute: str) -> str:
    """Name the methods that declare an attribute; of a user's method without it, also how to declare it."""
    able = ", ".join(each for each, other in sorted(METHODS.items()) if getattr(other.kind, attribute))
    kind = find_method(name).kind
    is_ours = kind.__module__.startswith("engram.")
    return able if is_ours else f"{able}; if {name} can, declare {attribute} = True in its class {kind.__name__}"


def take_weights(given: str | Path | PretrainedWeights, backbone: str | None = None) -> PretrainedWeights:
    """Return the record of weights, given their name or file; they are kept where the network can be made from them.

    backbone: the network that the weights must be for, if one was chosen.
    """
    if isinstance(given, PretrainedWeights):
        return given
    record, tensors = load_weights(given, backbone)
    keep(record, tensors)
    return record


def kind_of_device(device: str) -> Device:
    """Return the kind of a device that may be a GPU with its number, such as "cuda:1"."""
    name, colon, _ = device.partition(":")
    kind = next((each for each in get_args(Device) if each == name), None)
    if kind is None or (colon and kind != "cuda"):
        known = get_args(Device)
        raise EngramError(
            f"{option('device')} is auto, cpu, cuda or a GPU like cuda:1, got {device!r:.40}: {suggest(name, known)}",
            parameter="device",
            value=device,
        )
    return kind


def resolve_device(
    device: Device, precision: Precision
) -> tuple[Literal["cpu", "cuda"], Literal["float32", "tf32", "bf16"]]:
    """Return the device and precision that "auto" selects on this machine; refuse those it does not support."""
    for name, value, valid in (
        ("device", device, get_args(Device)),
        ("precision", precision, get_args(Precision)),
    ):
        if value not in valid:
            raise EngramError(f"{name} must be one of {', '.join(valid)}, got {value!r}", parameter=name, value=value)
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise EngramError(f"no CUDA device is available here; a new run can use {option('device', 'cpu')}")
    chosen = "cuda" if available and device != "cpu" else "cpu"
    if precision in ("bf16", "tf32") and chosen == "cpu":
        raise EngramError(f"{precision} is for CUDA devices; on a CPU use {option('precision', 'float32')}")
    if precision == "auto":
        return chosen, "bf16" if chosen == "cuda" else "float32"
    return chosen, precision


def refuse_no_epochs(settings: Settings, prefix: str = "") -> None:
    """Refuse settings whose main training phases have 0 epochs. Other phases may have 0, which skips them.

    A RunConfig accepts 0 epochs, to look at an untrained network; on the command line it is a mistake.

    prefix: precedes the name of the setting in the message.
    """
    for name, training in with_role(settings, *MAIN_ROLES).items():
        if training.epochs < 1:
            raise EngramError(
                f"{prefix}{name}.epochs must be at least 1, got {training.epochs}: nothing would be learned"
            )
