"""Recipes: named, complete configurations, such as `afc-cifar100-b50-s10`.

A name is method, data set, base classes and the number of stages after the base. Recipes with `-nme-` train the head as
the paper's NME rows did; those with a backbone's name after the method have that backbone. `<method>-folder` is for
your own images. What a method needs otherwise than by default is in its `RecipeHints`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from engram.contract import OWN_METHODS, MethodInfo
from engram.contract.settings import Role, change_training, with_role
from engram.core.errors import EngramError, nearest, suggest
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.sources.load import DataConfig
from engram.experiment.run_config import RunConfig
from engram.methods import METHODS

# New classes of a stage by the number of stages: the columns of the paper's Tables 1 and 2.
CIFAR100_STAGES = {50: 1, 25: 2, 10: 5, 5: 10}
MINI_STAGES = {10: 1, 5: 2}
IMAGENET_BASE = {"imagenet100": 50, "imagenet1000": 500}
IMAGENET_STAGES = {"imagenet100": {50: 1, 25: 2, 10: 5, 5: 10}, "imagenet1000": {10: 50, 5: 100}}
# ImageNet's images are kept at 256x256 pixels and seen at 224x224.
IMAGENET_AUGMENTATION = Augmentation(pad=0, view=224 / 256)


def cifar100(method: MethodInfo, stages: int) -> RunConfig:
    """The paper's CIFAR-100 protocol: 50 base classes, then 50, 25, 10 or 5 stages; 20 exemplars per class."""
    return RunConfig(
        method=method.name,
        settings=method.settings(),
        data=DataConfig("cifar100"),
        base=50,
        increment=CIFAR100_STAGES[stages],
        memory=_memory(method, 20),
        augmentation=_augmentation(method, Augmentation()),
        predictor=method.predictors[0],
    )


def mini(method: MethodInfo, stages: int) -> RunConfig:
    """The embedded data set on a CPU: 10 base classes, then 10 or 5 stages; 5 exemplars per class, a small network."""
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
    config = _with_training(config, "main", epochs=16, batch_size=64, remainder="keep")
    finetune = {"epochs": 10, "batch_size": 64} | dict(method.recipes.finetune)
    return _with_training(config, "finetune", **finetune, remainder="keep")


def folder(method: MethodInfo) -> RunConfig:
    """A folder of class folders: half of the classes first, then one at a time; 20 exemplars per class."""
    config = RunConfig(
        method=method.name,
        settings=method.settings(),
        data=DataConfig("folder"),
        memory=_memory(method, 20),
        predictor=method.predictors[0],
    )
    config = _with_training(config, "main", epochs=60, remainder="keep")
    finetune = {"epochs": 20} | dict(method.recipes.finetune)
    return _with_training(config, "finetune", **finetune, remainder="keep")


def imagenet(method: MethodInfo, dataset: str, stages: int) -> RunConfig:
    """The paper's ImageNet protocol: half of the classes first, then that many stages; ResNet-18."""
    config = RunConfig(
        method=method.name,
        settings=method.settings(),
        data=DataConfig(dataset),
        base=IMAGENET_BASE[dataset],
        increment=IMAGENET_STAGES[dataset][stages],
        memory=_memory(method, 20),
        backbone="resnet18",
        augmentation=_augmentation(method, IMAGENET_AUGMENTATION),
        predictor=method.predictors[0],
    )
    for path, value in method.recipes.imagenet[dataset].items():
        config = config.with_value(f"settings.{path}", value)
    return config


def nme(method: MethodInfo, stages: int) -> RunConfig:
    """The CIFAR-100 protocol of the paper's NME rows."""
    assert method.recipes.nme is not None
    return replace(cifar100(method, stages).with_settings(**method.recipes.nme), predictor="nme")


def _memory(method: MethodInfo, per_class: int) -> MemoryConfig:
    if method.memory == "needed":
        return MemoryConfig(size=per_class, selection=method.selection)
    return MemoryConfig(budget="none" if method.memory == "optional" else method.memory, size=0)


def _augmentation(method: MethodInfo, augmentation: Augmentation) -> Augmentation:
    return augmentation if method.brightened else replace(augmentation, brightness=0.0)


def _with_training(config: RunConfig, role: Role, **changes: Any) -> RunConfig:
    """The configuration with the training of that role changed, if the method has one with epochs."""
    if not any(training.epochs for training in with_role(config.settings, role).values()):
        return config
    return replace(config, settings=change_training(config.settings, (role,), **changes))


def _catalogue() -> Iterator[tuple[str, Callable[[], RunConfig]]]:
    """The name of each recipe, and how to make it."""
    for name, method in METHODS.items():
        for stages in CIFAR100_STAGES:
            yield f"{name}-cifar100-b50-s{stages}", partial(cifar100, method, stages)
        for stages in MINI_STAGES:
            yield f"{name}-mini-b10-s{stages}", partial(mini, method, stages)
        yield f"{name}-folder", partial(folder, method)
        for dataset in method.recipes.imagenet:
            for stages in IMAGENET_STAGES[dataset]:
                base = IMAGENET_BASE[dataset]
                yield f"{name}-{dataset}-b{base}-s{stages}", partial(imagenet, method, dataset, stages)
    for name, method in METHODS.items():
        for stages in CIFAR100_STAGES:
            if method.recipes.nme is not None:
                yield f"{name}-nme-cifar100-b50-s{stages}", partial(nme, method, stages)
            for backbone in method.recipes.backbones:
                short = backbone.partition("-")[0]
                made = partial(_with_backbone, method, stages, backbone)
                yield f"{name}-{short}-cifar100-b50-s{stages}", made


def _with_backbone(method: MethodInfo, stages: int, backbone: str) -> RunConfig:
    return replace(cifar100(method, stages), backbone=backbone)


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return [name for name, _ in _catalogue()]


def recipe(name: str) -> RunConfig:
    """The configuration of that name."""
    catalogue = dict(_catalogue())
    if name not in catalogue:
        hint = "" if _names_method(name) else f" {OWN_METHODS}"
        raise EngramError(f"no recipe {name!r}: {_suggestion(name, list(catalogue))}{hint}", value=name)
    return replace(catalogue[name](), recipe=name)


def _names_method(name: str) -> bool:
    """Whether the name begins with a method's name, as a whole word."""
    words = re.sub(r"[\s_]+", "-", name.strip().casefold())
    return any(f"{words}-".startswith(f"{method}-") for method in METHODS)


def _suggestion(name: str, names: list[str]) -> str:
    """Names that begin with this one, the closest name, or the form of the names."""
    beginning = [each for each in names if each.startswith(f"{name.casefold()}-")]
    if beginning:
        return suggest("", beginning)
    if nearest(name, names):
        return suggest(name, names)
    return f"a recipe is called METHOD-DATA, such as {names[0]}; 'engram list' shows all {len(names)}"
