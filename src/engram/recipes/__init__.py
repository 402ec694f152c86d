"""Recipes: named, complete configurations, such as `afc-cifar100-b50-s10`.

A name is method, data set, base classes and the number of stages after the base: the protocol's numbers are in the
name. The `-nme` recipes of AFC train the head the way the paper's NME rows did.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from engram.config import RunConfig
from engram.data.augment import Augmentation
from engram.data.load import DataConfig
from engram.data.memory import MemoryConfig
from engram.errors import EngramError, suggest
from engram.methods import METHODS, Training, find_method

CIFAR100_STAGES = {50: 1, 25: 2, 10: 5, 5: 10}
MINI_STAGES = {10: 1, 5: 2}


def cifar100(method: str, stages: int) -> RunConfig:
    """The paper's CIFAR-100 protocol: 50 base classes, then 50, 25, 10 or 5 stages; 20 exemplars a class."""
    return RunConfig(
        method=method,
        settings=find_method(method).settings(),
        data=DataConfig("cifar100"),
        base=50,
        increment=CIFAR100_STAGES[stages],
        memory=_memory(method, 20),
        recipe=f"{method}-cifar100-b50-s{stages}",
    )


def mini(method: str, stages: int) -> RunConfig:
    """The embedded set on a CPU: 10 base classes, then 10 or 5 stages; 5 exemplars a class, a small network."""
    config = RunConfig(
        method=method,
        settings=find_method(method).settings(),
        data=DataConfig("mini"),
        base=10,
        increment=MINI_STAGES[stages],
        memory=_memory(method, 5),
        backbone="resnet10",
        augmentation=Augmentation(pad=2),
        recipe=f"{method}-mini-b10-s{stages}",
    )
    return config.with_settings(
        train=Training(epochs=16, batch_size=64, remainder="keep"),
        finetune=Training(epochs=10, batch_size=64, lr=0.05, schedule="constant", remainder="keep"),
    )


def folder(method: str) -> RunConfig:
    """A folder of class folders: half of the classes first, then one at a time; 20 exemplars a class."""
    config = RunConfig(
        method=method,
        settings=find_method(method).settings(),
        data=DataConfig("folder"),
        memory=_memory(method, 20),
        recipe=f"{method}-folder",
    )
    return config.with_settings(train__epochs=60, train__remainder="keep", finetune__remainder="keep")


def _memory(method: str, per_class: int) -> MemoryConfig:
    budget = find_method(method).memory
    return MemoryConfig(size=per_class) if budget == "needed" else MemoryConfig(budget=budget, size=0)


def _nme(config: RunConfig) -> RunConfig:
    """The NME recipe: a sharper head and no learned scale."""
    settings = replace(config.settings, sharpness=3.0, learned_scale=False)
    return replace(config, settings=settings, predictor="nme", recipe=re.sub(r"^[^-]+", r"\g<0>-nme", config.recipe))


def _catalogue() -> dict[str, Callable[[], RunConfig]]:
    catalogue: dict[str, Callable[[], RunConfig]] = {}

    def add(make: Callable[[], RunConfig]) -> None:
        catalogue[make().recipe] = make

    for method in METHODS:
        for stages in CIFAR100_STAGES:
            add(lambda method=method, stages=stages: cifar100(method, stages))
        for stages in MINI_STAGES:
            add(lambda method=method, stages=stages: mini(method, stages))
        add(lambda method=method: folder(method))
    for stages in CIFAR100_STAGES:
        add(lambda stages=stages: _nme(cifar100("afc", stages)))
    return catalogue


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return list(_catalogue())


def recipe(name: str) -> RunConfig:
    """The configuration of that name."""
    catalogue = _catalogue()
    if name not in catalogue:
        raise EngramError(f"no recipe {name!r}: {suggest(name, catalogue)}")
    return catalogue[name]()
