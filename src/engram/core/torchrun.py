"""Environment variables that torchrun and Slurm set: rank, number of processes, restarts."""

from __future__ import annotations

import os

from engram.core.errors import EngramError

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def is_launched() -> bool:
    """Whether torchrun, or a program that sets the same variables, has started several processes."""
    return all(os.environ.get(name) for name in LAUNCHED) and os.environ["WORLD_SIZE"] != "1"


def launched_rank() -> int:
    """The number of this process, from 0; 0 if it was started on its own."""
    rank = os.environ.get("RANK", "")
    return int(rank) if is_launched() and rank.isdigit() else 0


def processes_here() -> int:
    """The number of processes of this run on this machine."""
    return max(1, launched_number("LOCAL_WORLD_SIZE")) if is_launched() and "LOCAL_WORLD_SIZE" in os.environ else 1


def was_restarted() -> bool:
    """Whether torchrun or Slurm has started this command before, and now starts it again."""
    return start_number() != "0"


def start_number() -> str:
    """How often torchrun and Slurm have started this command again, as text; "0" at the first start."""
    numbers = [launched_number(name) for name in RESTARTS if os.environ.get(name)]
    return "-".join(map(str, numbers)) if any(numbers) else "0"


def launched_number(name: str) -> int:
    """The number in an environment variable."""
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise EngramError(f"the environment variable {name} should be a whole number, got {value!r:.40}")
    return int(value)
