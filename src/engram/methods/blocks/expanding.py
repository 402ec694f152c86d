"""Shared by methods with a growing network: copies that never change, a head that grows in both directions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.core.errors import EngramError
from engram.nn.backbone import Backbone
from engram.nn.heads import LinearHead
from engram.nn.resnet import ResNet


def residual(method: str, backbone: Backbone, copied: str = "it") -> ResNet:
    """The backbone, if it is a residual one of engram; others are refused.

    copied: what the method adds a copy of at every stage.
    """
    if type(backbone) is not ResNet:  # a subclass may compute something else
        raise EngramError(
            f"{method} cannot use the backbone {backbone.known_as}: at every stage it adds a copy of {copied}, which "
            "it can only make of engram's residual backbones, such as resnet32; choose one of them or another method",
            parameter="backbone",
        )
    return backbone


def freeze(module: nn.Module) -> None:
    """Turn every parameter into a buffer, so that no optimiser sees it; eval mode, and the engine's memory layout."""
    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            value = parameter.detach()
            layout = torch.channels_last if value.is_cuda else torch.contiguous_format
            delattr(part, name)
            part.register_buffer(name, value.contiguous(memory_format=layout) if value.ndim == 4 else value)
    module.eval()


class WideningHead(LinearHead):
    """A linear head over embeddings that grow, and a second one over the newest D of their values.

    auxiliary (K, D), auxiliary_bias (K,): the second head.
    """

    class_parameters = ("weight", "bias", "auxiliary", "auxiliary_bias")

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(dim, capacity)
        self.auxiliary = nn.Parameter(torch.zeros(capacity, dim))
        self.auxiliary_bias = nn.Parameter(torch.zeros(capacity))

    def _initial_rows(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return super()._initial_rows("bias" if name == "auxiliary_bias" else name, shape, generator)

    def widen(self, dim: int) -> None:
        """Set the number of columns. Those that remain keep their weights; new ones are zero."""
        narrow, kept = self.weight, min(dim, self.weight.shape[1])
        if narrow.shape[1] != dim:
            wide = narrow.new_zeros(self.capacity, dim)
            wide[:, :kept] = narrow.detach()[:, :kept]
            self.weight = nn.Parameter(wide, requires_grad=narrow.requires_grad)

    def extend(self, dim: int, count: int, generator: torch.Generator) -> None:
        """Set the number of columns and open `count` rows. All is random but old rows' old columns and biases."""
        rows, columns = self.num_classes, min(dim, self.weight.shape[1])
        bias = self.get_parameter("bias")
        kept = self.weight[:rows, :columns].detach().clone(), bias[:rows].detach().clone()
        self.widen(dim)
        self.grow(count, generator)
        self.initialise(generator)
        with torch.no_grad():
            self.weight[:rows, :columns], self.get_parameter("bias")[:rows] = kept

    def extra_outputs(self, features: Tensor) -> Mapping[str, Tensor]:
        """auxiliary: the second head's scores (B, K) of the newest D features."""
        newest = features[:, -self.auxiliary.shape[1] :]
        return {"auxiliary": F.linear(newest, self.auxiliary, self.auxiliary_bias)}
