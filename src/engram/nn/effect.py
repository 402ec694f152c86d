"""The momentum effect: the direction that training carries all embeddings in, and what it adds to the scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DECAY = 0.9


class MomentumEffect(nn.Module):
    """Takes from the scores what they owe to the direction in which a stage's embeddings have piled up.

    moving: (D,), the decaying sum of the batches' mean embeddings in the stage at hand; before: that of the stage
    before. factors: (2,), how much of the effect of `before` and of `moving` is taken away; none at first.
    """

    moving: Tensor
    before: Tensor
    factors: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("moving", torch.zeros(dim))
        self.register_buffer("before", torch.zeros(dim))
        self.register_buffer("factors", torch.zeros(2))

    def begin(self) -> None:
        """Starts a stage: the direction is that of the stage before, and a new one starts from nothing."""
        self.before.copy_(self.moving)
        self.moving.zero_()

    def track(self, embedding: Tensor) -> None:
        """Adds a batch of embeddings (B, D): v = 0.9 v + their mean."""
        self.moving.mul_(DECAY).add_(embedding.detach().mean(dim=0))

    def remove(self, before: float | Tensor, moving: float | Tensor) -> None:
        """From now on takes so much of each direction's effect away."""
        self.factors.copy_(torch.stack([torch.as_tensor(before), torch.as_tensor(moving)]))

    def each(self, embedding: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """The effect (B, 2, K) of each direction u on the scores of embeddings (B, D): cos(h, u) * head(u).

        A direction that has not been seen yet has none.
        """
        directions = F.normalize(torch.stack([self.before, self.moving]), dim=1)
        cosines = F.normalize(embedding, dim=1) @ directions.T
        return cosines[:, :, None] * head(directions)

    def forward(self, embedding: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """What is to be taken from the scores (B, K) that the head gives to embeddings (B, D)."""
        return torch.einsum("bjk,j->bk", self.each(embedding, head), self.factors)
