"""From recipe names and the flags of `engram run` to the configurations of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engram.cli.options.runs import DataFlags, Run, StreamFlags, TrainingFlags
from engram.contract.settings import Role, with_role
from engram.core.errors import EngramError, option
from engram.core.io import typed_path
from engram.data.memory import RESERVOIR, MemoryConfig
from engram.data.sources.imagenet import IMAGENET
from engram.data.sources.load import FOLDERS
from engram.experiment.learner_config import kind_of_device, refuse_no_epochs, take_weights
from engram.experiment.recipes import apply_changes, named_after_changes, online, recipe
from engram.experiment.run_config import RunConfig
from engram.methods import find_method

# For each flag the roles of the settings that it changes (a method must have the first), and which part of them.
_CHANGES: dict[str, tuple[tuple[Role, ...], str]] = {
    "epochs": (("main",), ".epochs"),
    "finetune_epochs": (("finetune",), ".epochs"),
    "batch_size": (("main", "finetune", "later"), ".batch_size"),
    "lr": (("main",), ".lr"),
    "variant": (("variant",), ""),
    "lambda_disc": (("distillation",), ""),
}


def configure_all(options: Run) -> list[RunConfig]:
    """Return a configuration for each run: each recipe with each class order and each seed."""
    _refuse_repeated("recipe", options.recipes)
    orders = [read_order(order) for order in split_values("--orders", options.stream.orders)]
    seeds = [] if options.training.seeds is None else split_seeds(options.training.seeds)
    set_keys = [setting.partition("=")[0].strip() for setting in options.training.set]
    for key, single, several in (("order", options.stream.order, orders), ("seed", options.training.seed, seeds)):
        if several and (single is not None or key in set_keys):
            given = f"--set {key}" if key in set_keys else f"--{key}"
            raise EngramError(f"{given} and --{key}s exclude each other; give only one of them")
    configs: list[RunConfig] = []
    for name in options.recipes:
        config = configure(options, name)
        for order in orders or [config.order]:
            configs += [replace(config, order=order, seed=seed) for seed in seeds or [config.seed]]
    return configs


def split_seeds(text: str) -> list[int]:
    """Split seeds at the commas."""
    seeds = split_values("--seeds", text)
    for seed in seeds:
        if not seed.isdecimal():
            raise EngramError(f"--seeds takes whole numbers separated by commas, such as 1,2,3, got {seed!r}")
    return [int(seed) for seed in seeds]


def split_values(flag: str, text: str | None) -> list[str]:
    """Split the value of a flag at the commas; an empty list if the flag was not given."""
    if text is None:
        return []
    values = [str(int(value)) if value.strip().isdecimal() else value.strip() for value in text.split(",")]
    if not all(values):
        raise EngramError(f"{flag} takes values separated by commas, such as 1,2,3, got {text!r}")
    _refuse_repeated(flag.strip("-").removesuffix("s"), values)
    return values


def _refuse_repeated(what: str, values: Sequence[str]) -> None:
    repeated = sorted({value for value in values if values.count(value) > 1})
    if repeated:
        raise EngramError(f"the {what} {repeated[0]} is given more than once; each run is done once")


def configure(options: Run, name: str) -> RunConfig:
    """Return the configuration of one recipe with the changes that the flags ask for, which its name mentions."""
    original = recipe(name)
    config = _with_data(original, options.data)
    config = _with_stream(config, options.stream)
    if options.training.online:
        config = _online(config, options)
    config = _with_training(config, options.training)
    config = apply_changes(config, options.training.set)
    config = replace(config, order=read_order(config.order))
    refuse_no_epochs(config.settings, "settings.")
    return named_after_changes(original, config)


def images_at(text: str) -> str:
    """Return the absolute path that --data names, so that a run can be resumed from another directory."""
    path = typed_path(text)
    if not path.exists():
        raise EngramError(f"there is no file or folder {text}; give --data the path of the images")
    return str(path.resolve())


def read_order(order: str) -> str:
    """Return a typed class order; for @FILE the classes in the file, one per line or separated by commas."""
    if not order.startswith("@"):
        return order
    path = typed_path(order[1:])
    how = "it must name every class, one per line or separated by commas"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise EngramError(f"there is no file {path} for the class order {order!r}; {how}") from None
    except UnicodeDecodeError:
        raise EngramError(f"the file {path} of the class order is not text in UTF-8; {how}") from None
    except OSError as error:
        raise EngramError(f"the file {path} of the class order cannot be read ({error.strerror}); {how}") from None
    classes = [name for line in text.splitlines() for name in map(str.strip, line.split(",")) if name]
    if len(classes) < 2:
        found = f"names only {classes[0]!r}" if classes else "is empty"
        raise EngramError(f"the file {path} of the class order {found}; {how}")
    return ",".join(classes)


def _with_data(config: RunConfig, flags: DataFlags) -> RunConfig:
    data = config.data
    if flags.data is not None:
        name = "folder" if data.name in ("mini", "arrays") else data.name
        data = replace(data, name=name, path=images_at(flags.data))
    for flag, given, takers in (
        ("--image-size", flags.image_size is not None, FOLDERS),
        ("--test-fraction", flags.test_fraction is not None, ("folder",)),
        ("--skip-bad", flags.skip_bad, FOLDERS),
        ("--crops", flags.crops == "photograph", tuple(IMAGENET)),
    ):
        if given and data.name not in takers:
            kind = "ImageNet" if flag == "--crops" else "a folder of images"
            raise EngramError(f"{flag} is for {kind}, but {config.recipe} reads {data.name}; leave it out")
    data = replace(data, **_given(flags, "image_size", "test_fraction", "holdout", "crops"))
    return replace(config, data=replace(data, skip_bad=flags.skip_bad or data.skip_bad))


def _with_stream(config: RunConfig, flags: StreamFlags) -> RunConfig:
    memory = config.memory
    if flags.memory is not None:
        memory = MemoryConfig.parse(flags.memory, flags.selection or memory.selection)
    if flags.selection is not None:
        if memory.budget in ("all", "none"):
            raise EngramError(f"--selection has nothing to choose from: the memory of {config.recipe} is {memory}")
        memory = replace(memory, selection=flags.selection)
    given = _given(flags, "base", "increment", "order", "blurry", "repeat")
    if flags.increments is not None:
        if flags.increment is not None:
            raise EngramError("--increment and --increments exclude each other; give only one of them")
        given["increment"] = split_increments(flags.increments)
    return replace(config, memory=memory, **given)


def split_increments(text: str) -> tuple[int, ...]:
    """Split the sizes of the stages after the base at the commas."""
    sizes = [size.strip() for size in text.split(",")]
    if not all(map(str.isdecimal, sizes)):
        raise EngramError(f"--increments takes whole numbers separated by commas, such as 10,5,5,20, got {text!r}")
    return tuple(map(int, sizes))


def _online(config: RunConfig, options: Run) -> RunConfig:
    for flag, value, only in (
        ("epochs", options.training.epochs, 1),
        ("selection", options.stream.selection, RESERVOIR),
    ):
        if value not in (None, only):
            raise EngramError(f"--online has {flag} {only}, got --{flag} {value}; leave out one of them")
    return online(config)


def _with_training(config: RunConfig, flags: TrainingFlags) -> RunConfig:
    if flags.finetune_epochs is not None and find_method(config.method).memory != "needed":
        raise EngramError(
            f"--finetune-epochs is not for {config.method}, which has no balanced fine-tuning; leave it out"
        )
    for name, value in _given(flags, *_CHANGES).items():
        roles, part = _CHANGES[name]
        if not with_role(config.settings, roles[0]):
            raise EngramError(
                f"{option(name)} is not for {config.method}, which has no setting with the role "
                f"{roles[0]!r}; leave it out or choose another recipe"
            )
        for setting in with_role(config.settings, *roles):
            config = config.with_value(f"settings.{setting}{part}", value)
    for name, path in (("augment", "augmentation.policy"), ("cutout", "augmentation.cutout")):
        if (value := getattr(flags, name)) is not None:
            config = config.with_value(path, value)
    if flags.weights is not None:
        weights = take_weights(flags.weights, flags.backbone)
        config = replace(config, weights=weights, backbone=weights.backbone)
    given = _given(flags, "seed", "backbone", "device", "precision")
    if "device" in given:
        given["device"] = kind_of_device(given["device"])
    return replace(config, **given)


def _given(flags: object, *names: str) -> dict[str, Any]:
    """Return those of the flags that were given, by name."""
    return {name: value for name in names if (value := getattr(flags, name)) is not None}
