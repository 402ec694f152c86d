"""The older backbones of an expanding one by our own kernels, their norms folded in."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.engine.fused import FoldedBackbone
from engram.kernels.launch import Arithmetic
from engram.models.expanding import ExpandingBackbone, both_means
from engram.models.resnet import ResNet


class FoldedOlder:
    """What `ExpandingBackbone.look_back` gives, for images as the kernels take them; nothing for any other backbone."""

    def __init__(self, backbone: ResNet, size: tuple[int, int], arithmetic: Arithmetic) -> None:
        self._folded = [FoldedBackbone(each, size, arithmetic) for each in _older(backbone)]

    def load(self, backbone: ResNet) -> None:
        """Takes over the older backbones' values, in place."""
        for folded, each in zip(self._folded, _older(backbone), strict=True):
            folded.load(each)

    def __call__(self, images: Tensor) -> Tensor | None:
        """Their embeddings (2, B, N D) of images (B, H, W, 4); None where there are none."""
        if not self._folded:
            return None
        with torch.no_grad():
            return torch.cat([both_means(folded(images)[-1]) for folded in self._folded], dim=2)


def _older(backbone: ResNet) -> list[ResNet]:
    if not isinstance(backbone, ExpandingBackbone):
        return []
    return [each for each in backbone.older if isinstance(each, ResNet)]
