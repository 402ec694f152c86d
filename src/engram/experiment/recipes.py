"""Recipes: named, complete configurations, such as `afc-cifar100-b50-s10`, and changes of them.

A name is method, data set, base classes and the number of stages after the base. In `-b0-` recipes no stage is larger
than the others, and the number counts all stages, as in the literature: `-b0-s10` is 10 stages of 10 classes. Recipes
with `-nme-` train the head as the paper's NME rows did; those with a backbone's name after the method have that
backbone. `<method>-folder` is for your own images. What a method needs otherwise than by default is in its
`RecipeHints`. Changes are made from `key=value`, and shown in the name of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engram.contract import OWN_METHODS, MethodInfo
from engram.contract.settings import MAIN_ROLES, TRAINING_ROLES, Role, change_training, with_role
from engram.core.errors import EngramError, nearest, option, suggest
from engram.core.serialize import flatten
from engram.data.augment import Augmentation
from engram.data.memory import RESERVOIR, MemoryConfig
from engram.data.sources.load import DataConfig
from engram.experiment.learner_config import able_methods
from engram.experiment.run_config import RunConfig
from engram.methods import METHODS, find_method

# New classes of a stage by the number of stages: the columns of the paper's Tables 1 and 2.
CIFAR100_STAGES = {50: 1, 25: 2, 10: 5, 5: 10}
MINI_STAGES = {10: 1, 5: 2}
# Classes of every stage by the number of all stages, in the protocols without a larger base (B0).
CIFAR100_EVEN_STAGES = {5: 20, 10: 10, 20: 5}
EVEN_MEMORY = 2000  # exemplars in total
ONLINE_BATCH = 10
IMAGENET_BASE = {"imagenet100": 50, "imagenet1000": 500}
IMAGENET_STAGES = {"imagenet100": {50: 1, 25: 2, 10: 5, 5: 10}, "imagenet1000": {10: 50, 5: 100}}
# ImageNet's images are kept at 256x256 pixels and seen at 224x224.
IMAGENET_AUGMENTATION = Augmentation(pad=0, view=224 / 256)
# Settings that may differ from the recipe in the same protocol: repetitions of it, and where it runs.
_FREE = ("recipe", "order", "seed", "data.path", "device", "precision")


def cifar100(method: MethodInfo, stages: int) -> RunConfig:
    """The paper's CIFAR-100 protocol: 50 base classes, then 50, 25, 10 or 5 stages; 20 exemplars per class."""
    augmentation = _augmentation(method, Augmentation())
    return _config(method, "cifar100", base=50, increment=CIFAR100_STAGES[stages], augmentation=augmentation)


def cifar100_even(method: MethodInfo, stages: int) -> RunConfig:
    """The B0 protocol: CIFAR-100 in that many stages of equal size; 2,000 exemplars in total."""
    config, classes = cifar100(method, next(iter(CIFAR100_STAGES))), CIFAR100_EVEN_STAGES[stages]
    memory = config.memory
    if method.memory == "needed":
        memory = MemoryConfig("total", EVEN_MEMORY, method.selection)
    return replace(config, base=classes, increment=classes, memory=memory)


def mini(method: MethodInfo, stages: int) -> RunConfig:
    """The embedded data set on a CPU: 10 base classes, then 10 or 5 stages; 5 exemplars per class, a small network."""
    small = {"backbone": "resnet10", "augmentation": Augmentation(pad=2)}
    config = _config(method, "mini", 5, base=10, increment=MINI_STAGES[stages], **small)
    return _trained(config, method, {"epochs": 16, "batch_size": 64}, {"epochs": 10, "batch_size": 64})


def folder(method: MethodInfo) -> RunConfig:
    """A folder of class folders: half of the classes first, then one at a time; 20 exemplars per class."""
    return _trained(_config(method, "folder"), method, {"epochs": 60}, {"epochs": 20})


def imagenet(method: MethodInfo, dataset: str, stages: int) -> RunConfig:
    """The paper's ImageNet protocol: half of the classes first, then that many stages; ResNet-18."""
    base, increment = IMAGENET_BASE[dataset], IMAGENET_STAGES[dataset][stages]
    augmentation = _augmentation(method, IMAGENET_AUGMENTATION)
    config = _config(method, dataset, base=base, increment=increment, backbone="resnet18", augmentation=augmentation)
    return _with_hints(config, method.recipes.imagenet[dataset])


def nme(method: MethodInfo, stages: int) -> RunConfig:
    """The CIFAR-100 protocol of the paper's NME rows."""
    assert method.recipes.nme is not None
    return replace(cifar100(method, stages).with_settings(**method.recipes.nme), predictor="nme")


def online(config: RunConfig, batch_size: int = ONLINE_BATCH) -> RunConfig:
    """The configuration in one pass: each image is seen once, and the exemplars are a reservoir of all images seen.

    One epoch at a constant learning rate, in batches of that size, the last one kept; then at most one epoch over a
    balanced set, for methods that have such a phase. The memory must have a total budget, or be none.
    """
    memory = config.memory
    if memory.budget in ("total", "per_class") and not find_method(config.method).kind.unbalanced_memory:
        raise EngramError(
            f"{config.method} needs as many exemplars of every class, which the reservoir of online learning does not "
            f"keep; methods that can: {able_methods(config.method, 'unbalanced_memory')}"
        )
    if memory.budget == "total":
        memory = replace(memory, selection=RESERVOIR)
    elif memory.budget != "none":
        raise EngramError(
            f"online learning keeps a number of exemplars in total, but {config.recipe} has the memory {memory}; "
            f"add {option('memory', 'total=N')}, or choose another method"
        )
    settings, once = config.settings, {"batch_size": batch_size, "schedule": "constant"}
    for role in TRAINING_ROLES:
        for training in with_role(settings, role).values():
            changed = {**once, "epochs": 1 if role in MAIN_ROLES else min(1, training.epochs), "remainder": "keep"}
            settings = change_training(settings, (role,), **changed)
    return replace(config, settings=settings, memory=memory)


def _config(method: MethodInfo, dataset: str, per_class: int = 20, **fields: Any) -> RunConfig:
    """The method with its default settings on a data set. per_class: exemplars, if it needs a memory."""
    if method.memory == "needed":
        memory = MemoryConfig(size=per_class, selection=method.selection)
    else:
        memory = MemoryConfig(budget="none" if method.memory == "optional" else method.memory, size=0)
    data, predictor = DataConfig(dataset), method.predictors[0]
    return RunConfig(method.name, method.settings(), data, memory=memory, predictor=predictor, **fields)


def _augmentation(method: MethodInfo, augmentation: Augmentation) -> Augmentation:
    changes = dict(method.recipes.augmentation)
    return replace(augmentation, **(changes if method.brightened else {"brightness": 0.0, **changes}))


def _trained(config: RunConfig, method: MethodInfo, main: Mapping[str, int], finetune: Mapping[str, int]) -> RunConfig:
    """The configuration for a small data set: its trainings changed, incomplete batches kept, the method's hints."""
    roles: dict[Role, Mapping[str, Any]] = {"main": main, "finetune": {**finetune, **method.recipes.finetune}}
    if method.recipes.later_as_base:
        roles["later"] = main
    for role, changes in roles.items():
        if any(training.epochs for training in with_role(config.settings, role).values()):
            changed = change_training(config.settings, (role,), **changes, remainder="keep")
            config = replace(config, settings=changed)
    return _with_hints(config, method.recipes.small)


def _with_hints(config: RunConfig, hints: Mapping[str, Any]) -> RunConfig:
    for path, value in hints.items():
        config = config.with_value(f"settings.{path}", value)
    return config


def _catalogue() -> Iterator[tuple[str, Callable[[], RunConfig]]]:
    """The name of each recipe, and how to make it."""
    for name, method in sorted(METHODS.items()):
        for stages in CIFAR100_STAGES:
            yield f"{name}-cifar100-b50-s{stages}", partial(cifar100, method, stages)
        for stages in CIFAR100_EVEN_STAGES:
            yield f"{name}-cifar100-b0-s{stages}", partial(cifar100_even, method, stages)
        for stages in MINI_STAGES:
            yield f"{name}-mini-b10-s{stages}", partial(mini, method, stages)
        yield f"{name}-folder", partial(folder, method)
        for dataset in method.recipes.imagenet:
            for stages in IMAGENET_STAGES[dataset]:
                base = IMAGENET_BASE[dataset]
                yield f"{name}-{dataset}-b{base}-s{stages}", partial(imagenet, method, dataset, stages)
    for name, method in sorted(METHODS.items()):
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
    make = next((make for each, make in _catalogue() if each == name), None)
    if make is None:
        hint = "" if _names_method(name) else f" {OWN_METHODS}"
        raise EngramError(f"no recipe {name!r}: {_suggestion(name, recipe_names())}{hint}", value=name)
    return replace(make(), recipe=name)


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


def apply_changes(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """The configuration with each `key=value` applied; `memory=total=2000` sets both budget and size."""
    for setting in settings:
        name, equals, text = setting.partition("=")
        key, value = name.strip(), text.strip()
        if not equals or not key:
            raise EngramError(
                f"a change of a recipe ({option('set')}) must be KEY=VALUE, such as augmentation.pad=2, got {setting!r}"
            )
        if key in ("method", "recipe"):
            raise EngramError(
                f"{option('set')} cannot change the {key}, got {setting!r}: the name of the recipe determines the "
                "method; 'engram list' shows the recipes"
            )
        config = config.with_value(key, value)
    return config


def named_after_changes(original: RunConfig, config: RunConfig) -> RunConfig:
    """The configuration with its differences from the original protocol in the name of its recipe."""
    changed = changes(original, config)
    return replace(config, recipe=f"{original.recipe} ({', '.join(changed)})") if changed else config


def named_by_recipe(config: RunConfig) -> RunConfig:
    """The configuration with its differences from its recipe in its name; unchanged if it has no recipe."""
    name = config.recipe.partition(" (")[0]
    if name not in recipe_names():
        return config
    original = recipe(name)
    if original.data.name != config.data.name:  # images given in Python; run.json names them
        original = replace(original, data=config.data)
    return named_after_changes(original, replace(config, recipe=name))


def changes(original: RunConfig, config: RunConfig) -> list[str]:
    """The differences from the original protocol, as `key=value`, with the shortest unambiguous keys."""
    before, after = _leaves(original), _leaves(config)
    return [
        f"{_short_key(key, list(after))}={_typed(value)}"
        for key, value in after.items()
        if key not in _FREE and (key not in before or value != before[key])
    ]


def _leaves(config: RunConfig) -> dict[str, Any]:
    """Every setting by its dotted path; a memory and weights are one value, as a user types them."""
    leaves: dict[str, Any] = {}
    memory = {"memory": str(config.memory), "memory.selection": config.memory.selection}
    for key, value in config.to_plain().items():
        leaves |= memory if key == "memory" else flatten({key: value["name"] if key == "weights" else value})
    if isinstance(config.increment, tuple):
        leaves["increment"] = ",".join(map(str, config.increment))
    return leaves


def _short_key(key: str, keys: list[str]) -> str:
    """The shortest suffix of the dotted key that no other key ends in."""
    parts = key.split(".")
    # "name" by itself would be unclear.
    for count in range(2 if parts[-1] == "name" else 1, len(parts)):
        end = ".".join(parts[-count:])
        if not any(other != key and f".{other}".endswith(f".{end}") for other in keys):
            return end
    return key


def _typed(value: Any) -> str:
    """The value as a user types it in `key=value`."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
