"""Memory limits: how much memory is free, and whether a stage of images fits in memory and on the device."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engram.core.errors import EngramError, option

if TYPE_CHECKING:
    import torch

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


def check_memory(need: int, what: str) -> None:
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


def free_device_memory(device: torch.device) -> int:
    """The bytes of a device's memory that tensors can still have."""
    if device.type != "cuda":
        return free_memory()
    import torch  # readers of images do without it

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def check_stage_fits(stage: int, images: int, size: tuple[int, int], device: torch.device, held: int = 0) -> None:
    """Refuses a stage whose images do not fit, before any of them is read.

    Counted are the pool in memory, the copy that exemplars are chosen from, and the pool on the device, unless it fits
    into the bytes held there already.
    """
    height, width = size
    once = images * height * width * 3
    if once < SMALL:
        return
    there = once if once > held else 0
    if device.type == "cuda":
        needs = [("of memory", 2 * once, free_memory()), ("on the GPU", there, free_device_memory(device))]
    else:
        needs = [("of memory", 2 * once + there, free_memory())]
    for where, need, free in needs:
        if need > SHARE * free:
            raise EngramError(
                f"stage {stage} trains on {images:,} images of {width}x{height} pixels, which need {need / 1e9:.1f} GB "
                f"{where}, and {free / 1e9:.1f} GB are free; give a smaller {option('image_size')} or {option('base')} "
                "(a stage's images are held whole, not read as they are needed)"
            )
