"""What kernels share: sizes of blocks, which they want to be powers of two, and how they are compiled."""

from __future__ import annotations

SMALLEST = 1e-12  # a length below it counts as that, as in torch.nn.functional.normalize
# Of kernels that take differences: a product may not be fused into one, or a - b of equals is what rounding a left over
# and not zero, and the distance gets a gradient in whatever direction that points.
EXACT = {"enable_fp_fusion": False}


def blocks_of(items: int, block: int) -> int:
    """How many blocks so many items fill."""
    return -(-items // block)


def power_of_two(items: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (items - 1).bit_length()
