"""Changes of a recipe: made from `key=value`, and shown in the name of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engram.core.errors import EngramError, option
from engram.core.serialize import flatten
from engram.experiment.recipes import recipe, recipe_names
from engram.experiment.run_config import RunConfig

# Settings that may differ from the recipe in the same protocol: repetitions of it, and where it runs.
_FREE = ("recipe", "order", "seed", "data.path", "device", "precision")


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
    """Every setting by its dotted path; the memory's budget and size are one value, as a user types them."""
    leaves: dict[str, Any] = {}
    memory = {"memory": str(config.memory), "memory.selection": config.memory.selection}
    for key, value in config.to_plain().items():
        leaves |= memory if key == "memory" else flatten({key: value})
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
