"""ACIL and DS-AL: ridge regression on random features of a backbone that is frozen after the base stage.

ACIL: analytic class-incremental learning (Zhuang, Weng, Wei, Xie, Toh, Lin, NeurIPS 2022). The features are mapped by a
fixed random matrix and a ReLU to several thousand dimensions. The head is the ridge regression of one-hot labels on
them, over all images seen. It needs two sums over images, to which each stage adds those of its new classes.

DS-AL: dual-stream analytic learning (Zhuang, He, Tong, Zeng, Chen, Lin, AAAI 2024). A second regression, on the tanh of
the same random map, is fitted to what the first leaves over, and added with a factor.

Legend: B batch, D features, M random features, K capacity in classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import Learner, Passes, Phase, RecipeHints, Stage, register, setting
from engram.core.memory_limits import check_memory
from engram.core.rng import generator
from engram.methods.blocks.closed_form import (
    FrozenBackboneMethod,
    new_features,
    pack_symmetric,
    ridge_weights,
    unpack_symmetric,
)
from engram.methods.blocks.linear import SteppedSettings
from engram.nn.heads import Head, LinearHead

# Of a stream, with h the random features of an image: the upper triangle of the sum of h h^T; (K, M), the sum of h
# times the target of each class.
PRODUCTS, SUMS = "A", "B"
MAIN, COMPENSATION = "main", "compensation"
CHUNK = 1024  # images whose random features are held at a time
MATRICES = 5  # of (M, M) float64 at the same time: the sums, kept and unpacked, with gamma, their factor; and a chunk
SMALL_WIDTH = 1024


class RandomFeaturesHead(LinearHead):
    """A linear head until `expand`; from then on, a weight per class over random features relu(x R), without a bias.

    projection: R, (D, M), which never changes; None until `expand`.
    """

    projection: Tensor | None

    def __init__(self, dim: int, capacity: int, width: int) -> None:
        super().__init__(dim, capacity)
        self.width = width
        self.register_buffer("projection", None)  # until `expand`, the state is that of a linear head

    def expand(self) -> None:
        """Replace weight and bias by weights over the random features; these and the projection are zero at first."""
        self.projection = self.weight.new_zeros(self.weight.shape[1], self.width)
        self.weight = nn.Parameter(self.weight.new_zeros(self.capacity, self.width))
        self.bias = None
        self.class_parameters = ("weight",)

    def prepare_for_state(self, state: Mapping[str, Tensor]) -> None:
        if "projection" in state and self.projection is None:
            self.expand()

    def project(self, features: Tensor) -> Tensor:
        """x R (B, M), in the type of the features."""
        assert self.projection is not None
        return features @ self.projection.to(features.dtype)

    def forward(self, features: Tensor) -> Tensor:
        if self.projection is None:
            return super().forward(features)
        return F.linear(self.project(features).relu(), self.weight)


class DualStreamHead(RandomFeaturesHead):
    """Adds to the scores of the random features relu(x R) those of tanh(x R), times a ratio.

    compensation: the weights of the second stream, (K, M); None until `expand`.
    """

    compensation: nn.Parameter | None

    def __init__(self, dim: int, capacity: int, width: int, ratio: float) -> None:
        super().__init__(dim, capacity, width)
        self.ratio = ratio
        self.register_parameter("compensation", None)

    def expand(self) -> None:
        super().expand()
        self.compensation = nn.Parameter(torch.zeros_like(self.weight))
        self.class_parameters = ("weight", "compensation")

    def forward(self, features: Tensor) -> Tensor:
        if self.compensation is None:
            return super().forward(features)
        projected = self.project(features)
        return F.linear(projected.relu(), self.weight) + self.ratio * F.linear(projected.tanh(), self.compensation)


@dataclass(frozen=True)
class ACILSettings(SteppedSettings):
    """ACIL's settings; all but `train` have no effect on the training of the base stage.

    width: the number M of random features. gamma: the penalty on the squared weights. train: of the base stage.
    """

    width: int = setting(8192, at_least=1, at_most=65536, after_base=True)
    gamma: float = setting(0.1, above=0, after_base=True)


ACILSettingsT = TypeVar("ACILSettingsT", bound=ACILSettings)


class AnalyticMethod(FrozenBackboneMethod[ACILSettingsT]):
    """Base class of ACIL and DS-AL: a head over random features, and the regressions of its streams."""

    def head(self, dim: int, capacity: int) -> Head:
        return RandomFeaturesHead(dim, capacity, self.settings.width)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """The base stage's training, refused if there is no room for what comes after it."""
        width = self.settings.width
        what, advice = f"sums over products of {width} random features", "give a smaller width"
        check_memory(MATRICES * width**2 * 8, what, advice, learner.network.mean.device)
        return super().phases(learner, stage, passes)

    def expanded_head(self, learner: Learner, stage: Stage) -> RandomFeaturesHead:
        """The head with its random features, which are drawn after the base stage."""
        head = learner.network.head
        assert isinstance(head, RandomFeaturesHead)
        if stage.is_base:
            head.expand()
            assert head.projection is not None
            dim, width = head.projection.shape
            drawn = torch.rand(dim, width, generator=generator(learner.seed, "random features"))
            head.projection.copy_((2 * drawn - 1) / math.sqrt(dim))
        return head


def one_hot_targets(capacity: int, projected: Tensor, labels: Tensor) -> Tensor:
    """One-hot labels (B, K), in the type of the projection."""
    return F.one_hot(labels, capacity).to(projected)


def fit_stream(
    learner: Learner,
    name: str,
    data: tuple[Tensor, Tensor],
    activation: Callable[[Tensor], Tensor],
    targets: Callable[[Tensor, Tensor], Tensor],
    gamma: float,
) -> Tensor:
    """Add images to the sums of a stream, and return the weights (K, M) of its regression over all images so far.

    Parameters
    ----------
    data: features (N, D) and labels (N,).
    activation: makes random features (B, M) of the float64 projection x R (B, M).
    targets: makes targets (B, K) of the projection and the labels (B,).
    """
    head = learner.network.head
    assert isinstance(head, RandomFeaturesHead)
    held = learner.buffers.get(f"{name}.{SUMS}")
    if held is None:
        products = torch.zeros(head.width, head.width, dtype=torch.float64, device=head.weight.device)
        sums = torch.zeros(head.capacity, head.width, dtype=torch.float64, device=head.weight.device)
    else:
        products, sums = unpack_symmetric(learner.buffers[f"{name}.{PRODUCTS}"], head.width), held.clone()
    for features, labels in zip(*(part.split(CHUNK) for part in data), strict=True):
        projected = head.project(features.double())
        random = activation(projected)
        products.addmm_(random.T, random)
        sums.addmm_(targets(projected, labels).T, random)
    learner.store(f"{name}.{PRODUCTS}", pack_symmetric(products))
    learner.store(f"{name}.{SUMS}", sums)
    return ridge_weights(products, sums, gamma)


@final
@register(
    "acil",
    settings=ACILSettings,
    title="Analytic Class-Incremental Learning",
    paper="Zhuang, Weng, Wei, Xie, Toh, Lin, NeurIPS 2022",
    memory="optional",
    shares_base=True,
    recipes=RecipeHints(small={"width": SMALL_WIDTH}),
)
class ACIL(AnalyticMethod[ACILSettings]):
    """Ridge regression on random features: every stage adds to two sums and solves for the head."""

    class_buffers = (f"{MAIN}.{SUMS}",)

    @torch.no_grad()
    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Add the images of the new classes to the sums, and set the head to the solution."""
        data, head = new_features(learner, stage, passes), self.expanded_head(learner, stage)
        one_hot = partial(one_hot_targets, head.capacity)
        head.weight.copy_(fit_stream(learner, MAIN, data, torch.relu, one_hot, self.settings.gamma))


@dataclass(frozen=True)
class DSALSettings(ACILSettings):
    """DS-AL's settings: those of ACIL, and of the second stream.

    gamma_compensation: the penalty on its squared weights. ratio: the factor of its scores.
    """

    gamma_compensation: float = setting(0.1, above=0, after_base=True)
    ratio: float = setting(0.6, at_least=0, after_base=True)


@final
@register(
    "ds-al",
    settings=DSALSettings,
    title="Dual-Stream Analytic Learning",
    paper="Zhuang, He, Tong, Zeng, Chen, Lin, AAAI 2024",
    memory="optional",
    shares_base=True,
    recipes=RecipeHints(small={"width": SMALL_WIDTH}),
)
class DSAL(AnalyticMethod[DSALSettings]):
    """ACIL, and a second regression that is fitted to what the first leaves over of the new classes."""

    class_buffers = (f"{MAIN}.{SUMS}", f"{COMPENSATION}.{SUMS}")

    def head(self, dim: int, capacity: int) -> Head:
        return DualStreamHead(dim, capacity, self.settings.width, self.settings.ratio)

    @torch.no_grad()
    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Fit the main stream, then the second stream to its residuals, and set the head to both solutions."""
        data, head = new_features(learner, stage, passes), self.expanded_head(learner, stage)
        assert isinstance(head, DualStreamHead)
        assert head.compensation is not None
        one_hot = partial(one_hot_targets, head.capacity)
        main = fit_stream(learner, MAIN, data, torch.relu, one_hot, self.settings.gamma)

        def residual(projected: Tensor, labels: Tensor) -> Tensor:
            left = one_hot(projected, labels) - projected.relu() @ main.T
            left[:, : stage.num_old] = 0  # of old classes, nothing is left to be learned from these images
            return left

        second = fit_stream(learner, COMPENSATION, data, torch.tanh, residual, self.settings.gamma_compensation)
        head.weight.copy_(main)
        head.compensation.copy_(second)
