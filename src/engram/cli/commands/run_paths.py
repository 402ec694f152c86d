"""Where the files of a new run go, and what is known about a run that exists."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

from engram.core.errors import EngramError
from engram.models.store.generations import looks_like_model
from engram.runs.directory import ERROR, LOCK, MANIFEST, RESULT, free_directory
from engram.runs.reader import read_manifest, read_result

RUNS = Path("runs")
REPORT = "report.html"  # the last file that a demo writes
NO_STAGE = "no stage finished"


def run_status(path: Path, total: int, done: int) -> str:
    """Return the state of a run in a few words. total, done: its stages."""
    if done == total:
        return "finished"
    if is_running(path):
        return "running"
    has_failed = (path / ERROR).exists()
    if not done:
        return "failed in the base" if has_failed else NO_STAGE
    return f"{'failed' if has_failed else 'stopped'} after {'the base' if done == 1 else f'stage {done - 1}'}"


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


def refuse_model(path: Path) -> None:
    """Refuse a model directory that was given instead of a run directory."""
    if looks_like_model(path):
        raise EngramError(
            f"{path} is a model, not a run directory: 'engram info {path}' describes it, and 'engram learn {path} "
            "IMAGES' teaches it more classes"
        )


def new_directory(name: str, silent: bool) -> Path:
    """Return a free directory of that name under runs/, numbered if needed; print what is in the one before it."""
    place = free_directory(RUNS, name)
    if place.name != name and not silent:
        number = int(place.name.removeprefix(f"{name}-")) - 1
        before = RUNS / (name if number == 1 else f"{name}-{number}")
        print(f"engram: {_describe(before)}; this one goes to {place}", file=sys.stderr)
    return place


def _describe(place: Path) -> str:
    """Return what is in a directory, and how to continue a run that is not finished."""
    if any(place.glob(f"*/{MANIFEST}")):
        return f"the demo in {place} {'is finished' if (place / REPORT).exists() else 'was stopped'}"
    try:
        finished = len(read_result(place).stages) if (place / RESULT).exists() else 0
        status = run_status(place, len(read_manifest(place).stage_sizes), finished)
    except EngramError:
        return f"there is something in {place} already"
    if status in ("finished", "running"):
        return f"the run in {place} is {status}"
    how = "has not finished a stage" if status == NO_STAGE else status
    return f"the run in {place} {how} ('engram resume {place}' continues it)"
