"""Bedrock: one network, trained as well as possible on the base classes, and a head in closed form on all its levels.

1. The base stage is AFC's, but long and with strong augmentation.
2. The network is frozen. Its features are the embedding and the means of the last maps after a ReLU. They are
   standardised and expanded at random, as in analytic class-incremental learning (Zhuang et al., NeurIPS 2022).
3. The head is the ridge regression of one-hot labels on these, over all images seen and their views (mirrored, moved by
   a pixel). It needs two sums, to which each stage adds those of its new classes, and no exemplar.
4. A prediction is the mean over the same views.

How the classes after the base are divided into stages makes no difference but rounding.

Legend: B batch, L features of all levels, M random features, K capacity in classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import (
    Learner,
    Network,
    Passes,
    Phase,
    RecipeHints,
    Stage,
    Training,
    register,
    setting,
)
from engram.core.errors import EngramError
from engram.core.memory_limits import check_memory
from engram.core.rng import generator
from engram.methods.blocks.closed_form import AveragingNetwork, pack_symmetric, ridge_weights, unpack_symmetric
from engram.methods.blocks.lsc import LSCMethod, LSCSettings
from engram.nn.backbone import Backbone
from engram.nn.heads import Head, LSCHead
from engram.nn.views import MIRRORED, PLAIN, SHIFTED, View

# With h the random features of an image: the upper triangle of the sum of h h^T; (K, M), the sum of h for each class.
PRODUCTS, SUMS = "bedrock.A", "bedrock.B"
LEVELS = 3  # last maps whose means are features, beside the embedding
OFFSET = 0.1  # spread of the random features' offsets
SMALLEST = 1e-6  # spread of a feature; smaller ones are constant
CHUNK = 4096  # images whose random features are held at a time
MATRICES = 5  # of (M, M) in float64 at the same time
VIEWS: dict[str, tuple[View, ...]] = {"one": (PLAIN,), "mirror": MIRRORED, "shifts": SHIFTED}


def level_features(embedding: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """The embedding and the means of the last maps' positive parts, (B, L) in float32."""
    means = [each.relu().mean(dim=(2, 3), dtype=torch.float32) for each in maps[-LEVELS:]]
    return torch.cat([embedding.float(), *means], dim=1)


class BedrockHead(LSCHead):
    """An LSC head until `expand`; from then on, a weight per class over random features of all levels.

    width: M. projection, offset: of the random features, (L, M) and (M,); None until `expand`.
    """

    projection: Tensor | None
    offset: Tensor | None

    def __init__(self, width: int, dim: int, capacity: int, proxies: int, sharpness: float, *others: Any) -> None:
        super().__init__(dim, capacity, proxies, sharpness, *others)
        self.width = width
        for name in ("projection", "offset"):
            self.register_buffer(name, None)  # until `expand`, the state is that of an LSC head

    def expand(self, features: int) -> None:
        """Replace the proxies by weights over random features of that many features; all new tensors are zero."""
        zeros = self.weight.new_zeros
        self.projection, self.offset = zeros(features, self.width), zeros(self.width)
        self.weight = nn.Parameter(zeros(self.capacity, self.width))
        self.scale = None

    def prepare_for_state(self, state: Mapping[str, Tensor]) -> None:
        if "projection" in state and self.projection is None:
            self.expand(len(state["projection"]))

    def input_features(self, embedding: Tensor, maps: Sequence[Tensor], ends_in_relu: bool) -> Tensor:
        """The embedding; once the head is expanded, the means of the last maps' positive parts too."""
        return embedding.float() if self.projection is None else level_features(embedding, maps)

    def random_features(self, features: Tensor) -> Tensor:
        """gelu(x R + b), (B, M), with x the features (B, L)."""
        assert self.projection is not None
        assert self.offset is not None
        return F.gelu(torch.addmm(self.offset, features, self.projection))

    def forward(self, features: Tensor) -> Tensor:
        if self.projection is None:
            return super().forward(features)
        return F.linear(self.random_features(features), self.weight)


class ViewsNetwork(AveragingNetwork):
    """A network whose scores are averaged over views once its head is a closed form."""

    @property
    def views(self) -> tuple[View, ...]:
        assert isinstance(self.head, BedrockHead)
        return (PLAIN,) if self.head.projection is None else super().views


@dataclass(frozen=True)
class BedrockSettings(LSCSettings):
    """Bedrock's settings; the defaults are those of CIFAR-100.

    width: the number M of random features. gamma: the penalty on the squared weights, per view. views: "one" (the
    image), "mirror" (and its mirror image) or "shifts" (both, and moved by a pixel in four directions). train: of the
    base stage.
    """

    width: int = setting(8192, at_least=1, at_most=65536, after_base=True)
    gamma: float = setting(5.0, above=0, after_base=True)
    views: Literal["one", "mirror", "shifts"] = setting("shifts", after_base=True, role="views")
    train: Training = setting(factory=partial(Training, epochs=480), role="main")


@final
@register(
    "bedrock",
    settings=BedrockSettings,
    title="A strong frozen network, and ridge regression on random features of all its levels",
    paper="this project",
    memory="optional",
    recipes=RecipeHints(augmentation={"policy": "trivial", "cutout": 8}, small={"width": 1024, "views": "mirror"}),
)
class Bedrock(LSCMethod[BedrockSettings]):
    """Trains in the base stage only; every stage adds to two sums and solves for the head."""

    predictors = ("cnn",)
    uses_teacher = False
    class_buffers = (SUMS,)

    def head(self, dim: int, capacity: int) -> Head:
        settings = self.settings
        lsc = (settings.proxies, settings.sharpness, settings.reading("similarity"), settings.learned_scale)
        return BedrockHead(settings.width, dim, capacity, *lsc)

    def network(self, backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]) -> Network:
        return ViewsNetwork(VIEWS[self.settings.views], backbone, head, mean, std)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Proxies for the base classes; empty rows for later ones."""
        if stage.is_base:
            super().grow(learner, stage, passes)
        else:
            learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """The training of the base stage. Refused if the sums have no room."""
        width = self.settings.width
        what = f"sums over products of {width} random features"
        check_memory(MATRICES * width**2 * 8, what, "give a smaller width", learner.network.mean.device)
        return super().phases(learner, stage, passes) if stage.is_base else []

    @torch.no_grad()
    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Add the images of the new classes, in every view, to the sums, and set the head to the solution."""
        head, rows = learner.network.head, stage.all_rows[~stage.pool.exemplar]
        assert isinstance(head, BedrockHead)
        if stage.is_base:
            self._expand(learner, stage, passes, rows)
        device, settings = head.weight.device, self.settings
        if PRODUCTS in learner.buffers:
            products = unpack_symmetric(learner.buffers[PRODUCTS], head.width).double()
            sums = learner.buffers[SUMS].double()
        else:
            products = torch.zeros(head.width, head.width, dtype=torch.float64, device=device)
            sums = torch.zeros(head.capacity, head.width, dtype=torch.float64, device=device)
        views = VIEWS[settings.views]
        for part in rows.split(CHUNK):
            images, labels = stage.pool.images[part], stage.pool.labels[part].to(device)
            for view in views:
                features = passes.features(learner.network, images, view.mirror, (view.down, view.right))
                random = head.random_features(features).double()
                products.addmm_(random.T, random)
                sums.addmm_(F.one_hot(labels, head.capacity).to(random).T, random)
        # float32 is enough to keep: what is rounded away is far below gamma.
        learner.store(PRODUCTS, pack_symmetric(products.float()))
        learner.store(SUMS, sums.float())
        head.weight.copy_(ridge_weights(products, sums, settings.gamma * len(views)))

    def _expand(self, learner: Learner, stage: Stage, passes: Passes, rows: Tensor) -> None:
        """Draw the random features, for features that are standardised over the images of the base classes."""
        head, network = learner.network.head, learner.network
        assert isinstance(head, BedrockHead)
        head.expand(network.backbone.dim + sum(network.backbone.widths[-LEVELS:]))
        features = torch.cat([passes.features(network, stage.pool.images[part]) for part in rows.split(CHUNK)])
        if not bool(features.isfinite().all()):
            raise EngramError("the features after the base stage are not finite; try a lower learning rate")
        assert head.projection is not None
        assert head.offset is not None
        draws, (size, width) = generator(learner.seed, "random features"), head.projection.shape
        drawn = torch.randn(size, width, generator=draws).to(features) / math.sqrt(size)
        offset = OFFSET * torch.randn(width, generator=draws).to(features)
        # Centre and spread of the features are part of the random map.
        head.projection.copy_(drawn / features.std(dim=0).clamp(min=SMALLEST)[:, None])
        head.offset.copy_(offset - features.mean(dim=0) @ head.projection)
