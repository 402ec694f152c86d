"""From what was typed to a command's options.

tyro parses and writes the help. What it would refuse is looked for beforehand, so that a slip gets one sentence.
"""

from __future__ import annotations

import dataclasses
import io
import math
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TextIO

import tyro
from tyro.conf import Positional

from engram.cli.options.runs import COMMANDS
from engram.core.errors import EngramError, suggest

ABOUT = """class-incremental learning you can use: a classifier that keeps learning new classes
and forgets as little as it can.

To begin:
    engram demo                      see it work, in about a minute
    engram learn MODEL IMAGES        your own images, in a folder for each class
    engram predict MODEL PATH        what is in an image
    engram run afc-mini-b10-s5       one run
    engram list                      every recipe
    engram COMMAND --help            more on a command
    engram --version                 the version
"""

_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
NARROWEST, WIDEST = 40, 100  # columns of prose
_KINDS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Argument:
    """One thing that can be typed: its name as typed, the type of its value, and whether it must be there.

    kind: bool for a flag without a value, int, float, str, or the tuple of the words that are allowed.
    """

    name: str
    kind: type | tuple[str, ...]
    positional: bool = False
    required: bool = False
    many: bool = False


def parse(arguments: Sequence[str]) -> tuple[str, Any]:
    """The command and its options; SystemExit(0) once help was printed."""
    name = arguments[0]
    if name in ("-h", "--help"):
        with _wrapped_help():
            tyro.cli(_all_commands(), prog="engram", description=ABOUT, args=["--help"])
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        raise EngramError(f"no {what} {name!r}: {suggest(name, [*COMMANDS, '--help', '--version'])}")
    rest, options = list(arguments[1:]), COMMANDS[name]
    # Beside --help tyro would leave what else was typed out of the line of usage.
    rest = ["--help"] if {"-h", "--help"} & set(rest) else check(name, known_arguments(options), rest)
    with _wrapped_help():
        return name, tyro.cli(options, prog=f"engram {name}", args=rest, config=_CONFIG)


class _Help(io.StringIO):
    """What is printed to a stream, kept until it is whole; for tyro it is as that stream is."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.encoding, self.is_terminal = stream.encoding, stream.isatty()

    def isatty(self) -> bool:
        return self.is_terminal


@contextmanager
def _wrapped_help() -> Iterator[None]:
    """Has tyro's help printed with its prose broken between words: tyro leaves paragraphs on one line."""
    shown = _Help(sys.stdout)
    try:
        with redirect_stdout(shown):
            yield
    finally:
        width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
        for line in shown.getvalue().splitlines():
            is_prose = line[:1].isalpha()  # not a frame, nor an indented example
            print(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if is_prose else line)


def _all_commands() -> Any:
    """A type whose help lists every command."""
    named = [
        Annotated[options, tyro.conf.subcommand(name, description=(options.__doc__ or "").partition("\n")[0])]
        for name, options in COMMANDS.items()
    ]
    return typing.Union[tuple(named)]  # noqa: UP007  (a union of as many as there are)


def known_arguments(options: type) -> list[Argument]:
    """What a command takes, read off its dataclass."""
    found: list[Argument] = []
    hints = typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += known_arguments(typing.cast(type, hint))
            continue
        markers: list[Any] = []
        while typing.get_origin(hint) is Annotated:
            markers += typing.get_args(hint)[1:]
            hint = typing.get_args(hint)[0]
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        many = typing.get_origin(hint) is tuple
        kind = typing.get_args(hint)[0] if many else hint
        if typing.get_origin(kind) is Literal:
            kind = typing.get_args(kind)
        positional = any(marker in markers for marker in _markers(Positional))
        metavar = next((m.metavar for m in markers if getattr(m, "metavar", None)), field.name)
        name = metavar.partition(" ")[0].strip("[]") if positional else "--" + field.name.replace("_", "-")
        required = positional and field.default is dataclasses.MISSING
        found.append(Argument(name, kind, positional, required, many))
    return found


def _markers(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation[int])[1:]


def check(command: str, known: Sequence[Argument], arguments: Sequence[str]) -> list[str]:
    """The arguments, flags in front, then -- and the rest; refuses the first that would not be understood, by name.

    What comes after -- is no flag, whatever it begins with.
    """
    flags = {argument.name: argument for argument in known if not argument.positional}
    loose: list[str] = []
    flagged: list[str] = []
    pending = list(arguments)
    while pending:
        text = pending.pop(0)
        if text == "--":
            loose += pending
            break
        if text == "-" or not text.startswith("-") or _is_number(text):
            loose.append(text)
            continue
        name, equals, value = text.partition("=")
        name = name.replace("_", "-")
        if name not in flags:
            raise EngramError(f"'engram {command}' has no flag {name!r}: {_nearest(name, flags, command)}")
        if flags[name].kind is bool:
            if equals:
                raise EngramError(f"{name} takes no value, got {value!r}")
            flagged.append(name)
            continue
        if not equals:
            if not pending or (pending[0].startswith("-") and not _is_number(pending[0])):
                raise EngramError(f"{name} needs a value; 'engram {command} --help' says which")
            value = pending.pop(0)
        if value == "None":  # which would count as none given
            raise EngramError(f"{name} cannot be 'None'; leave it out, or give what it should be")
        _check_value(name, flags[name].kind, value)
        flagged += [f"{name}={value}"] if equals else [name, value]
    _check_loose(command, [argument for argument in known if argument.positional], loose)
    return [*flagged, "--", *loose] if loose else flagged


def _nearest(name: str, flags: dict[str, Argument], command: str) -> str:
    near = suggest(name, flags)
    return near if near.startswith("did you mean") else f"'engram {command} --help' lists them"


def _check_loose(command: str, positional: Sequence[Argument], given: Sequence[str]) -> None:
    """Refuses what is missing or too much of those without a flag, in their order; the last may be many."""
    for place, argument in enumerate(positional):
        texts = given[place:] if argument.many else given[place : place + 1]
        if argument.required and not texts:
            raise EngramError(f"'engram {command}' needs {argument.name}; 'engram {command} --help' says more")
        for text in texts:
            if not text:
                raise EngramError(f"{argument.name} is empty; 'engram {command} --help' says what it should be")
            _check_value(argument.name, argument.kind, text)
    if len(given) > len(positional) and not any(argument.many for argument in positional):
        extra = given[len(positional)]
        raise EngramError(f"'engram {command}' does not take {extra!r}; 'engram {command} --help' says what it takes")


def _check_value(name: str, kind: type | tuple[str, ...], text: str) -> None:
    if isinstance(kind, tuple):
        if text not in kind:
            near = suggest(text, kind)
            hint = near if near.startswith("did you mean") else f"it is one of {', '.join(kind)}"
            raise EngramError(f"{name} cannot be {text!r}: {hint}")
    elif kind in _KINDS:
        try:
            usable = math.isfinite(kind(text))
        except ValueError:
            usable = False
        if not usable:
            raise EngramError(f"{name} should be {_KINDS[kind]}, got {text!r}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
