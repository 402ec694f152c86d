"""Conversion of nested dataclasses to plain data and back, with type checks."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

from engram.core.errors import EngramError, UnknownNameError
from engram.core.fields import type_hints

T = TypeVar("T")


ADDED = "added"  # in the metadata of a field that files of earlier versions do not have


def to_plain(value: Any, for_digest: bool = False) -> Any:
    """Return a value as dictionaries, lists, strings and numbers, ready for JSON.

    for_digest: leave out fields that are marked as ADDED and have their default, so that a digest is as in old files.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: to_plain(item, for_digest)
            for field, item in items
            if not (for_digest and field.metadata.get(ADDED) and item == field.default)
        }
    if isinstance(value, (tuple, list)):
        return [to_plain(item, for_digest) for item in value]
    return value


def from_plain(cls: type[T], data: Any, where: str = "") -> T:
    """Make a dataclass from plain data. An unknown key or a value of the wrong type is an EngramError.

    where: dotted path of the data, for messages.
    """
    if not isinstance(data, dict):
        raise EngramError(f"{where or cls.__name__} should be a table of settings, got {data!r:.80}")
    hints = type_hints(cls)
    values: dict[str, Any] = {}
    for key, item in data.items():
        label = _check_name(cls, str(key), where)
        values[key] = _convert(hints[key], item, label)
    return cls(**values)


def replace_at(value: T, path: str, item: Any, where: str = "") -> T:
    """Return a copy of nested dataclasses in which the setting at a dotted path has another value.

    where: dotted path of `value` itself, for messages.
    """
    name, _, rest = path.partition(".")
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise EngramError(f"{where!r} has no settings inside, so {f'{where}.{name}'!r} cannot be set")
    label = _check_name(type(value), name, where)
    if rest:
        inner = replace_at(getattr(value, name), rest, item, label)
    else:
        inner = _convert(type_hints(type(value))[name], item, label)
    return dataclasses.replace(value, **{name: inner})


def _check_name(cls: Any, name: str, where: str) -> str:
    """Return the dotted path of a setting; raise UnknownNameError if the dataclass has none of this name."""
    prefix = f"{where}." if where else ""
    if name not in _field_names(cls):
        raise UnknownNameError("setting", name, _field_names(cls), prefix)
    return prefix + name


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def differences(before: Any, after: Any, where: str = "") -> dict[str, Any]:
    """Return the settings of `after`, by dotted path, whose value differs from that in `before` (same dataclass)."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(after):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(new) and type(old) is type(new):
            found |= differences(old, new, f"{where}{field.name}.")
        elif old != new:
            found[where + field.name] = new
    return found


def flatten(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted path."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def convert_setting(cls: type, name: str, item: Any) -> Any:
    """Convert a value to the type of a dataclass's field; raise an EngramError if that is not possible."""
    return _convert(type_hints(cls)[name], item, name)


def _convert(hint: Any, item: Any, label: str) -> Any:
    """Convert a value to an annotated type. Text is parsed as on the command line: "0.1", "true", "a,b", "none"."""
    if isinstance(hint, type):
        if not dataclasses.is_dataclass(hint):
            return _convert_scalar(hint, item, label)
        return item if isinstance(item, hint) else from_plain(hint, item, label)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and (item is None or item == "none"):
            return None
        rest = [argument for argument in arguments if argument is not type(None)]
        lists = [argument for argument in rest if typing.get_origin(argument) is tuple]
        is_list = isinstance(item, (list, tuple)) or (isinstance(item, str) and "," in item)
        return _convert(lists[0] if lists and is_list else rest[0], item, label)
    if origin is Literal:
        if item not in arguments:
            options = ", ".join(str(argument) for argument in arguments)
            raise EngramError(f"{label} must be one of {options}, got {item!r:.80}")
        return item
    if origin is tuple:
        if isinstance(item, str):
            item = [part for part in item.split(",") if part]
        if not isinstance(item, (list, tuple)):
            raise EngramError(f"{label} should be a list, got {item!r:.80}")
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
    raise EngramError(f"{label} should be {kind}, got {item!r:.80}")
