"""A run is a directory: run.json, events.jsonl, result.json, stages/, checkpoint/."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.numpy import save

from engram.core.errors import EngramError, details_note, explain
from engram.core.events import Event
from engram.core.io import TEMPORARY, lock, read_json, remove_temporaries, write_bytes, write_json, writing
from engram.core.metrics import METRICS
from engram.core.provenance import METHOD_CODE, version, versions

FORMAT = 1
MANIFEST, RESULT, EVENTS, LOCK = "run.json", "result.json", "events.jsonl", ".lock"
ERROR = "error.txt"
CHECKPOINT = "checkpoint/state.safetensors"
UNKNOWN_CODE = "unknown"
_KINDS = {"config": dict, "config_hash": str, "order": dict, "stage_sizes": list, "data": dict}  # of run.json


class RunDirectory:
    """The files of one run. One process at a time may write to it."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any]) -> RunDirectory:
        """A new run directory; refuses one that already holds something."""
        with writing(path):
            if is_used(path):
                raise EngramError(
                    f"{path} already exists and is not empty; 'engram resume {path}' goes on with a run, "
                    "or choose another directory"
                )
            path.mkdir(parents=True, exist_ok=True)
        content = {
            "engram": version(),
            "format": FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        run = cls(path, {**content, **manifest, "versions": versions() | manifest.get("versions", {})})
        run._acquire()
        if is_used(path):
            run.close()
            raise EngramError(f"another process has begun a run in {path}; choose another directory")
        remove_temporaries(path)
        try:
            write_json(path / MANIFEST, run.manifest)
        except BaseException:
            run.close()
            with suppress(OSError):
                (path / LOCK).unlink()
                path.rmdir()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The run directory at that path, for going on with it."""
        run = cls(path, read_manifest(path))
        run._acquire()
        run._clean_up()
        return run

    @property
    def checkpoint(self) -> Path:
        """The file that the run resumes from."""
        return self.path / CHECKPOINT

    def has_results(self) -> bool:
        """Whether a stage has been finished: its result is written after its checkpoint."""
        return (self.path / RESULT).exists()

    def goes_on_with(self, method: Mapping[str, str], anew: bool) -> bool:
        """Whether the method's code is that on record; where not, run.json has it too from here on.

        method: its file and code, as versions have them. anew: nothing that was trained is kept.
        """
        codes, now = method_code(self.manifest).split(", "), method.get(METHOD_CODE, "")
        if codes[-1] == now:
            return True
        joined = ", ".join(code or UNKNOWN_CODE for code in ([now] if anew else [*codes, now]))
        self.manifest["versions"] = self.manifest.get("versions", {}) | {**method, METHOD_CODE: joined}
        write_json(self.path / MANIFEST, self.manifest)
        return False

    def append(self, event: Event) -> None:
        """Adds an event to events.jsonl."""
        line = json.dumps({"time": round(time.time(), 3), **event.to_json()})
        path = self.path / EVENTS
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def write_result(self, result: dict[str, Any]) -> None:
        """Puts result.json in place of the one before."""
        write_json(self.path / RESULT, result)

    def write_stage(self, stage: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps a stage's predictions and importance in stages/."""
        write_bytes(self.path / "stages" / f"{stage:03d}.safetensors", save(dict(arrays)))

    def write_error(self, error: Exception) -> None:
        """Keeps the traceback of an unexpected error in the directory, and a note with the error that says so."""
        if not explain(error)[1]:
            return
        with suppress(EngramError):  # a full disk, say: the error itself is what matters
            write_bytes(self.path / ERROR, "".join(traceback.format_exception(error)).encode())
            error.add_note(details_note(self.path / ERROR))

    def clear_error(self) -> None:
        """Removes what an earlier attempt left of its error."""
        with suppress(OSError):
            (self.path / ERROR).unlink(missing_ok=True)

    def close(self) -> None:
        """Lets another process write."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _clean_up(self) -> None:
        """Removes what a kill left half-written, and ends the line of events.jsonl that it cut off."""
        remove_temporaries(self.path)
        path = self.path / EVENTS
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with writing(path), path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def _acquire(self) -> None:
        with writing(self.path / LOCK):
            handle = lock(self.path / LOCK)
        if handle is None:
            raise EngramError(f"another process is writing to {self.path}; wait for it or stop it")
        self._lock = os.fdopen(handle, "w", encoding="utf-8")  # which is closed with whatever drops it


def read_manifest(path: Path) -> dict[str, Any]:
    """The run.json of a run directory, refused with a sentence where it is not one of ours."""
    if not path.is_dir():
        raise EngramError(f"there is no run directory at {path}")
    if not (path / MANIFEST).is_file():
        raise EngramError(f"{path} is not a run directory: it has no {MANIFEST}")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise EngramError(
            f"{path} was written by engram {manifest.get('engram', '?')} in format {manifest.get('format')}, "
            f"and this is engram {version()}, which reads format {FORMAT}; use the version that wrote it"
        )
    wrong = [key for key, kind in _KINDS.items() if not isinstance(manifest.get(key), kind)]
    if wrong:
        raise EngramError(f"{path / MANIFEST} has no usable {', '.join(wrong)}: it is damaged; start the run again")
    return manifest


def read_result(path: Path) -> dict[str, Any]:
    """The result.json of a run directory; of one that is not there yet, or damaged, no stage is known to be finished.

    A run that goes on writes it anew from its checkpoint.
    """
    try:
        result = read_json(path / RESULT)
    except EngramError:
        result = {}
    return result if _is_result(result) else {"stages": []}


def _is_result(result: Mapping[str, Any]) -> bool:
    """Whether all is there that a result is read for."""
    metrics: list[Any] = [result.get(key) for key in METRICS]
    return (
        isinstance(result.get("stages"), list)
        and isinstance(result.get("recipe"), str)
        and isinstance(result.get("seconds"), int | float)
        and all(isinstance(metric, dict) and metric.keys() == metrics[0].keys() for metric in metrics)
        and all(isinstance(value, int | float) for metric in metrics[:2] for value in metric.values())
    )


def method_code(manifest: Mapping[str, Any]) -> str:
    """The digest of the method's code that a run.json has, several where it was edited on the way; empty for none."""
    return manifest.get("versions", {}).get(METHOD_CODE, "")


def find_runs(root: Path) -> list[Path]:
    """The run directories in a directory and one level below, sorted; none where it does not exist."""
    found = {path.parent for pattern in ("*/", "*/*/") for path in root.glob(pattern + MANIFEST)}
    return sorted(found)


def runs_in(path: Path) -> list[Path]:
    """The directory itself where it is a run, or the runs in it, those of a demo included."""
    return [path] if (path / MANIFEST).exists() else find_runs(path)


def is_used(path: Path) -> bool:
    """Whether there is something at the path that a new run would write over."""
    return path.exists() and (not path.is_dir() or not all(_is_litter(entry.name) for entry in path.iterdir()))


def _is_litter(name: str) -> bool:
    """Whether a file of that name is all that a run leaves that was killed before it had written anything."""
    return name == LOCK or (name.startswith(".") and name.endswith(TEMPORARY))


def free_directory(parent: Path, name: str) -> Path:
    """A path under the parent that no run has yet: the name, or the name with a number."""
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path
