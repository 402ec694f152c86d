"""torch's float32 becomes float64, and then engram is imported: only in a process of its own, before anything else.

And resnet10 has two blocks, of few channels: what processes exchange matters here, and not what they learn.
"""

import safetensors.torch  # it has a table of types
import torch

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double

from engram.nn import resnet  # noqa: E402

resnet.resnet10 = lambda generator: resnet.ResNet([resnet.BlockGroup(4, 1), resnet.BlockGroup(8, 1, 2)], generator)

import engram.cli.commands.run  # noqa: E402
import helpers  # noqa: E402

assert safetensors.torch
assert engram.cli.commands.run
assert helpers
