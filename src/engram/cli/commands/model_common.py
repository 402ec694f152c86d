"""Helpers of the commands about models: labels as typed, reading class folders, notices on stderr."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from engram.cli.commands.run_common import check_threads, use_threads
from engram.cli.options.models import HardwareFlags, NewModelFlags, TableFlags
from engram.cli.streams import tell
from engram.cli.text import bar, make_console, shorten
from engram.core.errors import EngramError, suggest
from engram.core.io import typed_path
from engram.data.decode.formats import EXTENSIONS, HEIC_EXTENSIONS, READS_HEIC
from engram.data.decode.prefetch import decode_files
from engram.data.sources.folder import list_classes, list_ignored, list_nested, why_not_class_folders
from engram.data.sources.table import is_table, read_table
from engram.data.store import Images
from engram.models.model_config import LARGEST_SIDE
from engram.models.store.generations import looks_like_model

SHOWN = 20  # unreadable files to name
HOLDOUT = 0.2


def prepare_hardware(flags: HardwareFlags) -> None:
    """Set the number of CPU threads; refuse an impossible number."""
    check_threads(flags.threads)
    use_threads(flags.threads)


def exclude(quiet: bool, as_json: bool) -> None:
    """Refuse --quiet together with --json."""
    if quiet and as_json:
        raise EngramError("--quiet and --json exclude each other; give one of them")


def refuse_models(command: str, images: str) -> None:
    """Refuse a model as the folder of images or inside it, where its pictures would become a class."""
    root = typed_path(images)
    if looks_like_model(root):
        raise EngramError(f"{root} is a model, not a folder of images; the order is: engram {command} MODEL IMAGES")
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        if looks_like_model(entry) and not entry.name.startswith("."):
            raise EngramError(f"{entry} is a model, not a class folder; move it out of the folder of images")


def config_arguments(flags: NewModelFlags, is_new: bool) -> dict[str, Any]:
    """Return the flags of a model's configuration as arguments of `ModelConfig.choose`."""
    settings: dict[str, str] = {}
    for text in flags.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise EngramError(f"--set takes KEY=VALUE, got {text!r}")
        settings[key.strip()] = value.strip()
    return {
        "method": flags.method,
        "backbone": flags.backbone,
        "weights": flags.weights,
        "image_size": flags.image_size,
        "memory": flags.memory,
        "validation": HOLDOUT if is_new and flags.holdout is None else flags.holdout,
        "flip": False if flags.no_mirror else None,
        "augment": flags.augment,
        "seed": flags.seed,
        "settings": settings or None,
    }


def report_path(typed: str | None) -> Path | None:
    """Return the file that --report names; refuse one that cannot be written, before minutes of work."""
    if typed is None:
        return None
    path = typed_path(typed)
    if path.suffix.lower() not in (".html", ".htm"):
        raise EngramError(f"the report must be a file that ends in .html, got {path}")
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not there.is_dir() or not os.access(path if path.exists() else there, os.W_OK):
        raise EngramError(f"the report {path} cannot be written: it is a folder, or you may not write there")
    return path


def check_new_model(flags: NewModelFlags) -> None:
    """Refuse impossible values before anything is read."""
    if flags.holdout is not None and not 0 <= flags.holdout < 1:
        raise EngramError(f"--holdout must be a fraction of 0 or more and below 1, got {flags.holdout:g}")
    side = flags.image_size
    if side is not None and not 8 <= side <= LARGEST_SIDE:
        raise EngramError(f"--image-size must be 8 to {LARGEST_SIDE} pixels, got {side}")


def tell_skipped_files(images: str) -> None:
    """Print on stderr which files in the folder of images are not read."""
    others, loose = list_ignored(images)
    if others:
        tell(f"left out files that are not {', '.join(EXTENSIONS)}: {shorten(others, 60)}{_heic_hint(others)}")
    if loose:
        tell(f"left out images that are not in a class folder: {shorten(loose, 60)}")


def list_labelled(
    images: str, flags: TableFlags, left_out: list[str] | None = None, skip_bad: bool = False
) -> tuple[list[str], list[str]]:
    """List image files and the label of each, from a table, nested folders or a folder of class folders.

    Files in folders that are not read are named on stderr. left_out, skip_bad: as for `list_classes`.
    """
    if is_table(images):
        if flags.nested:
            raise EngramError(f"--nested is for folders, and {images} is a table; leave it out")
        return read_table(images, flags.path_column, flags.label_column)
    found = list_nested(images) if flags.nested else list_classes(images, left_out, skip_bad)
    tell_skipped_files(images)
    return found


def nesting_problem(images: str, flags: TableFlags, is_new: bool = True) -> str | None:
    """Return a sentence if the class folders seem to be folders of class folders; see `why_not_class_folders`."""
    return None if flags.nested or is_table(images) else why_not_class_folders(images, is_new)


def tell_other_files(others: Counter[str]) -> None:
    """Print on stderr how many files with other extensions were left out."""
    if others:
        kinds = [f"{count:,} {ending or 'without an extension'}" for ending, count in others.most_common()]
        tell(f"left out files that are not {', '.join(EXTENSIONS)}: {shorten(kinds, 60)}{_heic_hint(others)}")


def _heic_hint(names: Iterable[str]) -> str:
    """Return how HEIC files can be read, if there are some and they cannot."""
    has_heic = any(name.lower().endswith(HEIC_EXTENSIONS) for name in names)
    return "; to read HEIC, pip install pillow-heif" if has_heic and not READS_HEIC else ""


def find_label(labels: Sequence[Hashable], typed: str, call: Callable[[str], str]) -> Hashable:
    """Return the label that was typed.

    call: returns the Python call that selects a label, to suggest if several labels have that name.
    """
    found = [label for label in labels if str(label) == typed]
    if len(found) == 1:
        return found[0]
    if found:
        calls = " or ".join(call(ascii(label)) for label in found)
        raise EngramError(f"{typed!r} is the name of {len(found)} classes; choose one in Python: {calls}")
    raise EngramError(f"the model knows no class {typed!r}: {suggest(typed, map(str, labels))}")


def read_files(paths: Sequence[str], size: int, skip_bad: bool, console: Console | None) -> tuple[Images, list[int]]:
    """Read image files; return the images and their positions in `paths`. Skipped files are named on stderr."""
    shown = console if console is not None else make_console(quiet=True)
    with bar(shown, "reading images") as progress:
        task = progress.add_task("", total=len(paths))
        images, kept, skipped = decode_files(
            paths,
            size,
            skip_bad=skip_bad,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if skipped:
        tell_unreadable(skipped)
        tell(f"{len(skipped)} of {len(paths)} images could not be read and are left out")
    return images, kept


def tell_unreadable(skipped: Iterable[tuple[str, str]], shown: int = SHOWN) -> None:
    """Print on stderr the files that cannot be read, each with the reason."""
    for number, (path, reason) in enumerate(skipped):
        if number == shown:
            tell("and more")
            break
        tell(f"{path} cannot be read ({reason})")
