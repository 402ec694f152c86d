"""Hand-written GPU kernels, in Triton: of the residual backbones in bf16, of heads and of losses.

Tensors in, tensors out; they know nothing of networks. The modules here are only imported where there is a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can work where this tensor is."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
