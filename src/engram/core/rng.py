"""Random numbers: one generator per purpose, each derived from the run's seed.

A generator is named by its purpose (`"shuffle"`, stage, phase, epoch). So resuming a run needs no saved generator
state, and drawing more numbers for one purpose never changes those of another.
"""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return the CPU generator for one purpose in the run with this seed."""
    name = "/".join(str(part) for part in (seed, *purpose))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    # 63 bits: torch accepts seeds up to 2**63 - 1 on every device.
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
