"""Factors: convolutions that keep their weights and learn one number for each pair of channels to multiply them by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram.nn.backbones import ResNet


class Factors(nn.Module):
    """A factor, 1 at first, for each (C_out, C_in) of a backbone's convolutions, and the weights as they were then.

    The convolutions' own weights stay what everything reads, base times factor, so that whatever runs a backbone runs
    this one: `take_gradients` before an update and `give_weights` after it are all there is to training it.
    """

    def __init__(self, backbone: ResNet) -> None:
        super().__init__()
        weights = [weight.detach() for weight in convolution_weights(backbone)]
        learns = backbone.conv.weight.requires_grad
        self.values = nn.ParameterList(
            nn.Parameter(torch.ones(weight.shape[:2], device=weight.device), requires_grad=learns) for weight in weights
        )
        for number, weight in enumerate(weights):
            self.register_buffer(f"base_{number}", weight.clone(memory_format=torch.contiguous_format))

    @property
    def bases(self) -> list[Tensor]:
        """The weights that the factors multiply, in the order of the modules."""
        return [self.get_buffer(f"base_{number}") for number in range(len(self.values))]

    @torch.no_grad()
    def take_gradients(self, backbone: ResNet) -> None:
        """Sets the factors' gradients from those of the weights: dL/ds = sum over the kernel of dL/dW * base."""
        for factor, base, weight in zip(self.values, self.bases, convolution_weights(backbone), strict=True):
            assert factor.grad is not None
            assert weight.grad is not None
            factor.grad.copy_((weight.grad * base).sum(dim=(2, 3)))

    @torch.no_grad()
    def give_weights(self, backbone: ResNet) -> None:
        """Sets the backbone's weights to base times factor."""
        for factor, base, weight in zip(self.values, self.bases, convolution_weights(backbone), strict=True):
            weight.copy_(base * factor[:, :, None, None])


def convolution_weights(backbone: ResNet) -> list[Tensor]:
    """The weights (C_out, C_in, 3, 3) of all convolutions, in the order of the modules."""
    return [module.weight for module in backbone.modules() if isinstance(module, nn.Conv2d)]
