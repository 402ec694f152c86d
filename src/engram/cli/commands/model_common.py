"""What the commands about models have in common: labels as people type them, and reading class folders."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engram.cli.commands.run_common import check_threads, use_threads
from engram.cli.options.models import HardwareFlags
from engram.cli.text import is_live, shorten
from engram.core.errors import EngramError, suggest
from engram.core.io import typed_path
from engram.data.decode.image import EXTENSIONS
from engram.data.decode.prefetch import decode_files
from engram.data.sources.folder import list_ignored
from engram.data.store import Images
from engram.models.store.generations import looks_like_model

SHOWN = 20  # of the files that cannot be read, by name


def prepare_hardware(flags: HardwareFlags) -> None:
    """Takes over how many threads to use; refuses a number that cannot be."""
    check_threads(flags.threads)
    use_threads(flags.threads)


def exclude(quiet: bool, as_json: bool) -> None:
    """Refuses --quiet and --json together."""
    if quiet and as_json:
        raise EngramError("--quiet and --json exclude each other; give one of them")


def refuse_models(command: str, images: str) -> None:
    """Refuses a model given for the folder of images, or lying in it, where its pictures would be taken for a class."""
    root = typed_path(images)
    if looks_like_model(root):
        raise EngramError(f"{root} is a model, not a folder of images; the order is: engram {command} MODEL IMAGES")
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        if looks_like_model(entry) and not entry.name.startswith("."):
            raise EngramError(f"{entry} is a model, not a class folder; move it out of the folder of images")


def tell_passed_over(images: str) -> None:
    """Says on stderr which files in the folder of images are not read: somebody may think that they are."""
    others, loose = list_ignored(images)
    if others:
        names = shorten([printable(name) for name in others], 60)
        print(f"engram: left out what is no {', '.join(EXTENSIONS)} file: {names}", file=sys.stderr)
    if loose:
        names = shorten([printable(name) for name in loose], 60)
        print(f"engram: left out images that lie beside the class folders: {names}", file=sys.stderr)


def tell_others(others: Counter[str]) -> None:
    """Says on stderr how many files of which other endings there were in folders."""
    if others:
        kinds = [f"{count:,} {printable(ending) or 'without an ending'}" for ending, count in others.most_common()]
        print(f"engram: left out what is no {', '.join(EXTENSIONS)} file: {shorten(kinds, 60)}", file=sys.stderr)


def printable(value: Any) -> str:
    """The value as text on one line, control characters written out."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def confirmed(question: str) -> bool:
    """Whether a person says yes; where there is none, on a pipe, the command is enough."""
    if sys.stdin is None or not sys.stdin.isatty():  # none where it is closed
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def naming_flags(*flags: str) -> Iterator[None]:
    """Has errors that name an argument of Python, such as (restart=True), name these flags instead."""
    try:
        yield
    except EngramError as error:
        message = str(error)
        for flag in flags:
            message = message.replace(f"({flag.lstrip('-').replace('-', '_')}=True)", f"with {flag}")
        if message == str(error):
            raise
        raise EngramError(message) from None


def labels_by_name(labels: Iterable[Hashable]) -> dict[str, Hashable]:
    """The labels by what a folder of their images is called; of two that are written alike, 7 and "7", the text."""
    return {str(label): label for label in sorted(labels, key=lambda label: isinstance(label, str))}


def find_label(labels: Sequence[Hashable], typed: str, call: Callable[[str], str]) -> Hashable:
    """The label that was typed: text as it is, others as Python writes them. call: what says in Python which it is."""
    found = [label for label in labels if str(label) == typed]
    if len(found) == 1:
        return found[0]
    if found:
        calls = " or ".join(call(ascii(label)) for label in found)
        raise EngramError(f"{typed!r} is the name of {len(found)} classes; say in Python which one: {calls}")
    raise EngramError(f"the model knows no class {typed!r}: {suggest(typed, map(str, labels))}")


def bar(console: Console, what: str) -> Progress:
    """A progress bar that goes away at the end; it shows nothing where nothing can move."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # What is printed meanwhile stays on stdout, wherever the bar is.
    return Progress(*columns, console=console, transient=True, disable=not is_live(console), redirect_stdout=False)


def read_files(paths: Sequence[str], size: int, skip_bad: bool, console: Console | None) -> tuple[Images, list[int]]:
    """The images and the positions in `paths` that they came from; those skipped are named on stderr."""
    shown = console if console is not None else Console(quiet=True)
    with bar(shown, "reading images") as progress:
        task = progress.add_task("", total=len(paths))
        with naming_flags("--skip-bad"):
            images, kept, skipped = decode_files(
                paths,
                size,
                skip_bad=skip_bad,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    if skipped:
        tell_unreadable(skipped)
        print(f"engram: {len(skipped)} of {len(paths)} images could not be read and are left out", file=sys.stderr)
    return images, kept


def tell_unreadable(skipped: Iterable[tuple[str, str]], shown: int = SHOWN) -> None:
    """Names files that could not be read on stderr, each with the reason."""
    for number, (path, reason) in enumerate(skipped):
        if number == shown:
            print("engram: and more", file=sys.stderr)
            break
        print(f"engram: {printable(path)} cannot be read ({printable(reason)})", file=sys.stderr)
