"""EfficientNetLite: small pretrained networks for photographs (Tan and Le, ICML 2019; Google's Lite variants, 2020).

A block widens its input by a 1x1 convolution, filters each channel, and narrows it again, without an activation at its
end; between equal shapes, a shortcut is added. The Lite variants have no squeeze-and-excitation, ReLU6 instead of
swish, and a stem and head that keep their width. The published weights are from TensorFlow: a convolution with stride 2
pads more at the right and bottom.
"""

from __future__ import annotations

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.nn.backbone import Backbone, initialise_layers

# Of each stage: number of blocks, kernel, stride, expansion, channels. The first and last stage are never deepened.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
MAP_STAGES = (1, 2, 4, 6)  # those before the next halving, and the last
STEM, HEAD = 32, 1280


class SamePadConv(nn.Conv2d):
    """A convolution without bias whose output has ceil(size / stride) pixels, padded as TensorFlow does."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels_in, channels_out, kernel, stride=stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        down, across = (
            max((math.ceil(size / stride) - 1) * stride + kernel - size, 0) for size in (input.shape[2], input.shape[3])
        )
        even = down // 2, across // 2
        if down % 2 or across % 2:
            input, even = F.pad(input, (across // 2, across - across // 2, down // 2, down - down // 2)), (0, 0)
        return F.conv2d(input, self.weight, self.bias, self.stride, even, self.dilation, self.groups)


def _relu6(x: Tensor) -> Tensor:
    """ReLU6 in place: nothing else reads what it changes, and a map of a photograph is large."""
    return F.relu6(x, inplace=True)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class InvertedBottleneck(nn.Module):
    """A block of an EfficientNetLite: (B, C_in, H, W) to (B, C_out, H / stride, W / stride)."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels_in * expansion
        self.has_shortcut = stride == 1 and channels_in == channels_out
        if expansion > 1:
            self.expand_conv = SamePadConv(channels_in, wide, 1)
            self.bn0 = _norm(wide)
        self.depthwise_conv = SamePadConv(wide, wide, kernel, stride, groups=wide)
        self.bn1 = _norm(wide)
        self.project_conv = SamePadConv(wide, channels_out, 1)
        self.bn2 = _norm(channels_out)
        self.expands = expansion > 1

    def forward(self, x: Tensor) -> Tensor:
        out = _relu6(self.bn0(self.expand_conv(x))) if self.expands else x
        out = _relu6(self.bn1(self.depthwise_conv(out)))
        out = self.bn2(self.project_conv(out))
        return out + x if self.has_shortcut else out


class EfficientNetLite(Backbone):
    """Images (B, 3, H, W) to five maps and the embedding (B, 1280), the mean of the last map.

    The first four maps are outputs of blocks, which no activation follows; the last is the head's, after its ReLU6.
    side: of the images that the published weights are for.
    """

    pools_last_map = True

    def __init__(self, side: int, width: float, depth: float, generator: torch.Generator) -> None:
        super().__init__()
        self.published_for = side, 3 * (127 / 255,), 3 * (128 / 255,)
        self.conv_stem = SamePadConv(3, STEM, 3, 2)
        self.bn0 = _norm(STEM)
        blocks: list[nn.Module] = []
        ends: list[int] = []
        widths: list[int] = []
        channels = STEM
        for number, (count, kernel, stride, expansion, wide) in enumerate(STAGES):
            out = _rounded(width * wide)
            repeated = count if number in (0, len(STAGES) - 1) else math.ceil(depth * count)
            for i in range(repeated):
                blocks.append(InvertedBottleneck(channels, out, kernel, stride if i == 0 else 1, expansion))
                channels = out
            if number in MAP_STAGES:
                ends.append(len(blocks))
                widths.append(out)
        self.blocks = nn.ModuleList(blocks)
        self.conv_head = SamePadConv(channels, HEAD, 1)
        self.bn1 = _norm(HEAD)
        self.dim, self.widths = HEAD, (*widths, HEAD)
        self._ends = frozenset(ends)
        initialise_layers(self, generator)

    def own_name(self, published: str) -> str | None:
        return None if published.startswith("_fc.") else re.sub(r"(^|\.)_", r"\1", published)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x = _relu6(self.bn0(self.conv_stem(x)))
        maps: list[Tensor] = []
        for number, block in enumerate(self.blocks, start=1):
            x = block(x)
            if number in self._ends:
                maps.append(x)
        x = _relu6(self.bn1(self.conv_head(x)))
        return (*maps, x), x.mean(dim=(2, 3))


def _rounded(channels: float) -> int:
    """The nearest multiple of 8 that is not more than a tenth smaller."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


def efficientnet_lite0(generator: torch.Generator) -> EfficientNetLite:
    """EfficientNet-Lite0 for photographs of 224x224: 3.4 million weights; embedding 1280."""
    return EfficientNetLite(224, 1.0, 1.0, generator)


def efficientnet_lite1(generator: torch.Generator) -> EfficientNetLite:
    """EfficientNet-Lite1 for photographs of 240x240: 4.1 million weights; embedding 1280."""
    return EfficientNetLite(240, 1.0, 1.1, generator)


def efficientnet_lite2(generator: torch.Generator) -> EfficientNetLite:
    """EfficientNet-Lite2 for photographs of 260x260: 4.8 million weights; embedding 1280."""
    return EfficientNetLite(260, 1.1, 1.2, generator)
