"""Processes of lessons and of checks: how they compute, how they are started and asked to stop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from engram.experiment.learner_config import Device

HOLDOUT = 0.2
# A new interpreter instead of multiprocessing, which would run the user's main script again.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from engram.serve.lesson_process import main; main()"
)


@dataclass(frozen=True)
class ChildOptions:
    """How processes of lessons and checks compute.

    threads: None is torch's choice. new_model: arguments of `ModelConfig.choose` for a model that does not exist yet.
    """

    device: Device = "auto"
    threads: int | None = None
    checkpoint_minutes: float = 2.0
    new_model: Mapping[str, Any] = field(default_factory=lambda: {"validation": HOLDOUT})


def start_process(request: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a process that carries out a request, see `lesson_process`."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps([*map(str, sys.path)])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C is for the server
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its end says so
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    return process


def ask_to_stop(process: subprocess.Popen[str]) -> None:
    """Ask a lesson to save and end."""
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # it has ended
        process.stdin.write("stop\n")
        process.stdin.flush()
