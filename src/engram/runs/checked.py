"""JSON into frozen dataclasses, checked by their type hints. Every error names the file and the key."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from engram.core.errors import EngramError
from engram.core.io import MAX_DEPTH, parse_json
from engram.core.safe_folder import MissingFile, read_inside

T = TypeVar("T")
MAX_BYTES = 2**26  # of a JSON file
_LARGEST = 2**63  # whole numbers are smaller
_SHOWN = 60  # characters of a wrong value in a message

Count = Annotated[int, (0, math.inf)]
Size = Annotated[int, (1, math.inf)]
Seconds = Annotated[float, (0, math.inf)]
Percent = Annotated[float, (-1e-6, 100 + 1e-6)]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where data was read from, what a user can do if it is damaged, and how a message says that it is."""

    name: object
    remedy: str
    verdict: str = "cannot be used"

    def fail(self, what: str) -> NoReturn:
        """Raise the error for this source."""
        raise EngramError(f"{self.name} {self.verdict}: {what}; {self.remedy}")


def read_checked(cls: type[T], file: Path, remedy: str) -> T:
    """Read a JSON file as the dataclass `cls`; see `read_json_file`."""
    source = Source(file, remedy)
    return checked(cls, read_json_file(source, file), source)


def read_json_file(source: Source, file: Path) -> Any:
    """Read a JSON file; links, pipes and devices are refused."""
    try:
        content = read_inside(file.parent, file.name, MAX_BYTES)
    except MissingFile:
        source.fail("it is missing")
    return load_json(content, source)


def load_json(content: bytes | str, source: Source) -> Any:
    """Parse JSON."""
    try:
        return parse_json(content)
    except ValueError as error:
        source.fail(f"it is half-written or damaged: not valid JSON ({error})")


def checked(cls: type[T], data: Any, source: Source) -> T:
    """Return plain data as the dataclass `cls`.

    Keys must have the names of the fields; other keys are ignored. A field `content` holds the whole JSON object, with
    them. Numbers must be finite, those in `content` too.
    """
    try:
        return _object(cls, data)
    except _WrongValueError as wrong:
        source.fail(f"{wrong.path.lstrip('.')} {wrong.what}".strip())


class _WrongValueError(Exception):
    """A value of the wrong type or out of range, and the path of keys that leads to it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path = what, ""

    def below(self, step: str) -> _WrongValueError:
        self.path = step + self.path
        return self


def _wrong_type(value: Any, kind: str) -> _WrongValueError:
    return _WrongValueError(f"should be {kind}, got {repr(value)[:_SHOWN]}")


def _object(cls: type[T], data: Any) -> T:
    if type(data) is cls:
        return data
    if not isinstance(data, dict):
        raise _wrong_type(data, "a JSON object")
    values: dict[str, Any] = {}
    for name, (parse, required) in _fields(cls).items():
        if name == "content":
            continue
        if name in data:
            try:
                values[name] = parse(data[name])
            except _WrongValueError as wrong:
                raise wrong.below(f".{name}") from None
        elif required:
            raise _WrongValueError("is missing").below(f".{name}")
    if "content" in _fields(cls):  # last: the errors of the other fields say more
        values["content"] = _mapping(_plain, data)
    try:
        return cls(**values)
    except EngramError as error:  # of the dataclass's own checks
        raise _WrongValueError(str(error)) from None


@cache
def _fields(cls: type) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """The parser of each field, and whether the field is required."""
    hints = typing.get_type_hints(cls, include_extras=True)
    missing = dataclasses.MISSING
    return {
        field.name: (_parser(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
        if field.init
    }


@cache
def _parser(hint: Any) -> Callable[[Any], Any]:
    """Return a function that checks a value against a type hint and converts it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return partial(_object, hint)
    if origin is Annotated:
        return partial(_in_range, _parser(arguments[0]), arguments[1])
    if origin in (typing.Union, types.UnionType):
        parse = _parser(arguments[0])
        return lambda value: None if value is None else parse(value)
    if origin is tuple:
        return partial(_list, _parser(arguments[0]))
    if origin in (Mapping, dict):
        return partial(_mapping, _parser(arguments[1]))
    return {Any: _plain, float: _number}.get(hint, partial(_exactly, hint))


def _in_range(parse: Callable[[Any], Any], limits: tuple[float, float], value: Any) -> Any:
    number = parse(value)
    if not limits[0] <= number <= limits[1]:
        low, high = (f"{round(limit, 3) + 0.0:g}" for limit in limits)
        raise _WrongValueError(f"is {repr(number)[:_SHOWN]}, not in the range {low} to {high}")
    return number


def _list(parse: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong_type(value, "a list")
    items: list[Any] = []
    for item in value:
        try:
            items.append(parse(item))
        except _WrongValueError as wrong:
            raise wrong.below(f"[{len(items)}]") from None
    return tuple(items)


def _mapping(parse: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong_type(value, "a JSON object")
    items: dict[str, Any] = {}
    for key, item in value.items():
        try:
            items[key] = parse(item)
        except _WrongValueError as wrong:
            raise wrong.below(f".{key}") from None
    return items


def _number(value: Any) -> float:
    if type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _wrong_type(value, "a finite number")


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind or (kind is int and abs(value) >= _LARGEST):
        raise _wrong_type(value, {int: "a whole number", str: "text", bool: "true or false"}[kind])
    return value


def _plain(value: Any, depth: int = 0) -> Any:
    """Return any JSON value; refuse numbers that are not finite, and nesting that would exhaust the stack."""
    if depth > MAX_DEPTH:
        raise _WrongValueError("is nested too deeply")
    if isinstance(value, float):
        return _number(value)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _plain(item, depth + 1)
    return value
