"""Whether the hand-written Triton kernels can run, and what they share: block sizes and compiler options.

The kernels take and return tensors and do not depend on networks. Import their modules only if there is a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

SMALLEST = 1e-12  # lower limit of a vector's length, as in torch.nn.functional.normalize
# For kernels that compute differences: with fused multiply-add, a - b of equal values would be a rounding error instead
# of zero, and the gradient of the distance would have a random direction.
EXACT = {"enable_fp_fusion": False}
OLDEST = (8, 0)  # compute capability of the first GPUs with bf16


def reason_unavailable(device: torch.device) -> str | None:
    """Return the reason why the kernels cannot run on a device, or None if they can."""
    if device.type != "cuda":
        return "they are for a GPU"
    if not _has_triton():
        return "they are written in Triton, which is not installed"
    if _capability(device) < OLDEST:
        return f"they are for GPUs of compute capability {OLDEST[0]}.{OLDEST[1]} and later"
    return None


def is_available_for(tensor: Tensor) -> bool:
    """Return whether the kernels can run on the device of a tensor."""
    return tensor.is_cuda and reason_unavailable(tensor.device) is None


@cache  # cached: a step that is recorded as a CUDA graph must not query the device
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def blocks_of(items: int, block: int) -> int:
    """Return the number of blocks for this many items."""
    return -(-items // block)


def power_of_two(items: int) -> int:
    """Return the smallest power of two that is at least `items`."""
    return 1 << (items - 1).bit_length()
