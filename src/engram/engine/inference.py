"""Reader: what a network says of images, in eval mode; what is made ready for that is made once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.data.augment import centre, to_unit
from engram.engine.forward import pooled
from engram.nn.network import Network, Output

if TYPE_CHECKING:
    from engram.engine.engine import Engine

INFERENCE_PIXELS = {"cpu": 512 * 32 * 32, "cuda": 4096 * 32 * 32}  # in a batch


class Reader:
    """Embeddings (N, D) and scores (N, K) of uint8 images (N, H, W, 3), on the engine's device.

    The network must stay as it is as long as this is used: our own kernels have its norms folded in. On a GPU what is
    returned may still be under way.
    """

    def __init__(self, engine: Engine, network: Network) -> None:
        self._engine, self._network = engine, network
        fused = engine.why_not_fused(network.backbone) is None
        self._passes = _folded(network, engine) if fused else _by_modules(network, engine)

    @torch.no_grad()
    def __call__(self, images: Tensor, mirror: bool = False) -> tuple[Tensor, Tensor]:
        engine = self._engine
        assert not self._network.training, "reading with a network in training would change its running statistics"
        if engine.augmentation.view is not None:
            images = centre(images, engine.image_size)
        batch = max(1, INFERENCE_PIXELS[engine.device.type] // (images.shape[1] * images.shape[2]))
        outputs = [self._passes(to_unit(part.to(engine.device), mirror)) for part in images.split(batch)]
        return torch.cat([output.embedding for output in outputs]), torch.cat([output.scores for output in outputs])


def _by_modules(network: Network, engine: Engine) -> Callable[[Tensor], Output]:
    """The network's passes by torch's modules."""

    def passes(unit: Tensor) -> Output:
        with engine.autocast():
            return network(unit.contiguous(memory_format=engine.layout))

    return passes


@torch.no_grad()
def _folded(network: Network, engine: Engine) -> Callable[[Tensor], Output]:
    """The network's passes by our own kernels, its norms folded in."""
    from engram.engine.fused import FoldedBackbone, FoldedOlder
    from engram.kernels.launch import ARITHMETIC

    size, arithmetic = engine.image_size, ARITHMETIC[engine.precision]
    backbone = FoldedBackbone(network.backbone, size, arithmetic)
    older = FoldedOlder(network.backbone, size, arithmetic)

    def passes(unit: Tensor) -> Output:
        normalised = ((unit - network.mean) / network.std).permute(0, 2, 3, 1)
        packed = torch.nn.functional.pad(normalised, (0, 1)).to(arithmetic.stored).contiguous()
        return pooled(network, backbone(packed), older(packed))

    return passes
