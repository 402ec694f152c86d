"""ResNet: residual backbones, as used for the tables of AFC and PODNet.

A block is conv-BN-ReLU-conv-BN plus the shortcut. For small images, no ReLU follows the sum; if the width doubles, the
shortcut is every second pixel, with zeros for the new channels. The output of each group is a distillation map, always
before a ReLU. The embedding is the spatial mean of the last map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.nn.backbone import Backbone, initialise_layers


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut: (B, C_in, H, W) to (B, C_out, H / stride, W / stride).

    projected: use a 1x1 convolution and a norm as shortcut between different shapes. rectified: a ReLU follows the sum.
    """

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, projected: bool = False, rectified: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.stride = stride
        self.new_channels = channels_out - channels_in
        self.rectified = rectified
        self.projection: nn.Sequential | None = None
        if projected and (stride > 1 or self.new_channels):
            shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            self.projection = nn.Sequential(shortcut, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.projection is not None:
            x = self.projection(x)
        else:
            if self.stride > 1:
                x = x[:, :, :: self.stride, :: self.stride]
            if self.new_channels:
                x = F.pad(x, (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(out + x) if self.rectified else out + x


@dataclass(frozen=True)
class BlockGroup:
    """A sequence of blocks of one width; the first has the stride. Its output is one distillation map.

    pooled: a 3x3 max pooling with stride 2 comes first. projected: see Block. rectified: a ReLU ends every block except
    the last.
    """

    width: int
    blocks: int
    stride: int = 1
    pooled: bool = False
    projected: bool = False
    rectified: bool = False


class ResNet(Backbone):
    """Images (B, 3, H, W) to one map per group and the embedding (B, D)."""

    pools_last_map = True
    ends_in_relu = True

    def __init__(self, groups: Sequence[BlockGroup], generator: torch.Generator) -> None:
        super().__init__()
        self.specification = tuple(groups)
        width = groups[0].width
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.groups = nn.ModuleList()
        for group in groups:
            blocks: list[nn.Module] = []
            for i in range(group.blocks):
                rectified = group.rectified and i < group.blocks - 1
                blocks.append(Block(width, group.width, group.stride if i == 0 else 1, group.projected, rectified))
                width = group.width
            self.groups.append(nn.Sequential(*blocks))
        self.dim = width
        self.widths = tuple(group.width for group in groups)
        self.pooled = tuple(group.pooled for group in groups)
        self.initialise(generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise the weights: He (fan-out). Each block starts as its shortcut (weight of its second norm 0)."""
        initialise_layers(self, generator)
        for module in self.modules():
            if isinstance(module, Block):
                nn.init.zeros_(module.bn2.weight)

    def trains_on_one_image(self, size: tuple[int, int]) -> bool:
        return self.last_map(size) != (1, 1)

    def last_map(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the last map of images of that size; each halving rounds up."""
        shrunk = math.prod(group.stride * (2 if group.pooled else 1) for group in self.specification)
        return -(-size[0] // shrunk), -(-size[1] // shrunk)

    def group_pass(self, number: int, x: Tensor) -> Tensor:
        """The map of a group from that of the one before; of the first, from the images, by the stem."""
        if number == 0:
            x = F.relu(self.bn(self.conv(x)), inplace=True)
        return self.groups[number](F.max_pool2d(x, 3, stride=2, padding=1) if self.pooled[number] else x)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        maps: list[Tensor] = []
        for number in range(len(self.groups)):
            x = self.group_pass(number, x)
            maps.append(x)
        return tuple(maps), x.mean(dim=(2, 3))


def resnet32(generator: torch.Generator) -> ResNet:
    """The CIFAR backbone: 5 blocks of 16, 5 of 32, 4 of 64, then 1 of 64; embedding 64."""
    return ResNet([BlockGroup(16, 5), BlockGroup(32, 5, 2), BlockGroup(64, 4, 2), BlockGroup(64, 1)], generator)


def resnet10(generator: torch.Generator) -> ResNet:
    """A small backbone for tiny images and CPUs: resnet32 with one block per group; embedding 64."""
    return ResNet([BlockGroup(16, 1), BlockGroup(32, 1, 2), BlockGroup(64, 1, 2), BlockGroup(64, 1)], generator)


def resnet18(generator: torch.Generator) -> ResNet:
    """The ImageNet backbone: stem with max pooling, then 2 blocks each of 64, 128, 256 and 512; embedding 512."""
    kind = {"projected": True, "rectified": True}
    groups = [BlockGroup(64, 2, pooled=True, **kind), *(BlockGroup(width, 2, 2, **kind) for width in (128, 256, 512))]
    return ResNet(groups, generator)


def resnet18_small(generator: torch.Generator) -> ResNet:
    """A wide backbone for small images: resnet32's stem and blocks, 2 each of 64, 128, 256 and 512; embedding 512."""
    return ResNet([BlockGroup(64, 2), BlockGroup(128, 2, 2), BlockGroup(256, 2, 2), BlockGroup(512, 2, 2)], generator)
