"""Recipes: named, complete configurations, such as `afc-cifar100-b50-s10`.

A name is method, data set, base classes and the number of stages after the base: the protocol's numbers are in it.
Recipes such as `afc-nme-cifar100-b50-s10` train the head as the paper's NME rows did; `der-resnet18-...` has the
backbone that its published numbers are of. `<method>-folder` is for your own images.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engram.contract import OWN_METHODS, MethodInfo
from engram.core.errors import EngramError, suggest
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.sources.load import DataConfig
from engram.experiment import imagenet_recipes as imagenet
from engram.experiment.run_config import RunConfig
from engram.methods import METHODS

CIFAR100_STAGES = {50: 1, 25: 2, 10: 5, 5: 10}
MINI_STAGES = {10: 1, 5: 2}
# The methods of the paper's NME rows, and what they have otherwise there beside the head.
NME: dict[str, dict[str, Any]] = {
    "afc": {},
    "podnet": {"lambda_spatial": 5.0},
    "pod": {"lambda_maps": 5.0},
    "gap": {},
    "channel": {},
    "gram": {},
    "gradcam": {},
    "uniform": {},
    "pixels": {},
    "replay": {},
}
# Methods whose balanced phase begins with a new head, or is the first in which old and new classes weigh the same, need
# some hundred steps of it, however few the images are.
SHORT_FINETUNING: dict[str, dict[str, int]] = {
    "der": {"epochs": 30, "batch_size": 8},
    "eeil": {"epochs": 30, "batch_size": 8},
}


def cifar100(method: MethodInfo, stages: int) -> RunConfig:
    """The paper's CIFAR-100 protocol: 50 base classes, then 50, 25, 10 or 5 stages; 20 exemplars a class."""
    return RunConfig(
        method=method.name,
        settings=method.settings(),
        data=DataConfig("cifar100"),
        base=50,
        increment=CIFAR100_STAGES[stages],
        memory=_memory(method, 20),
        augmentation=Augmentation() if method.brightened else Augmentation(brightness=0.0),
        predictor=method.predictors[0],
    )


def mini(method: MethodInfo, stages: int) -> RunConfig:
    """The embedded set on a CPU: 10 base classes, then 10 or 5 stages; 5 exemplars a class, a small network."""
    config = RunConfig(
        method=method.name,
        settings=method.settings(),
        data=DataConfig("mini"),
        base=10,
        increment=MINI_STAGES[stages],
        memory=_memory(method, 5),
        backbone="resnet10",
        augmentation=Augmentation(pad=2),
        predictor=method.predictors[0],
    )
    config = _where_it_has_it(config, "train", epochs=16, batch_size=64, remainder="keep")
    finetuning = {"epochs": 10, "batch_size": 64} | SHORT_FINETUNING.get(method.name, {})
    return _where_it_has_it(config, "finetune", **finetuning, remainder="keep")


def folder(method: MethodInfo) -> RunConfig:
    """A folder of class folders: half of the classes first, then one at a time; 20 exemplars a class."""
    config = RunConfig(
        method=method.name,
        settings=method.settings(),
        data=DataConfig("folder"),
        memory=_memory(method, 20),
        predictor=method.predictors[0],
    )
    config = _where_it_has_it(config, "train", epochs=60, remainder="keep")
    finetuning = {"epochs": 20} | SHORT_FINETUNING.get(method.name, {})
    return _where_it_has_it(config, "finetune", **finetuning, remainder="keep")


def nme(config: RunConfig) -> RunConfig:
    """The recipe of the paper's NME rows: a sharper head and no learned scale."""
    changed = config.with_settings(sharpness=3.0, learned_scale=False, **NME[config.method])
    return replace(changed, predictor="nme")


def _memory(method: MethodInfo, per_class: int) -> MemoryConfig:
    if method.memory == "needed":
        return MemoryConfig(size=per_class, selection=method.selection)
    return MemoryConfig(budget="none" if method.memory == "optional" else method.memory, size=0)


def _where_it_has_it(config: RunConfig, phase: str, **changes: Any) -> RunConfig:
    """The configuration with a phase's training changed, if its method has one of that name, with epochs.

    The rate and its schedule stay the method's own.
    """
    training = getattr(config.settings, phase, None)
    if training is None or not training.epochs:
        return config
    return config.with_settings(**{phase: replace(training, **changes)})


def _catalogue() -> dict[str, Callable[[], RunConfig]]:
    """How to make each recipe, by name; none is made yet."""
    catalogue: dict[str, Callable[[], RunConfig]] = {}
    for name, method in METHODS.items():
        for stages in CIFAR100_STAGES:
            catalogue[f"{name}-cifar100-b50-s{stages}"] = lambda method=method, stages=stages: cifar100(method, stages)
        for stages in MINI_STAGES:
            catalogue[f"{name}-mini-b10-s{stages}"] = lambda method=method, stages=stages: mini(method, stages)
        catalogue[f"{name}-folder"] = lambda method=method: folder(method)
        for dataset, stages in imagenet.offered(name):
            catalogue[imagenet.recipe_name(name, dataset, stages)] = (
                lambda method=method, dataset=dataset, stages=stages: imagenet.imagenet(
                    method, dataset, stages, _memory(method, 20)
                )
            )
    for name in NME:
        for stages in CIFAR100_STAGES:
            catalogue[f"{name}-nme-cifar100-b50-s{stages}"] = lambda name=name, stages=stages: nme(
                cifar100(METHODS[name], stages)
            )
    for stages in CIFAR100_STAGES:
        catalogue[f"der-resnet18-cifar100-b50-s{stages}"] = lambda stages=stages: replace(
            cifar100(METHODS["der"], stages), backbone="resnet18-small"
        )
    return catalogue


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return list(_catalogue())


def recipe(name: str) -> RunConfig:
    """The configuration of that name."""
    catalogue = _catalogue()
    if name not in catalogue:
        hint = "" if _names_method(name) else f" {OWN_METHODS}"
        raise EngramError(f"no recipe {name!r}: {_nearest(name, list(catalogue))}{hint}")
    return replace(catalogue[name](), recipe=name)


def _names_method(name: str) -> bool:
    """Whether the name begins with a method's, a whole word of it: "AFC mini" with afc's, "warm-mini" not with wa's."""
    words = re.sub(r"[\s_]+", "-", name.strip().casefold())
    return any(f"{words}-".startswith(f"{method}-") for method in METHODS)


def _nearest(name: str, names: list[str]) -> str:
    """What to say of a name that no recipe has: those that begin with it, one like it, or how they are called."""
    beginning = [each for each in names if each.startswith(f"{name.casefold()}-")]
    if beginning:
        return suggest("", beginning)
    found = suggest(name, names)
    if found.startswith("did you mean"):
        return found
    return f"a recipe is called METHOD-DATA, such as {names[0]}; 'engram list' has all {len(names)}"
