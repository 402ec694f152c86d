"""SideBySide: networks that see the same images, and whose embeddings are concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engram.nn.backbone import Backbone
from engram.nn.efficientnet import efficientnet_lite0, efficientnet_lite2


class SideBySide(Backbone):
    """Images (B, 3, H, W) to the embeddings of all networks, one after the other; no maps."""

    def __init__(self, networks: Sequence[Backbone]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.dim = sum(network.dim for network in networks)
        self.published_for = networks[0].published_for

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return (), torch.cat([network(x)[1] for network in self.networks], dim=1)


def efficientnet_lite0_lite2(generator: torch.Generator) -> SideBySide:
    """EfficientNet-Lite0 and -Lite2 side by side, for photographs of 224x224: 8.2 million weights; embedding 2560."""
    return SideBySide([efficientnet_lite0(generator), efficientnet_lite2(generator)])


def joined_state(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of a SideBySide whose networks have these states."""
    return {f"networks.{i}.{name}": value for i, state in enumerate(states) for name, value in state.items()}
