"""From a recipe's name and the flags beside it to the configuration of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engram.cli.options.runs import DataFlags, Run, StreamFlags, TrainingFlags
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.data.memory import MemoryConfig
from engram.data.sources.load import FOLDERS
from engram.experiment.learner_config import refuse_no_epochs
from engram.experiment.recipe_changes import apply_changes, named_after_changes
from engram.experiment.recipes import recipe
from engram.experiment.run_config import RunConfig
from engram.methods import find_method


def configure_all(options: Run) -> list[RunConfig]:
    """The configuration of every run that was asked for: each recipe with each class order and each seed."""
    _refuse_repeated("recipe", options.recipes)
    orders = [read_order(order) for order in listed("--orders", options.stream.orders)]
    seeds = [] if options.training.seeds is None else listed_seeds(options.training.seeds)
    for flag, single, several in (("--order", options.stream.order, orders), ("--seed", options.training.seed, seeds)):
        key = flag.removeprefix("--")
        is_set = any(setting.partition("=")[0].strip() == key for setting in options.training.set)
        if several and (single is not None or is_set):
            raise EngramError(f"{f'--set {key}' if is_set else flag} and {flag}s exclude each other; give one of them")
    configs: list[RunConfig] = []
    for name in options.recipes:
        config = configure(options, name)
        for order in orders or [config.order]:
            configs += [replace(config, order=order, seed=seed) for seed in seeds or [config.seed]]
    return configs


def listed_seeds(text: str) -> list[int]:
    """The seeds with commas between."""
    seeds = listed("--seeds", text)
    for seed in seeds:
        if not seed.isdecimal():
            raise EngramError(f"--seeds takes whole numbers with commas between, such as 1,2,3, got {seed!r}")
    return [int(seed) for seed in seeds]


def listed(flag: str, text: str | None) -> list[str]:
    """The values with commas between; none where the flag was not given."""
    if text is None:
        return []
    values = [str(int(value)) if value.strip().isdecimal() else value.strip() for value in text.split(",")]
    if not all(values):
        raise EngramError(f"{flag} takes values with commas between, such as 1,2,3, got {text!r}")
    _refuse_repeated(flag.removeprefix("--").removesuffix("s"), values)
    return values


def _refuse_repeated(what: str, values: Sequence[str]) -> None:
    repeated = sorted({value for value in values if values.count(value) > 1})
    if repeated:
        raise EngramError(f"the {what} {repeated[0]} is given more than once; each run is done once")


def configure(options: Run, name: str) -> RunConfig:
    """The configuration of one recipe: changed where a flag says so, and named after both."""
    original = recipe(name)
    config = _with_data(original, options.data)
    config = _with_stream(config, options.stream)
    config = _with_training(config, options.training)
    config = apply_changes(config, options.training.set)
    config = replace(config, order=read_order(config.order))
    refuse_no_epochs(config.settings, "settings.")
    return named_after_changes(original, config)


def images_at(text: str) -> str:
    """The path that --data names, kept whole, so that a run can be resumed from another directory."""
    path = typed_path(text)
    if not path.exists():
        raise EngramError(f"there is no file or folder {text}; --data should say where the images are")
    return str(path.resolve())


def read_order(order: str) -> str:
    """The class order that was typed; for @FILE the classes in the file, a line each or with commas between."""
    if not order.startswith("@"):
        return order
    path = typed_path(order[1:])
    how = "it should have every class, one a line or with commas between"
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
        found = f"names {classes[0]!r} alone" if classes else "is empty"
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
    ):
        if given and data.name not in takers:
            raise EngramError(f"{flag} is for a folder of images, and {config.recipe} reads {data.name}; leave it out")
    changes = {"image_size": flags.image_size, "test_fraction": flags.test_fraction, "holdout": flags.holdout}
    data = replace(data, **{name: value for name, value in changes.items() if value is not None})
    return replace(config, data=replace(data, skip_bad=flags.skip_bad or data.skip_bad))


def _with_stream(config: RunConfig, flags: StreamFlags) -> RunConfig:
    memory = config.memory
    if flags.memory is not None:
        memory = MemoryConfig.parse(flags.memory, memory.selection)
    if flags.selection is not None:
        if memory.budget in ("all", "none"):
            raise EngramError(f"--selection has nothing to choose from: the memory of {config.recipe} is {memory}")
        memory = replace(memory, selection=flags.selection)
    changes = {"base": flags.base, "increment": flags.increment, "order": flags.order}
    return replace(config, memory=memory, **{name: value for name, value in changes.items() if value is not None})


def _with_training(config: RunConfig, flags: TrainingFlags) -> RunConfig:
    if flags.finetune_epochs is not None and find_method(config.method).memory != "needed":
        raise EngramError(
            f"--finetune-epochs is not for {config.method}, which has no balanced fine-tuning; leave it out"
        )
    for flag, path, value in (
        ("--epochs", "train.epochs", flags.epochs),
        ("--finetune-epochs", "finetune.epochs", flags.finetune_epochs),
        ("--batch-size", "train.batch_size", flags.batch_size),
        ("--batch-size", "finetune.batch_size", flags.batch_size),
        ("--batch-size", "rehearse.batch_size", flags.batch_size),
        ("--lr", "train.lr", flags.lr),
        ("--variant", "variant", flags.variant),
        ("--lambda-disc", "lambda_disc", flags.lambda_disc),
    ):
        if value is None:
            continue
        if not hasattr(config.settings, path.partition(".")[0]):
            if path in ("finetune.batch_size", "rehearse.batch_size"):
                continue  # a phase that not every method has
            raise EngramError(f"{flag} is not a setting of {config.method}; leave it out or choose another recipe")
        config = config.with_value(f"settings.{path}", value)
    changes = {name: getattr(flags, name) for name in ("seed", "backbone", "device", "precision")}
    return replace(config, **{name: value for name, value in changes.items() if value is not None})
