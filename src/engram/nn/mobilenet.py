"""MobileNetV3: a small network for photographs (Howard et al., ICCV 2019), with torchvision's names of tensors.

A block widens its input, filters each channel, weights the channels by a squeeze-and-excitation in some blocks, and
narrows it again, without an activation at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.nn.backbone import Backbone, initialise_layers

# Of each block of the large network: kernel, width inside, channels, squeeze-and-excitation, hard swish, stride.
LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
STEM, WIDEN = 16, 6  # channels of the stem; how much wider the last map is than the last block


class ConvNorm(nn.Sequential):
    """A convolution and a batch norm, and an activation if there is one."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        stride: int,
        groups: int,
        activation: type[nn.Module] | None,
    ) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(channels_out, eps=1e-3, momentum=0.01),
        )
        if activation is not None:
            self.append(activation())


class SqueezeExcitation(nn.Module):
    """Multiplies each channel by a factor that is computed from the means of all channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(x.mean(dim=(2, 3), keepdim=True)))))


class MobileBlock(nn.Module):
    """A block of a MobileNetV3."""

    def __init__(
        self, channels_in: int, kernel: int, wide: int, channels_out: int, excited: bool, hard: bool, stride: int
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if hard else nn.ReLU
        self.block = nn.Sequential()
        if wide != channels_in:
            self.block.append(ConvNorm(channels_in, wide, 1, 1, 1, activation))
        self.block.append(ConvNorm(wide, wide, kernel, stride, wide, activation))
        if excited:
            self.block.append(SqueezeExcitation(wide, _multiple_of_8(wide / 4)))
        self.block.append(ConvNorm(wide, channels_out, 1, 1, 1, None))
        self.has_shortcut = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.has_shortcut else self.block(x)


class MobileNetV3(Backbone):
    """Images (B, 3, H, W) to a map before each halving and the last, and the embedding (B, D), the last map's mean.

    No activation follows the maps: the last is after the hard swish of the last convolution.
    """

    pools_last_map = True

    def __init__(self, blocks: Sequence[tuple[int, int, int, bool, bool, int]], generator: torch.Generator) -> None:
        super().__init__()
        self.features = nn.Sequential(ConvNorm(3, STEM, 3, 2, 1, nn.Hardswish))
        channels, ends, widths = STEM, [], []
        for kernel, wide, out, excited, hard, stride in blocks:
            if stride > 1 and len(self.features) > 2:  # the first map has a quarter of the image's side
                ends.append(len(self.features) - 1)
                widths.append(channels)
            self.features.append(MobileBlock(channels, kernel, wide, out, excited, hard, stride))
            channels = out
        ends.append(len(self.features) - 1)
        self.features.append(ConvNorm(channels, WIDEN * channels, 1, 1, 1, nn.Hardswish))
        self.dim, self.widths = WIDEN * channels, (*widths, channels, WIDEN * channels)
        self._ends = frozenset(ends)
        initialise_layers(self, generator)
        for module in self.modules():
            if isinstance(module, SqueezeExcitation):
                for convolution in (module.fc1, module.fc2):
                    assert convolution.bias is not None
                    nn.init.zeros_(convolution.bias)

    def own_name(self, published: str) -> str | None:
        return None if published.startswith("classifier.") else published

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        maps: list[Tensor] = []
        for number, part in enumerate(self.features):
            x = part(x)
            if number in self._ends:
                maps.append(x)
        return (*maps, x), x.mean(dim=(2, 3))


def _multiple_of_8(channels: float) -> int:
    """The nearest multiple of 8 that is not more than a tenth smaller."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


def mobilenetv3_large(generator: torch.Generator) -> MobileNetV3:
    """MobileNetV3-Large for photographs of 224x224: 3.0 million weights; embedding 960."""
    return MobileNetV3(LARGE, generator)
