"""A backbone that gets another of its kind at every stage, and the head over all of them together.

The older backbones stand still: their values are buffers, so that no optimiser sees them, and they run with their
running statistics, always. The newest is the one that trains.

Legend: B batch, D embedding of one backbone, N older backbones, K capacity in classes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.nn.backbones import ResNet
from engram.nn.heads import Head

OLDER = "older."


class ExpandingBackbone(ResNet):
    """The newest backbone of several, and the older ones in their order.

    Called, it is the newest alone; `look_back` has what the older ones see. dim: the embedding of all together.
    """

    def __init__(self, first: ResNet) -> None:
        super().__init__(first.specification, torch.Generator())
        self.load_state_dict(first.state_dict())
        self.width = self.dim
        self.older = nn.ModuleList()

    def expand(self) -> None:
        """Freezes the newest as it is; a copy of it trains on.

        What is added is the frozen one, so that the tensors of the newest keep their place.
        """
        self.resize(len(self.older) + 1)

    def resize(self, count: int) -> None:
        """Has so many older backbones: copies of the newest are added, or the last ones are taken away."""
        del self.older[count:]
        while len(self.older) < count:
            self.older.append(self._frozen_copy())
        self.dim = self.width * (count + 1)

    def train(self, mode: bool = True) -> ExpandingBackbone:
        """Puts the newest into that mode; the older ones stay as in evaluation."""
        super().train(mode)
        self.older.eval()
        return self

    def look_back(self, images: Tensor) -> Tensor | None:
        """The older backbones' embeddings, side by side, (2, B, N D) as in `both_means`; None while there are none."""
        if len(self.older) == 0:
            return None
        with torch.no_grad():
            return torch.cat([both_means(backbone(images)[0][-1]) for backbone in self.older], dim=2)

    def _frozen_copy(self) -> ResNet:
        copy = ResNet(self.specification, torch.Generator())
        state = self.state_dict()
        copy.load_state_dict({name: state[name] for name in copy.state_dict()})
        copy = copy.to(self.conv.weight.device)
        # Convolutions in the layout that the engine runs torch's in.
        layout = torch.channels_last if self.conv.weight.is_cuda else torch.contiguous_format
        for module in list(copy.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                value = parameter.detach()
                delattr(module, name)
                module.register_buffer(name, value.contiguous(memory_format=layout) if value.ndim == 4 else value)
        return copy.eval()


def both_means(maps: Tensor) -> Tensor:
    """The mean of a map (B, D, H, W) over its pixels and the mean of its positive part, (2, B, D) in float32."""
    maps = maps.float()
    return torch.stack([maps.mean(dim=(2, 3)), maps.relu().mean(dim=(2, 3))])


def count_older(names: Iterable[str]) -> int:
    """How many older backbones an expanding backbone's state has, from the names in it."""
    return len({name.removeprefix(OLDER).split(".")[0] for name in names if name.startswith(OLDER)})


class ExpandingHead(Head):
    """A weight a class over all backbones' embeddings, and a second one over the newest's alone, without a bias.

    auxiliary: the second weights, (K, D). Its rows of new classes tell these apart, and row 0, whose class is never new
    after the base stage, stands for all old classes together.
    """

    class_parameters = ("weight", "auxiliary")
    rectified = True

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(capacity, learned_scale=False)
        self.weight = nn.Parameter(torch.zeros(capacity, dim))
        self.auxiliary = nn.Parameter(torch.zeros(capacity, dim))

    def widen(self, dim: int) -> None:
        """Takes embeddings of that size from here on. Where it is another, the weights are new and zero."""
        if self.weight.shape[1] != dim:
            self.weight = nn.Parameter(self.weight.new_zeros(self.capacity, dim))

    def forward(self, embedding: Tensor) -> Tensor:
        return F.linear(embedding, self.weight)

    def aside(self, embedding: Tensor) -> Tensor:
        """The second weights' scores (B, K) of the newest backbone's embedding (B, D)."""
        return F.linear(embedding, self.auxiliary)
