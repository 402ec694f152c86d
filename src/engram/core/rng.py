"""Random streams: one generator per purpose, each derived from the run's seed alone.

A stream is named by what it is for (`"shuffle"`, stage, phase, epoch), so nothing has to be saved to resume a
run, and drawing more numbers for one purpose never shifts another.
"""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose of the run with this seed."""
    name = "/".join(str(part) for part in (seed, *purpose))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    # Half of the 64 bits' range: torch takes seeds up to 2**63 - 1 on every device.
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
