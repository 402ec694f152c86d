"""Backbone: the base class of networks from images to feature maps and an embedding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Make = Callable[[torch.Generator], nn.Module]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Backbone(nn.Module):
    """Normalised images (B, 3, H, W) to feature maps and an embedding (B, D): `forward` returns (maps, embedding).

    maps: a tuple of tensors (B, C, H, W), each before a ReLU, from the first to the last; it may be empty. The
    embedding is computed from each of them, so that it has a gradient there. (The last map of a pretrained network is
    after its activation, so that the embedding is the published one.)

    dim: D. widths: the channels of each map.
    pools_last_map: the embedding is the mean of the last map over its pixels.
    ends_in_relu: a ReLU belongs between the last map and its mean. Linear heads then read the mean of the map's
        positive part instead of the embedding. Only if pools_last_map is true.

    Forward uses no random numbers, parameters are float32 and all are trained; values that are not trained are buffers.
    """

    dim: int
    widths: tuple[int, ...] = ()
    pools_last_map: bool = False
    ends_in_relu: bool = False
    # Set when a backbone is made by its name.
    known_as: str = ""
    made_by: Make | None = None
    # Side, mean and standard deviation of the images that published weights of this backbone are for.
    published_for: tuple[int, tuple[float, ...], tuple[float, ...]] = (224, IMAGENET_MEAN, IMAGENET_STD)
    # Reads the pretrained weights that this backbone starts from; None if it starts from random ones.
    pretrained: Callable[[], Mapping[str, Tensor]] | None = None

    def own_name(self, published: str) -> str | None:
        """The name in this backbone's state of a tensor of a published file; None if the backbone does not need it."""
        return published

    def restart(self, generator: torch.Generator) -> None:
        """Set the weights to those that the backbone starts from: the pretrained ones, or new random ones."""
        if self.pretrained is None:
            self.initialise(generator)
        else:
            self.load_state_dict(self.pretrained())

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise the weights again; by default with those of a newly made backbone."""
        assert self.made_by is not None
        self.load_state_dict(as_backbone(self.made_by(generator)).state_dict())

    def trains_on_one_image(self, size: tuple[int, int]) -> bool:
        """Whether a batch of one image of that size can be trained on: a batch norm needs more than one value.

        By default, tries it on a copy.
        """
        if not any(isinstance(module, _BatchNorm) for module in self.modules()):
            return True
        tried, device = copy.deepcopy(self).train(), next(self.parameters()).device
        try:
            with torch.no_grad():
                tried(torch.zeros(1, 3, *size, device=device))
        except ValueError:  # as batch norms raise
            return False
        return True

    @property
    def branches(self) -> Sequence[Backbone]:
        """Frozen backbones whose embeddings precede this one's; none by default."""
        return ()

    def branch_embeddings(self, images: Tensor) -> Tensor | None:
        """The embeddings of the branches, concatenated, (2, B, N D), as `both_means` returns them; or None."""
        if not self.branches:
            return None
        with torch.no_grad():
            return torch.cat([both_means(backbone(images)[0][-1]) for backbone in self.branches], dim=2)

    def count_branches(self, names: Iterable[str]) -> int:
        """The number of branches in a saved state, from the names of its tensors; 0 for a backbone without branches."""
        return 0

    def resize(self, branches: int) -> None:
        """Set the number of branches."""
        assert branches == 0, "this backbone has no branches"


class AdaptedBackbone(Backbone):
    """A torch module that returns what a backbone returns and has the attribute `dim`, as a Backbone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for name in ("dim", "widths", "pools_last_map", "ends_in_relu"):
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return self.module(x)


def as_backbone(module: nn.Module) -> Backbone:
    """The module itself if it is a Backbone; otherwise adapted."""
    return module if isinstance(module, Backbone) else AdaptedBackbone(module)


def initialise_layers(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise all convolutions, He (fan-out within their groups of channels), and reset all batch norms."""
    for each in module.modules():
        if isinstance(each, nn.Conv2d):
            # Always drawn on the CPU, so that a seed gives the same weights on every device.
            fresh = torch.empty(each.weight.shape)
            nn.init.kaiming_normal_(fresh, mode="fan_out", nonlinearity="relu", generator=generator)
            each.weight.data.copy_(fresh * math.sqrt(each.groups) if each.groups > 1 else fresh)
        elif isinstance(each, nn.BatchNorm2d):
            each.reset_parameters()


def both_means(maps: Tensor) -> Tensor:
    """The mean of a map (B, D, H, W) over its pixels and the mean of its positive part, (2, B, D) in float32."""
    maps = maps.float()
    return torch.stack([maps.mean(dim=(2, 3)), maps.relu().mean(dim=(2, 3))])
