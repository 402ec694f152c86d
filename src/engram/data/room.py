"""How much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

SMALL = 2**30  # bytes that need not be asked about
SHARE = 0.9  # of what is free that images may take


def free_memory() -> int:
    """The bytes of this machine's memory that a program can still have."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
