"""Backbones of timm and torchvision by name, as `timm:NAME` and `torchvision:NAME`, if that library is installed.

Neither is imported before such a name is used. The classifier is removed, and layers that draw random numbers in
training pass everything on. These backbones return an embedding and no maps.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.errors import EngramError, UnknownNameError
from engram.nn.backbone import Backbone, Make

LIBRARIES = ("timm", "torchvision")
CLASSES = 1000  # of the classifier in an untrained network of torchvision
_RANDOM = {
    "Dropout": "p",
    "StochasticDepth": "p",
    "DropPath": "drop_prob",
}  # layers, and their share of what is dropped


class LibraryBackbone(Backbone):
    """A network of another library whose forward returns the embedding. classifier: its name in published files."""

    def __init__(self, module: nn.Module, dim: int, classifier: str) -> None:
        super().__init__()
        self.module = module
        self.dim = dim
        self._classifier = classifier
        for each in module.modules():
            if (share := _RANDOM.get(type(each).__name__)) is not None:
                setattr(each, share, 0.0)

    def own_name(self, published: str) -> str | None:
        if published.startswith(f"{self._classifier}."):
            return None
        return published if published.startswith("module.") else f"module.{published}"

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        return (), self.module(x)


def library_backbone(name: str) -> tuple[Make, str, str] | None:
    """The function that makes the backbone of that name, the library, and its version; None for other names."""
    library, colon, model = name.partition(":")
    if not colon or library not in LIBRARIES:
        return None
    if find_spec(library) is None:
        raise EngramError(
            f"the backbone {name} needs the package {library}: pip install {library}", parameter="backbone", value=name
        )
    try:
        package: Any = importlib.import_module("timm" if library == "timm" else "torchvision.models")
    except Exception as error:  # such as a torchvision that was built for another torch
        raise EngramError(
            f"the backbone {name} needs the package {library}, which is installed and cannot be imported ({error}); "
            "install the version that belongs to this version of torch",
            parameter="backbone",
            value=name,
        ) from error
    models = {*package.list_models(), *(package.list_models(pretrained=True) if library == "timm" else ())}
    if model not in models:
        raise UnknownNameError(f"model of {library}", model, sorted(models))
    create = _timm if library == "timm" else _torchvision

    def make(generator: torch.Generator) -> LibraryBackbone:
        # The library draws from torch's own generator.
        seed = int(torch.randint(2**31, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return create(model)

    return make, library, metadata.version(library)


def _timm(model: str) -> LibraryBackbone:
    timm: Any = importlib.import_module("timm")
    try:
        # Any size, also one that patches do not divide.
        flexible = {"dynamic_img_size": True, "dynamic_img_pad": True}
        module = timm.create_model(model, pretrained=False, num_classes=0, **flexible)
    except TypeError:  # only transformers have these arguments, and only they have a fixed image size without them
        module = timm.create_model(model, pretrained=False, num_classes=0)
    about = module.default_cfg
    dim = getattr(module, "head_hidden_size", None) or module.num_features
    backbone = LibraryBackbone(module, dim, str(about.get("classifier", "head")))
    backbone.published_for = about["input_size"][-1], tuple(about["mean"]), tuple(about["std"])
    return backbone


def _torchvision(model: str) -> LibraryBackbone:
    models: Any = importlib.import_module("torchvision.models")
    module = models.get_model(model, weights=None)
    linear = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.Linear)]
    if not linear or linear[-1][1].out_features != CLASSES:
        raise EngramError(
            f"the backbone torchvision:{model} does not end in a linear classifier; choose another",
            parameter="backbone",
            value=f"torchvision:{model}",
        )
    name, last = linear[-1]
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, nn.Identity())
    return LibraryBackbone(module, last.in_features, name)
