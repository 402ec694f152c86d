"""Inference: the outputs of a network for many images, in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.data.augment import centre, to_unit
from engram.engine.forward import classify_maps
from engram.nn.network import Network, Output

if TYPE_CHECKING:
    from engram.engine.engine import Engine

INFERENCE_PIXELS = {"cpu": 512 * 32 * 32, "cuda": 4096 * 32 * 32}  # in a batch


class Inference:
    """Outputs of a network for uint8 images (N, H, W, 3), on the engine's device, batch by batch.

    The network must not change while this is used: our kernels have its norms folded into the weights. On a GPU the
    results may still be in progress when they are returned.
    """

    def __init__(self, engine: Engine, network: Network) -> None:
        self._engine, self._network = engine, network
        fused = engine.why_not_fused(network.backbone) is None
        self._forward = _fused_forward(network, engine) if fused else _plain_forward(network, engine)

    def __call__(self, images: Tensor, mirror: bool = False) -> tuple[Tensor, Tensor]:
        """Embeddings (N, D) and scores (N, K)."""
        outputs = list(self.outputs(images, mirror))
        return torch.cat([output.embedding for output in outputs]), torch.cat([output.scores for output in outputs])

    def outputs(self, images: Tensor, mirror: bool = False) -> Iterator[Output]:
        """The network's outputs, one for each batch."""
        engine = self._engine
        assert not self._network.training, "inference with a network in training would change its running statistics"
        if engine.augmentation.view is not None:
            images = centre(images, engine.image_size)
        batch = max(1, INFERENCE_PIXELS[engine.device.type] // (images.shape[1] * images.shape[2]))
        for part in images.split(batch):
            with torch.no_grad():
                yield self._forward(to_unit(part.to(engine.device), mirror))


def _plain_forward(network: Network, engine: Engine) -> Callable[[Tensor], Output]:
    """Passes by torch's modules."""

    def forward(unit: Tensor) -> Output:
        with engine.autocast():
            return network(unit.contiguous(memory_format=engine.layout))

    return forward


@torch.no_grad()
def _fused_forward(network: Network, engine: Engine) -> Callable[[Tensor], Output]:
    """Passes by our kernels, the norms folded into the weights."""
    from engram.engine.fused import FoldedBackbone, FoldedBranches
    from engram.kernels.launch import ARITHMETIC

    size, arithmetic = engine.image_size, ARITHMETIC[engine.precision]
    backbone = FoldedBackbone(network.backbone, size, arithmetic)
    branches = FoldedBranches(network.backbone, size, arithmetic)

    def forward(unit: Tensor) -> Output:
        normalised = ((unit - network.mean) / network.std).permute(0, 2, 3, 1)
        packed = F.pad(normalised, (0, 1)).to(arithmetic.stored).contiguous()
        return classify_maps(network, backbone(packed), branches(packed))

    return forward
