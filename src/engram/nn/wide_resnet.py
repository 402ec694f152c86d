"""WideResNet: residual backbones with few, wide layers (Zagoruyko, Komodakis, BMVC 2016), for small images.

A block is BN-ReLU-conv-BN-ReLU-conv plus the shortcut, a 1x1 convolution where the shape changes. The maps are the
outputs of the three groups, the last one after the final norm, and always before a ReLU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.core.errors import EngramError
from engram.nn.backbone import Backbone, initialise_layers


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after a norm and a ReLU: (B, C_in, H, W) to (B, C_out, H / stride, W / stride)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride > 1 or channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(Backbone):
    """Images (B, 3, H, W) to three maps of 16, 32 and 64 times `width` channels, and the embedding.

    depth: number of layers, 6 n + 4 for n blocks in each group.
    """

    pools_last_map = True
    ends_in_relu = True

    def __init__(self, depth: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 or width < 1:
            raise EngramError(
                f"a WideResNet has 10, 16, 22, 28, ... layers and a width of at least 1, got {depth} and {width}"
            )
        channels = 16
        self.widths = tuple(each * width for each in (16, 32, 64))
        self.dim = self.widths[-1]
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.groups = nn.ModuleList()
        for number, channels_out in enumerate(self.widths):
            blocks: list[nn.Module] = []
            for i in range((depth - 4) // 6):
                blocks.append(PreActivationBlock(channels, channels_out, 2 if number and i == 0 else 1))
                channels = channels_out
            self.groups.append(nn.Sequential(*blocks))
        self.bn = nn.BatchNorm2d(channels)
        initialise_layers(self, generator)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x = self.conv(x)
        maps: list[Tensor] = []
        for group in self.groups:
            x = group(x)
            maps.append(x)
        last = self.bn(x)
        return (*maps[:-1], last), last.mean(dim=(2, 3))


def wrn16_2(generator: torch.Generator) -> WideResNet:
    """WideResNet-16-2 for small images: 2 blocks each of 32, 64 and 128; embedding 128."""
    return WideResNet(16, 2, generator)


def wrn28_2(generator: torch.Generator) -> WideResNet:
    """WideResNet-28-2 for small images: 4 blocks each of 32, 64 and 128; embedding 128."""
    return WideResNet(28, 2, generator)
