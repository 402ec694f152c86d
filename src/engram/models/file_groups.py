"""Group image files that belong together: by folder, by a pattern in their paths, or by the time they were taken."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Sequence

from engram.core.errors import EngramError, option
from engram.data.decode.image import time_taken

FOLDER, TIME, NONE = "folder", "time=", "none"
Keys = list[Hashable | None]


def check_grouping(how: str) -> None:
    """Refuse a way to group that is not one of those of `group_keys`."""
    _way(how)


def group_keys(paths: Sequence[str], labels: Sequence[Hashable], how: str, root: str) -> Keys:
    """Return a key for each file; files of a class with equal keys belong together, and None is alone.

    Parameters
    ----------
    how: "folder": the folder below the class folder that the file is in. "time=SECONDS": photographs of a class that
        were taken at most that many seconds apart, by their EXIF data. Anything else is a regular expression
        with one group, searched in the path below the root.
    """
    way = _way(how)
    if way is None:
        return [None] * len(paths)
    keys = way(paths, labels, root)
    if all(key is None for key in keys):
        raise EngramError(f"{option('group_by', how)} groups none of the {len(paths)} images; {_why(how)}")
    return keys


def _way(how: str) -> Callable[[Sequence[str], Sequence[Hashable], str], Keys] | None:
    if how == NONE:
        return None
    if how == FOLDER:
        return _by_folder
    if how.startswith(TIME):
        try:
            seconds = float(how.removeprefix(TIME))
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise EngramError(f"{option('group_by')} time= takes a number of seconds, such as time=10, got {how!r}")
        return lambda paths, labels, _: _by_time(paths, labels, seconds)
    try:
        pattern = re.compile(how)
    except re.error as error:
        raise EngramError(f"{option('group_by')} {how!r} is not a regular expression: {error}") from None
    if pattern.groups != 1:
        raise EngramError(
            f"{option('group_by')} must be folder, time=SECONDS, none, or a regular expression with one group in "
            f"parentheses, such as '(\\d+)_', got {how!r}"
        )
    return lambda paths, _, root: _by_pattern(paths, pattern, root)


def _why(how: str) -> str:
    if how == FOLDER:
        return "put the images of a class into folders inside its folder"
    if how.startswith(TIME):
        return "they have no time in their EXIF data (DateTimeOriginal)"
    return "the expression is searched in the path below the folder of images"


def _by_folder(paths: Sequence[str], labels: Sequence[Hashable], root: str) -> Keys:
    folders = [os.path.dirname(os.path.relpath(path, root)) for path in paths]
    return [None if folder in ("", str(label)) else folder for folder, label in zip(folders, labels, strict=True)]


def _by_pattern(paths: Sequence[str], pattern: re.Pattern[str], root: str) -> Keys:
    found = [pattern.search(os.path.relpath(path, root)) for path in paths]
    return [None if match is None else match.group(1) for match in found]


def _by_time(paths: Sequence[str], labels: Sequence[Hashable], seconds: float) -> Keys:
    keys: Keys = [None] * len(paths)
    taken = [
        (str(label), time, row) for row, label in enumerate(labels) if (time := time_taken(paths[row])) is not None
    ]
    before: tuple[str, float, int] | None = None
    start = 0
    for label, time, row in sorted(taken):
        if before is None or before[0] != label or time - before[1] > seconds:
            start = row
        keys[row] = start
        before = (label, time, row)
    return keys
