"""The registry of backbones: `register_backbone` makes a backbone known by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from engram.core.errors import EngramError
from engram.core.registry import OWN, Registry
from engram.nn.backbone import Backbone, Make, as_backbone
from engram.nn.convnext import convnext_tiny
from engram.nn.dinov2 import vit_small_dinov2
from engram.nn.efficientnet import efficientnet_lite0, efficientnet_lite1, efficientnet_lite2
from engram.nn.imagenet_resnet import resnet18_imagenet, resnet50_imagenet
from engram.nn.library_backbone import library_backbone
from engram.nn.mobilenet import mobilenetv3_large
from engram.nn.resnet import resnet10, resnet18, resnet18_small, resnet32
from engram.nn.side_by_side import efficientnet_lite0_lite2
from engram.nn.vision_transformer import vit_tiny
from engram.nn.wide_resnet import wrn16_2, wrn28_2

MakeT = TypeVar("MakeT", bound=Make)

BACKBONES: Registry[Make] = Registry("backbone", OWN, library_backbone)


def register_backbone(name: str) -> Callable[[MakeT], MakeT]:
    """A decorator that registers a function as a backbone: lower-case letters, digits and single dashes.

    The function takes a torch.Generator and returns a torch module with random weights from it: a `Backbone`, or any
    module with the attribute `dim` whose forward returns the same. 'engram list backbones' shows the first line of its
    docstring.
    """

    if not isinstance(name, str):
        raise EngramError(f'register_backbone takes a name, got {name!r:.80}; write @register_backbone("my-backbone")')

    def decorate(make: MakeT) -> MakeT:
        if not callable(make) or not _takes_one(make):
            raise EngramError(
                f"the backbone {name} is registered with {make!r:.80}; register_backbone takes a function of a "
                "torch.Generator that returns a module"
            )
        BACKBONES.add(name, make)
        return make

    return decorate


def _takes_one(make: Callable[..., object]) -> bool:
    """Whether a function can be called with one argument, as far as it tells."""
    try:
        inspect.signature(make).bind(None)
    except TypeError:
        return False
    except ValueError:  # it has no signature that can be read
        return True
    return True


def build_backbone(name: str, generator: torch.Generator) -> Backbone:
    """The backbone of that name with new random weights."""
    make = BACKBONES.find(name)
    made = make(generator)
    if not isinstance(made, nn.Module):
        raise EngramError(f"the backbone {name} must be a torch module, but its function returns {made!r:.80}")
    backbone = as_backbone(made)
    backbone.known_as, backbone.made_by = name, make
    return backbone


for _name, _make in {
    "resnet32": resnet32,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet18-small": resnet18_small,
    "wrn16-2": wrn16_2,
    "wrn28-2": wrn28_2,
    "vit-tiny": vit_tiny,
    "efficientnet-lite0": efficientnet_lite0,
    "efficientnet-lite1": efficientnet_lite1,
    "efficientnet-lite2": efficientnet_lite2,
    "efficientnet-lite0-lite2": efficientnet_lite0_lite2,
    "resnet18-imagenet": resnet18_imagenet,
    "resnet50-imagenet": resnet50_imagenet,
    "mobilenetv3-large": mobilenetv3_large,
    "convnext-tiny": convnext_tiny,
    "vit-small-dinov2": vit_small_dinov2,
}.items():
    register_backbone(_name)(_make)
