"""What an objective sees whose descent changes images instead of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Look:
    """One step of an optimisation of images, by a network that stands still.

    tuned: (N, 3, H, W), the images that learn, in [0, 1] but for what they learned. images: (B, 3, H, W), a batch of
    the pool; labels: (B,). parameters: the network's by name; they take no gradients. network: the embedding (B, D) and
    the logits (B, K) of images, in eval mode, with some parameters in the place of the network's own.
    """

    tuned: Tensor
    images: Tensor
    labels: Tensor
    parameters: Mapping[str, Tensor]
    network: Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
