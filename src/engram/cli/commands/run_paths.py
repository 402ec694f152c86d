"""Where a run's files go, and what is said of the run that is there already."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

from engram.core.errors import EngramError
from engram.runs.directory import ERROR, LOCK, MANIFEST, RESULT, free_directory
from engram.runs.reader import read_manifest, read_result

RUNS = Path("runs")
REPORT = "report.html"  # of a demo, written last


def run_status(path: Path, total: int, done: int) -> str:
    """How far the run in a directory is, in a few words."""
    if done < total and is_running(path):
        return "running"
    return "finished" if done == total else _ended_after(done, "failed" if (path / ERROR).exists() else "stopped")


def _ended_after(done: int, how: str) -> str:
    if not done:
        return "not a stage yet" if how == "stopped" else f"{how} in the base"
    return f"{how} after the base" if done == 1 else f"{how} after stage {done - 1}"


def is_running(path: Path) -> bool:
    """Whether a process holds the run's lock."""
    try:
        with (path / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def new_directory(name: str, silent: bool) -> Path:
    """A directory of that name under runs/, numbered where there is one; says on stderr what is in the last of them."""
    place = free_directory(RUNS, name)
    before = _last_used(name, place)
    if before is not None and not silent:
        print(f"engram: {_describe(before)}; this one goes to {place}", file=sys.stderr)
    return place


def _last_used(name: str, free: Path) -> Path | None:
    """The directory before the free one, in the order in which `free_directory` tries them."""
    if free.name == name:
        return None
    number = int(free.name.removeprefix(f"{name}-")) - 1
    return free.parent / (name if number == 1 else f"{name}-{number}")


def _describe(place: Path) -> str:
    """What is in a directory, and for a run that is not finished how to go on with it."""
    if any(place.glob(f"*/{MANIFEST}")):
        return f"the demo in {place} {'is finished' if (place / REPORT).exists() else 'was stopped'}"
    try:
        finished = len(read_result(place).stages) if (place / RESULT).exists() else 0
        status = run_status(place, len(read_manifest(place).stage_sizes), finished)
    except EngramError:
        return f"there is something in {place} already"
    if status in ("finished", "running"):
        return f"the run in {place} is {status}"
    how = "has not finished a stage" if status == "not a stage yet" else status
    return f"the run in {place} {how} ('engram resume {place}' goes on with it)"
