"""How options are declared: frozen dataclasses that tyro parses and prints help for."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from tyro.conf import Positional, arg

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class Shown:
    """Marker of a field: how the help shows it.

    metavar: name of the value, such as PATH. default: what happens without the option, if the field's default does not
    say it, such as "the recipe's". positional: typed without a flag.
    """

    metavar: str | None = None
    default: str = ""
    positional: bool = False


@dataclass(frozen=True)
class Argument:
    """One thing that can be typed.

    name: as typed (--image-size), or its metavar if it is positional. kind: bool for a flag without a value; int, float
    or str; or the allowed words. many: may be repeated.
    """

    name: str
    kind: type | tuple[str, ...]
    positional: bool
    required: bool
    many: bool


ARGUMENTS: dict[type, list[Argument]] = {}  # what each class of options takes, its groups of options included


@dataclass_transform(frozen_default=True)
def options(declared: type[OptionsT]) -> type[OptionsT]:
    """Make a class a frozen dataclass of options, and add to each field what tyro has to know about it.

    The help ends each option with its default; an option that is off or has no value by default gets no such hint.
    """
    made: Any = dataclass(frozen=True)(declared)
    arguments: list[Argument] = []
    for each, hint in zip(fields(made), typing.get_type_hints(made, include_extras=True).values(), strict=True):
        if hint in ARGUMENTS:
            arguments += ARGUMENTS[hint]
            continue
        kind, shown = _unwrap(hint)
        arguments.append(_argument(each, kind, shown))
        hint = Annotated[hint, arg(metavar=shown.metavar, help_behavior_hint=_default_hint(each, shown))]
        made.__annotations__[each.name] = Positional[hint] if shown.positional else hint
    ARGUMENTS[made] = arguments
    return made


def _unwrap(hint: Any) -> tuple[Any, Shown]:
    """Return a field's type without its markers and without None, and its `Shown`."""
    shown = Shown()
    while typing.get_origin(hint) is Annotated:
        hint, *markers = typing.get_args(hint)
        shown = next((marker for marker in markers if isinstance(marker, Shown)), shown)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return hint, shown


def _argument(each: Field[Any], kind: Any, shown: Shown) -> Argument:
    many = typing.get_origin(kind) is tuple
    kind = typing.get_args(kind)[0] if many else kind
    kind = typing.get_args(kind) if typing.get_origin(kind) is Literal else kind
    name = "--" + each.name.rstrip("_").replace("_", "-")  # from_ is --from
    if shown.positional:
        name = (shown.metavar or each.name).partition(" ")[0].strip("[]")
    return Argument(name, kind, shown.positional, each.default is MISSING, many)


def _default_hint(each: Field[Any], shown: Shown) -> str:
    if shown.default:
        return f"(default: {shown.default})"
    if each.default == ():
        return "(repeatable)"
    if each.default is MISSING or each.default is None or isinstance(each.default, bool):
        return ""
    return f"(default: {each.default:g})" if isinstance(each.default, float) else f"(default: {each.default})"
