"""ConvNeXt: a convolutional network in the style of a transformer (Liu et al., CVPR 2022), with torchvision's names.

A block filters each channel with a 7x7 convolution, then has a layer norm and a two-layer perceptron over the channels
of each pixel; its result is scaled and added to its input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.nn.backbone import Backbone

EPSILON = 1e-6
FIRST_SCALE = 1e-6  # of a block's result in an untrained network
SMALLEST = 32  # pixels on a side that leave one in the last map
SPREAD = 0.02  # standard deviation of untrained weights


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of each pixel of (B, C, H, W)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class LastChannels(nn.Module):
    """(B, C, H, W) to (B, H, W, C), or back."""

    def __init__(self, order: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class ConvNeXtBlock(nn.Module):
    """A block of a ConvNeXt: (B, C, H, W) to the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            LastChannels((0, 2, 3, 1)),
            nn.LayerNorm(channels, eps=EPSILON),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            LastChannels((0, 3, 1, 2)),
        )
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), FIRST_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale * self.block(x)


class ConvNeXt(Backbone):
    """Images (B, 3, H, W) to one map per stage, and the embedding (B, D): the mean of the last map after a layer norm.

    The maps are outputs of blocks, which no activation follows. An image with less than 32 pixels on a side, which the
    last map would have none of, is padded with zeros.
    """

    def __init__(self, widths: Sequence[int], blocks: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, widths[0], 4, stride=4), ChannelNorm(widths[0], eps=EPSILON))
        )
        for number, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            if number:
                before = widths[number - 1]
                self.features.append(
                    nn.Sequential(ChannelNorm(before, eps=EPSILON), nn.Conv2d(before, width, 2, stride=2))
                )
            self.features.append(nn.Sequential(*(ConvNeXtBlock(width) for _ in range(count))))
        self.classifier = nn.Sequential(nn.LayerNorm(widths[-1], eps=EPSILON))  # only the norm before the classifier
        self.dim, self.widths = widths[-1], tuple(widths)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.data.copy_(SPREAD * torch.randn(module.weight.shape, generator=generator))
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def own_name(self, published: str) -> str | None:
        return None if published.startswith("classifier.2.") else published

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        low, right = max(0, SMALLEST - x.shape[2]), max(0, SMALLEST - x.shape[3])
        if low or right:
            x = F.pad(x, (0, right, 0, low))
        maps: list[Tensor] = []
        for number, part in enumerate(self.features):
            x = part(x)
            if number % 2:  # a stage; those between are the stem and the halvings
                maps.append(x)
        return tuple(maps), self.classifier(x.mean(dim=(2, 3)))


def convnext_tiny(generator: torch.Generator) -> ConvNeXt:
    """ConvNeXt-Tiny for photographs of 224x224: 27.8 million weights; embedding 768."""
    return ConvNeXt((96, 192, 384, 768), (3, 3, 9, 3), generator)
