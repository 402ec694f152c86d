"""ImageNetResNet: ResNet-18 and ResNet-50 as published for ImageNet (He et al., CVPR 2016), for pretrained weights.

Unlike `ResNet`, the stem is a 7x7 convolution with stride 2 and a ReLU ends every block. The names of the tensors are
those of torchvision's files. In a block with a bottleneck, the 3x3 convolution has the stride.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.nn.backbone import Backbone, initialise_layers

BOTTLENECK = 4  # how much wider the output of a block with a bottleneck is than its 3x3 convolution


class ImageNetBlock(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3 and 1x1 with a bottleneck, plus the shortcut; without the ReLU at the end."""

    def __init__(self, channels_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = BOTTLENECK * width if bottleneck else width
        kernels, strides = ((1, 3, 1), (1, stride, 1)) if bottleneck else ((3, 3), (stride, 1))
        channels = (channels_in, *(width for _ in kernels[1:]), out)
        self._convolutions = len(kernels)
        for i, (kernel, step) in enumerate(zip(kernels, strides, strict=True)):
            convolution = nn.Conv2d(channels[i], channels[i + 1], kernel, step, kernel // 2, bias=False)
            self.add_module(f"conv{i + 1}", convolution)
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(channels[i + 1]))
        self.downsample: nn.Sequential | None = None
        if stride > 1 or channels_in != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i in range(1, self._convolutions + 1):
            out = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(out))
            if i < self._convolutions:
                out = F.relu(out)
        return out + (x if self.downsample is None else self.downsample(x))


class ImageNetResNet(Backbone):
    """Images (B, 3, H, W) to four maps and the embedding (B, D), the mean of the last map.

    The first three maps are before the ReLU of their block; the last is after it, as the published networks pool it.
    """

    pools_last_map = True

    def __init__(self, blocks: Sequence[int], bottleneck: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        channels, widths = 64, []
        for number, count in enumerate(blocks):
            layer = nn.Sequential()
            for i in range(count):
                layer.append(ImageNetBlock(channels, 64 * 2**number, 2 if number and not i else 1, bottleneck))
                channels = 64 * 2**number * (BOTTLENECK if bottleneck else 1)
            self.add_module(f"layer{number + 1}", layer)
            widths.append(channels)
        self.dim, self.widths = channels, tuple(widths)
        initialise_layers(self, generator)

    def own_name(self, published: str) -> str | None:
        return None if published.startswith("fc.") else published

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        maps: list[Tensor] = []
        for number in range(len(self.widths)):
            blocks = list(self.get_submodule(f"layer{number + 1}").children())
            for i, block in enumerate(blocks):
                x = block(x)
                if i == len(blocks) - 1 and number < len(self.widths) - 1:
                    maps.append(x)
                x = F.relu(x)
        return (*maps, x), x.mean(dim=(2, 3))


def resnet18_imagenet(generator: torch.Generator) -> ImageNetResNet:
    """ResNet-18 with the stem for photographs of 224x224: 11.2 million weights; embedding 512."""
    return ImageNetResNet((2, 2, 2, 2), False, generator)


def resnet50_imagenet(generator: torch.Generator) -> ImageNetResNet:
    """ResNet-50 for photographs of 224x224: 23.5 million weights; embedding 2048."""
    return ImageNetResNet((3, 4, 6, 3), True, generator)
