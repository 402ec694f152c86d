"""Limits and choices of dataclass fields: declared with the field, checked when an instance is made."""

from __future__ import annotations

import operator
import types
import typing
from dataclasses import fields
from functools import cache
from typing import Any, Literal

from engram.core.errors import EngramError, UnknownNameError

# NaN fails each of these comparisons.
_COMPARISONS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def limits(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> dict[str, Any]:
    """Return `metadata` for a dataclass field that holds a number (or None), with the limits that it must keep."""
    return {"limits": {"at least": at_least, "above": above, "at most": at_most, "below": below}}


def check_fields(instance: Any) -> None:
    """Raise an EngramError if a field is outside its `limits` or not among the choices of its Literal annotation."""
    for name, choices, wanted in _checks(type(instance)):
        value = getattr(instance, name)
        if value is None:
            continue
        if choices and value not in choices:
            raise UnknownNameError(name, value, map(str, choices))
        if not all(_COMPARISONS[words](value, limit) for words, limit in wanted.items()):
            text = " and ".join(f"{words} {limit:g}" for words, limit in wanted.items())
            raise EngramError(f"{name} must be {text}, got {value}", parameter=name, value=value)


@cache
def _checks(cls: type) -> list[tuple[str, tuple[Any, ...], dict[str, float]]]:
    """Return name, choices and limits of each field of a dataclass that has choices or limits."""
    hints, found = type_hints(cls), []
    for each in fields(cls):
        limits = {words: limit for words, limit in each.metadata.get("limits", {}).items() if limit is not None}
        choices = _choices(hints[each.name])
        if choices or limits:
            found.append((each.name, choices, limits))
    return found


@cache
def type_hints(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    return typing.get_type_hints(cls)


@cache
def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, or of a Literal or None; empty for any other type."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(choice for argument in typing.get_args(hint) for choice in _choices(argument))
    return ()
