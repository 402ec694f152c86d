"""Write and find run directories: run.json, events.jsonl, result.json, stages/, checkpoint/."""

from __future__ import annotations

import fcntl
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
from engram.core.io import TEMPORARY, lock, remove_temporaries, write_json, writing
from engram.core.provenance import CODE, version, versions
from engram.core.safe_folder import Folder, MissingFile

FORMAT = 1
MANIFEST, RESULT, EVENTS, LOCK = "run.json", "result.json", "events.jsonl", ".lock"
ERROR = "error.txt"
CHECKPOINT = "checkpoint/state.safetensors"
UNKNOWN_CODE = "unknown"
# Prefixes of the arrays of a stage, before the predictor's name; the second is with the stage of each image known.
PREDICTIONS, TASK_PREDICTIONS = "predictions.", "task_predictions."


class RunInUse(EngramError):
    """Another process is doing the run."""


class RunExists(EngramError):
    """The directory of a new run is not empty."""


class RunDirectory:
    """Writes the files of one run. Only one process at a time may write to it. manifest: the content of run.json."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any]) -> RunDirectory:
        """Create a run directory; it must not exist yet, or be empty."""
        with writing(path):
            if is_used(path):
                if (path / LOCK).exists():
                    found = cls(path, {})
                    found._acquire()  # raises RunInUse if another process has just started the run
                    found.close()
                raise RunExists(
                    f"{path} already exists and is not empty; 'engram resume {path}' continues a run, "
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
            raise RunInUse(f"another process has started a run in {path}; choose another directory")
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
    def open(cls, path: Path, manifest: dict[str, Any]) -> RunDirectory:
        """Open an existing run directory to continue its run. manifest: the content of its run.json."""
        run = cls(path, manifest)
        run._acquire()
        try:
            run._clean_up()
        except BaseException:
            run.close()
            raise
        return run

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint."""
        return self.path / CHECKPOINT

    def is_started(self) -> bool:
        """Whether there is a checkpoint, or should be one: the result of a stage is written after it."""
        with Folder.open(self.path) as folder:
            return folder.has(CHECKPOINT) or folder.has(RESULT)

    def record_code(self, own: Mapping[str, str], restart: bool) -> list[str]:
        """Return the kinds ("method", ...) whose code is not the code in run.json, and add their code to run.json.

        own: the entries in `versions` of the user's method, backbone etc. restart: nothing of the earlier training is
        used.
        """
        recorded = self.manifest.get("versions", {})
        changed: dict[str, str] = {}
        for key in (key for key in {**recorded, **own} if key.endswith(CODE)):
            codes, now = recorded.get(key, "").split(", "), own.get(key, "")
            if codes[-1] != now:
                changed[key] = ", ".join(code or UNKNOWN_CODE for code in ([now] if restart else [*codes, now]))
        if changed:
            files = {key: name for key, name in own.items() if not key.endswith(CODE)}
            self.manifest["versions"] = recorded | files | changed
            write_json(self.path / MANIFEST, self.manifest)
        return [key.removesuffix(CODE) for key in changed]

    def append(self, event: Event) -> None:
        """Append an event to events.jsonl."""
        line = json.dumps({"time": round(time.time(), 3), **event.to_json()}, allow_nan=False)
        with Folder.open(self.path) as folder:
            folder.append(EVENTS, f"{line}\n".encode())

    def write_result(self, result: dict[str, Any]) -> None:
        """Replace result.json."""
        write_json(self.path / RESULT, result)

    def write_stage(self, stage: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the predictions and the importance of a stage to stages/."""
        with Folder.open(self.path) as folder:
            folder.write(stage_name(stage), save(dict(arrays)))

    def write_error(self, error: Exception) -> None:
        """Save the traceback of an unexpected error in the directory, and add a note to the error that says where."""
        if not explain(error)[1]:
            return
        with suppress(EngramError):  # such as a full disk: the error itself is more important
            with Folder.open(self.path) as folder:
                text = "".join(traceback.format_exception(error))
                folder.write(ERROR, text.encode(errors="backslashreplace"))
            error.add_note(details_note(self.path / ERROR))

    def clear_error(self) -> None:
        """Remove the traceback of an earlier attempt."""
        with suppress(OSError):
            (self.path / ERROR).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _clean_up(self) -> None:
        """Remove half-written files of a killed process, and end a line of events.jsonl that was cut off."""
        remove_temporaries(self.path)
        with Folder.open(self.path) as folder, suppress(MissingFile):
            with folder.open_file(EVENTS) as (file, size):
                file.seek(max(0, size - 1))
                cut_off = file.read(1) != b"\n"
            if cut_off:
                folder.append(EVENTS, b"\n")

    def _acquire(self) -> None:
        with writing(self.path / LOCK):
            handle = lock(self.path / LOCK)
        if handle is None:
            raise RunInUse(f"another process is writing to {self.path}; wait for it or stop it")
        self._lock = os.fdopen(handle, "w", encoding="utf-8")  # closed when the file object is deleted


def stage_name(stage: int) -> str:
    """Return the name of the file with the arrays of a stage."""
    return f"stages/{stage:03d}.safetensors"


def is_running(path: Path) -> bool:
    """Return whether a process holds the lock of the run."""
    try:
        with Folder.open(path) as folder, folder.open_file(LOCK) as (file, _):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (EngramError, MissingFile, OSError):
        return False
    return False


def find_runs(root: Path) -> list[Path]:
    """Return the run directories in a directory and one level below, sorted."""
    found = {path.parent for pattern in ("*/", "*/*/") for path in root.glob(pattern + MANIFEST)}
    return sorted(found)


def runs_in(path: Path) -> list[Path]:
    """Return the directory itself if it is a run, otherwise the runs in it."""
    return [path] if (path / MANIFEST).exists() else find_runs(path)


def is_used(path: Path) -> bool:
    """Whether a new run at the path would overwrite something."""
    return path.exists() and (not path.is_dir() or not all(_is_litter(entry.name) for entry in path.iterdir()))


def _is_litter(name: str) -> bool:
    """Whether a file of this name is left over from a run that was killed before it wrote anything."""
    return name == LOCK or (name.startswith(".") and name.endswith(TEMPORARY))


def free_directory(parent: Path, name: str) -> Path:
    """Return an unused path under the parent: the name, or the name and a number."""
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path
