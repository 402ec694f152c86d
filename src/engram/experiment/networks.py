"""New networks: made from a configuration, and checked before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from engram.contract import Method
from engram.core.errors import EngramError, described
from engram.core.rng import generator
from engram.engine.sensitivity import check_layers
from engram.experiment.learner_config import LearnerConfig
from engram.nn.backbone import Backbone
from engram.nn.backbones import BACKBONES, build_backbone
from engram.nn.heads import Head
from engram.nn.network import Network
from engram.nn.pretrained import tensors_of
from engram.nn.trial import check_backbone


def make_backbone(config: LearnerConfig, method: Method, start: bool = False) -> Backbone:
    """The backbone of a configuration, as its method needs it.

    start: with the pretrained weights of the configuration, if it has any. Otherwise they are not read, and the
    backbone has random weights, to be replaced by saved ones.
    """
    backbone = build_backbone(config.backbone, generator(config.seed, "backbone"))
    if method.needs_maps and not backbone.widths:
        raise EngramError(
            f"{config.method} distils feature maps, but the backbone {config.backbone} has none; choose another "
            "backbone, or a method that uses only embeddings and scores",
            parameter="backbone",
            value=config.backbone,
        )
    if method.needs_pooled_map and not backbone.pools_last_map:
        raise EngramError(
            f"{config.method} needs a backbone whose embedding is the mean of its last map, which that of "
            f"{config.backbone} is not; choose another backbone or another method",
            parameter="backbone",
            value=config.backbone,
        )
    if config.weights is not None:
        backbone.pretrained = partial(tensors_of, config.weights)
        if start:
            backbone.load_state_dict(backbone.pretrained())
    return method.backbone(backbone)


def make_network(
    config: LearnerConfig,
    method: Method,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    start: bool = False,
) -> Network:
    """The untrained network of a configuration, for up to that many classes. start: as for `make_backbone`."""
    backbone = make_backbone(config, method, start)
    head: object = method.head(backbone.dim, classes)
    if not isinstance(head, Head):
        raise EngramError(
            f"{type(method).__name__}.head() must return a Head, such as engram.nn.heads.LinearHead(dim, capacity), "
            f"but it returned {described(head)}"
        )
    return method.network(backbone, head, mean, std)


def check_network(config: LearnerConfig, method: Method, network: Network, image_size: tuple[int, int]) -> None:
    """Refuse a network that cannot be trained on images of that size by the method; called before training.

    The backbones of this package are known to work.
    """
    if BACKBONES.code(config.backbone) != "":
        check_backbone(config.backbone, image_size)
    if method.needs_image_gradients:
        check_layers(network, image_size)
