"""From the typed arguments to a command's options.

tyro reads the values and prints the help. Mistakes are found before, so that each gets one sentence.
"""

from __future__ import annotations

import io
import math
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any, TextIO

import tyro

from engram.cli.options.all_commands import COMMANDS
from engram.cli.options.declare import ARGUMENTS, Argument
from engram.core.errors import EngramError, UnknownNameError, nearest, suggest

ABOUT = """class-incremental learning you can use: a classifier that keeps learning new classes
and forgets as little as it can.

To begin:
    engram demo                      see it work, in a few minutes
    engram learn MODEL IMAGES        learn your own images, in one folder per class
    engram predict MODEL PATH        classify an image
    engram serve MODEL               do both on a page in the browser
    engram run afc-mini-b10-s5       train one recipe
    engram list                      list data sets, methods and recipes
    engram COMMAND --help            show the options of a command
    engram --version                 show the version
    engram --print-completion bash   print a completion script for bash or zsh
"""
COMPLETION, SHELLS = "--print-completion", ("bash", "zsh")

_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
MIN_COLUMNS, MAX_COLUMNS = 40, 100  # of paragraphs
_KINDS = {int: "a whole number", float: "a number"}


def parse(typed: Sequence[str]) -> tuple[str, Any]:
    """Return the command and its options. Raise SystemExit(0) after printing help or a completion script."""
    name, *rest = typed
    if name in ("-h", "--help"):
        with _wrapped_help():
            tyro.cli(_all_commands(), prog="engram", description=ABOUT, args=["--help"])
    if name == COMPLETION:
        if len(rest) != 1 or rest[0] not in SHELLS:
            raise EngramError(f"{COMPLETION} needs the name of a shell: {', '.join(SHELLS)}")
        tyro.cli(_all_commands(), prog="engram", args=["--tyro-print-completion", *rest], config=_CONFIG)
    if name not in COMMANDS:
        valid = [*COMMANDS, "--help", "--version", COMPLETION]
        raise UnknownNameError("flag" if name.startswith("-") else "command", name, valid)
    # tyro omits arguments that were typed before --help from the usage line.
    rest = ["--help"] if {"-h", "--help"} & set(rest) else arrange(name, ARGUMENTS[COMMANDS[name]], rest)
    with _wrapped_help():
        return name, tyro.cli(COMMANDS[name], prog=f"engram {name}", args=rest, config=_CONFIG)


class _Buffer(io.StringIO):
    """Collects text; to tyro it looks like the stream that the text is printed to afterwards."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.encoding, self._is_terminal = stream.encoding, stream.isatty()

    def isatty(self) -> bool:
        return self._is_terminal


@contextmanager
def _wrapped_help() -> Iterator[None]:
    """Wrap the paragraphs of the help that tyro prints; tyro prints each on one line."""
    buffer = _Buffer(sys.stdout)
    try:
        with redirect_stdout(buffer):
            yield
    finally:
        width = min(max(shutil.get_terminal_size().columns, MIN_COLUMNS), MAX_COLUMNS)
        for line in buffer.getvalue().splitlines():
            is_paragraph = line[:1].isalpha()  # not a frame, nor an indented example
            print(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if is_paragraph else line)


def _all_commands() -> Any:
    """Return a type whose help lists every command."""
    named = [
        Annotated[
            options,
            tyro.conf.subcommand(name, description=" ".join((options.__doc__ or "").partition("\n\n")[0].split())),
        ]
        for name, options in COMMANDS.items()
    ]
    return typing.Union[tuple(named)]  # noqa: UP007  (a union of a variable number of types)


def arrange(command: str, known: Sequence[Argument], typed: Sequence[str]) -> list[str]:
    """Return the arguments with flags first, then -- and the positional ones, which may be typed in any order.

    Raises an error about the first one that tyro would not accept. After a typed -- everything is positional.
    """
    flags = {argument.name: argument.kind for argument in known if not argument.positional}
    positional: list[str] = []
    flagged: list[str] = []
    rest = list(typed)
    while rest:
        text = rest.pop(0)
        if text == "--":
            positional += rest
            break
        if not _is_flag(text):
            positional.append(text)
            continue
        name, equals, value = text.partition("=")
        name = name.replace("_", "-")
        if name not in flags:
            hint = _closest(name, flags, f"'engram {command} --help' lists them")
            raise EngramError(f"'engram {command}' has no flag {name!r}: {hint}")
        flagged.append(name)
        if flags[name] is bool:
            if equals:
                raise EngramError(f"{name} takes no value, got {value!r}")
            continue
        if not equals:
            if not rest or _is_flag(rest[0]):
                raise EngramError(f"{name} needs a value; 'engram {command} --help' explains it")
            value = rest.pop(0)
        if value == "None":  # tyro would read it as no value
            raise EngramError(f"{name} cannot be 'None'; leave it out, or give a value")
        _check_value(name, flags[name], value)
        flagged[-1] = f"{name}={value}"
    _check_positional(command, [argument for argument in known if argument.positional], positional)
    return [*flagged, "--", *positional] if positional else flagged


def _check_positional(command: str, known: Sequence[Argument], typed: Sequence[str]) -> None:
    """Raise an error if a positional argument is missing, empty or one too many; the last may be repeated."""
    for place, argument in enumerate(known):
        texts = typed[place:] if argument.many else typed[place : place + 1]
        if argument.required and not texts:
            raise EngramError(f"'engram {command}' needs {argument.name}; 'engram {command} --help' explains it")
        for text in texts:
            if not text:
                raise EngramError(f"{argument.name} is empty; 'engram {command} --help' explains it")
            _check_value(argument.name, argument.kind, text)
    if len(typed) > len(known) and not any(argument.many for argument in known):
        extra = typed[len(known)]
        raise EngramError(f"'engram {command}' does not take {extra!r}; 'engram {command} --help' lists what it takes")


def _check_value(name: str, kind: type | tuple[str, ...], text: str) -> None:
    if isinstance(kind, tuple) and text not in kind:
        hint = _closest(text, kind, f"it must be one of {', '.join(kind)}")
        raise EngramError(f"{name} cannot be {text!r}: {hint}")
    if kind in (int, float):
        try:
            is_usable = math.isfinite(kind(text))
        except ValueError:
            is_usable = False
        if not is_usable:
            raise EngramError(f"{name} must be {_KINDS[kind]}, got {text!r}")


def _closest(name: str, valid: Iterable[str], otherwise: str) -> str:
    """Return a question that names the closest valid names, or another hint if none is close."""
    return suggest(name, valid) if nearest(name, valid) else otherwise


def _is_flag(text: str) -> bool:
    """Whether a text is a flag, not a value; a number may begin with a dash, and a single dash is a value."""
    try:
        float(text)
    except ValueError:
        return text.startswith("-") and text != "-"
    return False
