"""Whether the hand-written Triton kernels can run: for residual backbones, heads and losses.

The kernels take and return tensors and do not depend on networks. Import their modules only if there is a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

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
