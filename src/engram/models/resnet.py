"""Residual backbones for small images, in the form the AFC and PODNet tables used.

A block is conv-BN-ReLU-conv-BN plus the shortcut, with no ReLU after the sum. Where the width doubles the shortcut is
every second pixel, with zeros for the new channels. The output of each group is a distillation map; the embedding is
the spatial mean of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import EngramError, suggest


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut: (B, C_in, H, W) to (B, C_out, H / stride, W / stride)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.stride = stride
        self.new_channels = channels_out - channels_in

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            x = F.pad(x, (0, 0, 0, 0, 0, self.new_channels))
        return out + x


@dataclass(frozen=True)
class Group:
    """A run of blocks of one width; the first has the stride. Its output is one distillation map."""

    width: int
    blocks: int
    stride: int = 1


class ResNet(nn.Module):
    """Images (B, 3, H, W) to one map per group and the embedding (B, D)."""

    def __init__(self, groups: Sequence[Group], generator: torch.Generator) -> None:
        super().__init__()
        self.specification = tuple(groups)
        width = groups[0].width
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.groups = nn.ModuleList()
        for group in groups:
            blocks: list[nn.Module] = []
            for i in range(group.blocks):
                blocks.append(Block(width, group.width, group.stride if i == 0 else 1))
                width = group.width
            self.groups.append(nn.Sequential(*blocks))
        self.dim = width
        self.widths = tuple(group.width for group in groups)
        self.initialise(generator)

    def initialise(self, generator: torch.Generator) -> None:
        """He initialisation (fan-out); each block starts as its shortcut (second BN weight 0)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # Drawn on the CPU whatever the device, so that a seed means the same weights everywhere.
                fresh = torch.empty(module.weight.shape)
                nn.init.kaiming_normal_(fresh, mode="fan_out", nonlinearity="relu", generator=generator)
                module.weight.data.copy_(fresh)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, Block):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x = F.relu(self.bn(self.conv(x)), inplace=True)
        maps: list[Tensor] = []
        for group in self.groups:
            x = group(x)
            maps.append(x)
        return tuple(maps), x.mean(dim=(2, 3))


def resnet32(generator: torch.Generator) -> ResNet:
    """The CIFAR backbone: 5 blocks of 16, 5 of 32, 4 of 64, then 1 of 64; embedding 64."""
    return ResNet([Group(16, 5), Group(32, 5, 2), Group(64, 4, 2), Group(64, 1)], generator)


def resnet10(generator: torch.Generator) -> ResNet:
    """A small variant for tiny images and for a CPU: one block for each of resnet32's groups; embedding 64."""
    return ResNet([Group(16, 1), Group(32, 1, 2), Group(64, 1, 2), Group(64, 1)], generator)


def resnet18(generator: torch.Generator) -> ResNet:
    """A wide one, with a stem for small images: 2 blocks each of 64, 128, 256 and 512; embedding 512."""
    return ResNet([Group(64, 2), Group(128, 2, 2), Group(256, 2, 2), Group(512, 2, 2)], generator)


BACKBONES: dict[str, Callable[[torch.Generator], ResNet]] = {
    "resnet32": resnet32,
    "resnet10": resnet10,
    "resnet18": resnet18,
}


def build_backbone(name: str, generator: torch.Generator) -> ResNet:
    """The backbone of that name with fresh weights."""
    if name not in BACKBONES:
        raise EngramError(f"no backbone {name!r}: {suggest(name, BACKBONES)}")
    return BACKBONES[name](generator)
