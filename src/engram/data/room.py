"""How much memory there is, and whether something fits into it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from engram.errors import EngramError

SMALL = 2**30  # bytes that need not be asked about
SHARE = 0.9  # of what is free that images or weights may take


def free_memory() -> int:
    """The bytes of this machine's memory that a program can still have."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_room(need: int, what: str) -> None:
    """Refuses what would need more than most of the memory that is free."""
    free = free_memory()
    if need > SMALL and need > SHARE * free:
        raise EngramError(
            f"{what} need {need / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free; use fewer or smaller images"
        )


def return_memory() -> None:
    """Gives freed memory back to the system, where its C library can.

    glibc keeps what was freed, and a process that learns classes one after the other asks for pieces of ever other
    sizes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
