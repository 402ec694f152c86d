"""Constants and helpers that the kernels share: block sizes, which are powers of two, and compiler options."""

from __future__ import annotations

SMALLEST = 1e-12  # lower limit of a vector's length, as in torch.nn.functional.normalize
# For kernels that compute differences: with fused multiply-add, a - b of equal values would be a rounding error instead
# of zero, and the gradient of the distance would have a random direction.
EXACT = {"enable_fp_fusion": False}


def blocks_of(items: int, block: int) -> int:
    """Return the number of blocks for this many items."""
    return -(-items // block)


def power_of_two(items: int) -> int:
    """Return the smallest power of two that is at least `items`."""
    return 1 << (items - 1).bit_length()
