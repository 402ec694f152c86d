"""How options are declared: frozen dataclasses that tyro parses and prints help for."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from tyro.conf import Positional, arg

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class Shown:
    """Marker of a field: how the help shows it.

    Parameters
    ----------
    metavar: name of the value, such as PATH.
    default: what happens without the option, if the field's default does not say it, such as "the recipe's".
    positional: typed without a flag.
    """

    metavar: str | None = None
    default: str = ""
    positional: bool = False


@dataclass(frozen=True)
class Argument:
    """One thing that can be typed.

    Parameters
    ----------
    name: as typed (--image-size), or its metavar if it is positional.
    kind: bool for a flag without a value; int, float or str; or the allowed words.
    many: may be repeated.
    """

    name: str
    kind: type | tuple[str, ...]
    positional: bool = False
    required: bool = False
    many: bool = False


@dataclass_transform(frozen_default=True)
def options(declared: type[OptionsT]) -> type[OptionsT]:
    """Make a class a frozen dataclass of options, and add to each field what tyro has to know about it.

    The help ends each option with its default; an option that is off or has no value by default gets no such hint.
    """
    made = dataclass(frozen=True)(declared)
    hints = typing.get_type_hints(made, include_extras=True)
    for each in fields(typing.cast(Any, made)):
        if is_dataclass(hints[each.name]):
            continue
        _, shown = _unwrap(hints[each.name])
        hint = Annotated[hints[each.name], arg(metavar=shown.metavar, help_behavior_hint=_default_hint(each, shown))]
        made.__annotations__[each.name] = Positional[hint] if shown.positional else hint
    return made


def _default_hint(each: Field[Any], shown: Shown) -> str:
    if shown.default:
        return f"(default: {shown.default})"
    if each.default == ():
        return "(repeatable)"
    if each.default is MISSING or each.default is None or isinstance(each.default, bool):
        return ""
    return f"(default: {each.default:g})" if isinstance(each.default, float) else f"(default: {each.default})"


def _unwrap(hint: Any) -> tuple[Any, Shown]:
    """Return a field's type without its markers and without None, and its `Shown`."""
    shown = Shown()
    while typing.get_origin(hint) is Annotated:
        hint, *markers = typing.get_args(hint)
        shown = next((marker for marker in markers if isinstance(marker, Shown)), shown)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return hint, shown


def arguments_of(declared: type) -> list[Argument]:
    """List what a command takes, the options of its groups included."""
    found: list[Argument] = []
    hints = typing.get_type_hints(declared, include_extras=True)
    for each in fields(declared):
        if is_dataclass(hints[each.name]):
            found += arguments_of(typing.cast(type, hints[each.name]))
            continue
        kind, shown = _unwrap(hints[each.name])
        many = typing.get_origin(kind) is tuple
        kind = typing.get_args(kind)[0] if many else kind
        kind = typing.get_args(kind) if typing.get_origin(kind) is Literal else kind
        name = "--" + each.name.replace("_", "-")
        if shown.positional:
            name = (shown.metavar or each.name).partition(" ")[0].strip("[]")
        found.append(Argument(name, kind, shown.positional, each.default is MISSING, many))
    return found
