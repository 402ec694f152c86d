"""Dataclasses to plain data and back, refusing what does not fit."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

from engram.core.errors import EngramError, suggest

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """The value as JSON would have it: dictionaries, lists, strings, numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, where: str = "") -> T:
    """A dataclass made of plain data; a key it does not have, or a value of another type, is refused by name."""
    if not isinstance(data, dict):
        raise EngramError(f"{where or cls.__name__} should be a table of settings, got {data!r}")
    hints = _hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    values: dict[str, Any] = {}
    for key, item in data.items():
        label = f"{where}.{key}" if where else str(key)
        if key not in names:
            raise EngramError(f"no setting {label!r}: {suggest(str(key), names, label.removesuffix(str(key)))}")
        values[key] = _convert(hints[key], item, label)
    return cls(**values)


def differences(before: Any, after: Any, where: str = "") -> dict[str, Any]:
    """The settings of a dataclass, by dotted path, that are not what they are in another of the same kind."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(after):
        one, other = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(other) and type(one) is type(other):
            found |= differences(one, other, f"{where}{field.name}.")
        elif one != other:
            found[where + field.name] = other
    return found


def dotted(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value of plain data by its dotted path."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def replace_at(value: T, path: str, item: Any, where: str = "") -> T:
    """A copy of nested dataclasses with the setting at a dotted path changed."""
    name, _, rest = path.partition(".")
    label = f"{where}.{name}" if where else name
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise EngramError(f"{where!r} has no settings inside, so {label!r} cannot be set")
    names = [field.name for field in dataclasses.fields(value)]
    if name not in names:
        raise EngramError(f"no setting {label!r}: {suggest(name, names, label.removesuffix(name))}")
    if rest:
        inner = replace_at(getattr(value, name), rest, item, label)
    else:
        inner = _convert(_hints(type(value))[name], item, label)
    return dataclasses.replace(value, **{name: inner})


def fitted(kind: type, name: str, item: Any) -> Any:
    """The item as the setting of that name of a dataclass wants it; refuses what does not fit."""
    return _convert(_hints(kind)[name], item, name)


def _convert(hint: Any, item: Any, label: str) -> Any:
    """The item as the annotation wants it; text is read as the command line would give it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and (item is None or item == "none"):
            return None
        rest = [argument for argument in arguments if argument is not type(None)]
        return _convert(rest[0], item, label)
    if origin is Literal:
        if item not in arguments:
            options = ", ".join(str(argument) for argument in arguments)
            raise EngramError(f"{label} must be one of {options}, got {item!r}")
        return item
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return item if isinstance(item, hint) else from_plain(hint, item, label)
    if origin is tuple:
        if isinstance(item, str):
            item = [part for part in item.split(",") if part]
        if not isinstance(item, (list, tuple)):
            raise EngramError(f"{label} should be a list, got {item!r}")
        return tuple(_convert(arguments[0], part, label) for part in item)
    return _convert_scalar(hint, item, label)


def _convert_scalar(hint: Any, item: Any, label: str) -> Any:
    if hint is bool and isinstance(item, str) and item.lower() in ("true", "false"):
        return item.lower() == "true"
    if hint is str or hint is bool:
        if isinstance(item, hint):
            return item
    elif hint in (int, float) and not isinstance(item, bool) and isinstance(item, (int, float, str)):
        try:
            number = hint(item)
        except (ValueError, OverflowError):
            number = None
        if number is not None and math.isfinite(number) and (isinstance(item, str) or number == item):
            return number
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))
    raise EngramError(f"{label} should be {kind}, got {item!r}")
