"""Import this before anything else, in a process of its own: torch's float32 becomes float64, then engram is imported."""

import safetensors.torch  # it has a table of types
import torch

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double  # pyright: ignore[reportAttributeAccessIssue]

import engram.experiment.runner  # noqa: E402
import helpers  # noqa: E402, F401
import pytest  # noqa: E402, F401

assert safetensors.torch
assert engram.experiment.runner
