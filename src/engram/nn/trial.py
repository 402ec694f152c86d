"""Trial of a backbone on two random images, so that mistakes in it are found before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engram.core.errors import EngramError, described
from engram.nn.backbone import Backbone, Make
from engram.nn.backbones import BACKBONES, build_backbone

SEED = 1


def check_backbone(name: str, size: tuple[int, int]) -> None:
    """Refuse a registered backbone that breaks a rule of `Backbone` on images of that size (height, width)."""
    _check(name, BACKBONES.find(name), size)


@cache  # make: a name may be removed and registered again
def _check(name: str, make: Make, size: tuple[int, int]) -> None:
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            _Trial(name, size).check()
    except EngramError:
        raise
    except Exception as error:
        height, width = size
        raise EngramError(
            f"the backbone {name} cannot be used: it failed on two images of {width}x{height} pixels "
            f"({type(error).__name__}: {error}); ENGRAM_DEBUG=1 shows the traceback"
        ) from error


class _Trial:
    def __init__(self, name: str, size: tuple[int, int]) -> None:
        self._name = name
        self._images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(SEED))

    def check(self) -> None:
        torch.manual_seed(SEED)
        backbone = self._build()
        torch.manual_seed(SEED + 1)
        other = self._build()
        self._check_parameters(backbone)
        different = _first_difference(backbone.state_dict(), other.state_dict())
        if different is not None:
            self._refuse(
                f"has other initial values in {different} when it is made again with the same generator; draw all "
                "random values from the generator"
            )
        self._check_training(backbone.train())
        self._check_evaluation(backbone.eval())

    def _refuse(self, what: str) -> None:
        raise EngramError(f"the backbone {self._name} {what}", parameter="backbone", value=self._name)

    def _build(self) -> Backbone:
        backbone = build_backbone(self._name, torch.Generator().manual_seed(SEED))
        dim = getattr(backbone, "dim", None)
        if not isinstance(dim, int) or dim < 1:
            self._refuse(f"must have the attribute dim, the size of its embedding as a whole number, got {dim!r:.80}")
        return backbone

    def _check_parameters(self, backbone: Backbone) -> None:
        named = dict(backbone.named_parameters())
        if not named:
            self._refuse("has no parameters, so there is nothing to train")
        for name, parameter in named.items():
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                self._refuse(
                    f"must be made of float32 parameters on the CPU, but {name} is {parameter.dtype} on "
                    f"{parameter.device.type}"
                )
            if not parameter.requires_grad:
                self._refuse(
                    f"has the parameter {name}, which is not trained, but would still decay; register it as a buffer"
                )

    def _check_training(self, backbone: Backbone) -> None:
        maps, embedding = self._outputs(backbone)
        if not torch.equal(embedding, self._outputs(backbone)[1]):
            self._refuse(
                "gives another output for the same images in train mode; random numbers, such as those of dropout, "
                "would change when a run is resumed: leave them out"
            )
        wanted = {f"map {number}": each for number, each in enumerate(maps)} | dict(backbone.named_parameters())
        total = (embedding * torch.randn(embedding.shape)).sum()
        gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is None and name.startswith("map "):
                self._refuse(
                    f"returns {name}, from which its embedding is not computed; let the next layer read the map itself"
                )
            if gradient is None:
                self._refuse(f"has the parameter {name}, which has no effect on its embedding; remove it")

    def _check_evaluation(self, backbone: Backbone) -> None:
        before = {name: value.clone() for name, value in backbone.state_dict().items()}
        with torch.no_grad():
            maps, embedding = self._outputs(backbone)
        changed = _first_difference(before, backbone.state_dict())
        if changed is not None:
            self._refuse(f"changes {changed} in eval mode; only training may change it")
        if backbone.pools_last_map and not (
            maps
            and backbone.widths[-1] == backbone.dim
            and torch.allclose(maps[-1].mean(dim=(2, 3)), embedding, rtol=1e-3, atol=1e-4)
        ):
            self._refuse("has pools_last_map=True, but its embedding is not the mean of its last map over the pixels")
        if backbone.ends_in_relu and not backbone.pools_last_map:
            self._refuse("has ends_in_relu=True, which needs pools_last_map=True as well")

    def _outputs(self, backbone: Backbone) -> tuple[tuple[Tensor, ...], Tensor]:
        """The maps and the embedding of the images; refuse any other output."""
        returned: Any = backbone(self._images)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], tuple):
            self._refuse(
                "must return (maps, embedding), where maps is a tuple of tensors, perhaps empty, but it returns "
                f"{described(returned)}"
            )
        maps, embedding = returned
        for what, value, dimensions in (
            *((f"map {number}", each, 4) for number, each in enumerate(maps)),
            ("an embedding", embedding, 2),
        ):
            if not isinstance(value, Tensor) or value.ndim != dimensions or len(value) != len(self._images):
                shape = "(B, C, H, W)" if dimensions == 4 else "(B, dim)"
                self._refuse(f"must return {what} of the shape {shape}, but it is {described(value)} for 2 images")
            if value.dtype != torch.float32 or not bool(value.isfinite().all()):
                self._refuse(f"returns {what} that is not float32 or not finite for random images")
        if embedding.shape[1] != backbone.dim:
            self._refuse(f"has dim={backbone.dim}, but its embedding has {embedding.shape[1]} values per image")
        widths = tuple(each.shape[1] for each in maps)
        if tuple(backbone.widths) != widths:
            self._refuse(
                f"returns maps with {_listed(widths)} channels, but its widths are {tuple(backbone.widths)}; set "
                f"widths = {widths}"
            )
        return maps, embedding


def _first_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor in which two states differ, or None."""
    if one.keys() != other.keys():
        return min(one.keys() ^ other.keys())
    return next((name for name, value in one.items() if not torch.equal(value, other[name])), None)


def _listed(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths)) or "no"
