"""Whether the images of a stage fit where they are needed: all of them in memory, and again on the device."""

from __future__ import annotations

import torch

from engram.data.room import SHARE, SMALL, free_memory
from engram.errors import EngramError


def free_on(device: torch.device) -> int:
    """The bytes of a device's memory that tensors can still have."""
    if device.type != "cuda":
        return free_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def check_pool(stage: int, images: int, size: tuple[int, int], device: torch.device, held: int = 0) -> None:
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
        needs = [("of memory", 2 * once, free_memory()), ("on the GPU", there, free_on(device))]
    else:
        needs = [("of memory", 2 * once + there, free_memory())]
    for where, need, free in needs:
        if need > SHARE * free:
            raise EngramError(
                f"stage {stage} trains on {images:,} images of {width}x{height} pixels, which need {need / 1e9:.1f} GB "
                f"{where}, and {free / 1e9:.1f} GB are free; give a smaller --image-size or --base "
                "(a stage's images are held whole, not read as they are needed)"
            )
