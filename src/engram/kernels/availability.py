"""Hand-written GPU kernels, in Triton: of the residual backbones, of heads and of losses.

Tensors in, tensors out; they know nothing of networks. The modules here are only imported where there is a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

OLDEST = (8, 0)  # the compute capability of the oldest GPUs with bf16


def reason_unavailable(device: torch.device) -> str | None:
    """Why the kernels do not run on this device; None where they do."""
    if device.type != "cuda":
        return "they are for a GPU"
    if not _has_triton():
        return "they are written in Triton, which is not installed"
    if _capability(device) < OLDEST:
        return f"they are for GPUs of compute capability {OLDEST[0]}.{OLDEST[1]} and later"
    return None


def is_available_for(tensor: Tensor) -> bool:
    """Whether the kernels run where this tensor is."""
    return tensor.is_cuda and reason_unavailable(tensor.device) is None


@cache  # so that a step that is being recorded asks nothing of the device
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
