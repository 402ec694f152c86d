"""Memory limits: how much memory is free, and whether images or weights fit into it.

Whether the images of a stage are all on the device or streamed is decided in experiment/image_placement.py.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engram.core.errors import EngramError

if TYPE_CHECKING:
    import torch

UNCHECKED_BYTES = 2**30  # smaller requests always pass
MAX_SHARE = 0.9  # share of the free memory that images or weights may take
_KEPT_BYTES = 2**26  # largest block that the C library keeps when it is freed, if it allows this
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def free_memory() -> int:
    """Return the bytes of main memory that a program can still allocate."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_device_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory that tensors can still use, within what the process is allowed."""
    if device.type != "cuda":
        return free_memory()
    import torch  # image readers must work without importing it

    allocated = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device.index) * total)
    return min(free + torch.cuda.memory_reserved(device) - allocated, allowed - allocated)


def return_memory() -> None:
    """Return freed memory to the operating system, if the C library supports it.

    glibc keeps freed memory, and a process that learns classes one after the other allocates blocks of ever new sizes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for the next ones instead of returning them at once, if it supports that.

    A network frees and allocates maps of tens of megabytes for every batch of photographs. If they are returned, the
    system clears their pages anew each time, which took a third of the time of a lesson on a CPU.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        # Older versions of glibc refuse more than half of it. The second setting alone would return every large block.
        if library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES) or library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES // 2):
            library.mallopt(_TRIM_THRESHOLD, 2 * _KEPT_BYTES)


def check_memory(
    need: int, what: str, advice: str = "use fewer or smaller images", device: torch.device | None = None
) -> None:
    """Raise an EngramError if `what` (a plural) needs more bytes than most of the free memory, or of the device's."""
    if device is not None and device.type == "cuda":
        _check(need, free_device_memory(device), f"{what} need", "on the GPU", advice)
    else:
        _check(need, free_memory(), f"{what} need", "of memory", advice)


def _check(need: int, free: int, subject: str, where: str, advice: str) -> None:
    if need >= UNCHECKED_BYTES and need > MAX_SHARE * free:
        raise EngramError(f"{subject} {need / 1e9:.1f} GB {where}, and {free / 1e9:.1f} GB are free; {advice}")
