"""LDA: linear discriminant analysis on a frozen network, for networks that come trained.

As in deep streaming linear discriminant analysis (Hayes, Kanan, CVPR Workshops 2020). Nothing is trained. The score of
a class is the log density of a normal distribution around the mean of its features, with one covariance for all
classes. What is kept of a class is the number of its images, the mean of their features and a triangular factor of
their scatter, and no image. So the head after any lessons is that of one lesson with all images, a class can be removed
as if it had never been learned, and new images of a known class are added to it.

The features of an image are the mean over its views of the (signed) square root of what the backbone returns.

Legend: B batch, N images, D features, K capacity in classes, R rows of all factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from engram.contract import Learner, Method, Network, Passes, Phase, Settings, Stage, register, setting
from engram.core.errors import EngramError
from engram.methods.blocks.closed_form import AveragingNetwork
from engram.nn.backbone import Backbone
from engram.nn.heads import Head, LinearHead
from engram.nn.views import MIRRORED, PLAIN, View

# (K,) and (K, D): the number of images of each class, and the mean of their features.
COUNTS, MEANS = "lda.counts", "lda.means"
# (R, D) and (R,): factors F of the classes' scatter F^T F around their means, and the class of each row.
FACTORS, CLASSES = "lda.factors", "lda.classes"
NEGLIGIBLE = 1e-12  # length of a factor's row, relative to its longest
# The scores are divided by 1 + D / (MEAN_NOISE n), with n the mean number of images of a class: the error of the means
# makes plain ones too confident. Held-out groceries and Tiny-ImageNet, 5 to 23 images a class: the confidence that fits
# the accuracy is then that of a temperature between 0.9 and 1.5.
MEAN_NOISE = 4.0
VIEWS: dict[str, tuple[View, ...]] = {"one": (PLAIN,), "mirror": MIRRORED}


@dataclass(frozen=True)
class LDASettings(Settings):
    """LDA's settings.

    prior: weight of the assumption that all features vary alike, in images per feature: the covariance is that of the N
        images and of prior D further ones, whose features vary alike and independently. power: of the absolute value of
        each feature; 1 leaves the features as they are. views: "one" (the image) or "mirror" (and its mirror image), in
        the statistics and in predictions.
    """

    prior: float = setting(0.5, above=0)
    power: float = setting(0.5, above=0, at_most=1)
    views: Literal["one", "mirror"] = setting("mirror", role="views")


class LDAHead(LinearHead):
    """A linear head on powers of the features."""

    def __init__(self, dim: int, capacity: int, power: float) -> None:
        super().__init__(dim, capacity)
        self.power = power

    def input_features(self, embedding: Tensor, maps: Sequence[Tensor], ends_in_relu: bool) -> Tensor:
        """The embedding's values (B, D), each with its sign and the power of its absolute value."""
        features = super().input_features(embedding, maps, ends_in_relu)
        return features if self.power == 1 else features.sign() * features.abs().pow(self.power)


@final
@register(
    "lda",
    settings=LDASettings,
    title="Linear discriminant analysis on a frozen network",
    paper="after Hayes, Kanan, CVPR Workshops 2020",
    memory="optional",
)
class LDA(Method[LDASettings]):
    """Trains nothing; every stage adds to statistics of its classes and solves for the head."""

    predictors = ("cnn",)
    uses_teacher = False
    returning_classes = True
    keeps_statistics = True
    class_buffers = (COUNTS, MEANS)

    def head(self, dim: int, capacity: int) -> Head:
        return LDAHead(dim, capacity, self.settings.power)

    def network(self, backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]) -> Network:
        return AveragingNetwork(VIEWS[self.settings.views], backbone, head, mean, std)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Rows for the new classes. Warns about a network that is neither pretrained nor ever trained."""
        backbone = learner.network.backbone
        if stage.is_base and backbone.pretrained is None:
            learner.notes.append(
                f"lda does not train the network {backbone.known_as}, which has no pretrained weights, so the accuracy "
                "is poor; give weights ('engram list weights'), or choose another method"
            )
        super().grow(learner, stage, passes)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return []

    def feature_views(self) -> tuple[View, ...]:
        return VIEWS[self.settings.views]

    @torch.no_grad()
    def fit(self, learner: Learner, stage: Stage, features: Tensor, labels: Tensor) -> None:
        """Add the features of the stage to the statistics of their classes, and set the head to the solution."""
        capacity, size = learner.network.head.capacity, features.shape[1]
        held = learner.buffers
        if COUNTS not in held:
            held[COUNTS] = features.new_zeros(capacity, dtype=torch.int64)
            held[MEANS] = features.new_zeros(capacity, size, dtype=torch.float64)
            held[FACTORS] = features.new_zeros(0, size)
            held[CLASSES] = features.new_zeros(0, dtype=torch.int64)
        factors, classes = held[FACTORS], held[CLASSES]
        added: dict[int, Tensor] = {}
        for label in labels.unique().tolist():
            own = features[(labels == label).to(features.device)].double()
            added[label] = self._add(learner, label, own, factors[classes == label].double()).to(features)
        others = ~torch.isin(classes, classes.new_tensor(list(added)))
        owners = [classes.new_full((len(factor),), label) for label, factor in added.items()]
        learner.store(FACTORS, torch.cat([factors[others], *added.values()]))
        learner.store(CLASSES, torch.cat([classes[others], *owners]))
        self._solve(learner)

    def _add(self, learner: Learner, label: int, features: Tensor, factor: Tensor) -> Tensor:
        """Add rows of features (N, D) to the count and mean of a class; return the new factor of its scatter."""
        counts, means = learner.buffers[COUNTS], learner.buffers[MEANS]
        before, count = int(counts[label]), len(features)
        mean = features.mean(dim=0)
        rows = [factor, features - mean]
        if before:  # the scatter around the common mean is that of both parts and of their means
            rows.append(((mean - means[label]) * (before * count / (before + count)) ** 0.5)[None])
        means[label] += (mean - means[label]) * (count / (before + count))
        counts[label] += count
        triangle = torch.linalg.qr(torch.cat(rows), mode="r").R
        lengths = triangle.norm(dim=1)
        return triangle[lengths > NEGLIGIBLE * lengths.max()]

    @torch.no_grad()
    def remove(self, learner: Learner, labels: Sequence[int]) -> None:
        """Take the classes out of the statistics, and set the head to the solution."""
        gone = torch.tensor(sorted(labels), device=learner.buffers[CLASSES].device)
        kept = ~torch.isin(learner.buffers[CLASSES], gone)
        classes = learner.buffers[CLASSES][kept]
        learner.store(FACTORS, learner.buffers[FACTORS][kept])
        learner.store(CLASSES, classes - torch.searchsorted(gone, classes))
        if learner.num_classes:
            self._solve(learner)

    def _solve(self, learner: Learner) -> None:
        """Set the head to the discriminants of the statistics."""
        head, known = learner.network.head, learner.num_classes
        assert isinstance(head, LinearHead)
        assert head.bias is not None
        factors, counts = learner.buffers[FACTORS].double(), learner.buffers[COUNTS][:known]
        means = learner.buffers[MEANS][:known]
        weights, biases = discriminants(counts, means, factors, self.settings.prior)
        head.weight[:known] = weights.to(head.weight)
        head.bias[:known] = biases.to(head.bias)


def discriminants(counts: Tensor, means: Tensor, factors: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """The weights (K, D) and biases (K,) of the classes' scores, up to what is the same for all classes.

    All classes are equally probable, however many images they have.

    counts: (K,). means: (K, D). factors: (R, D), of the scatter around the means.
    """
    images, size = int(counts.sum()), means.shape[1]
    scatter = factors.T @ factors
    variance = scatter.diagonal().mean() / images
    if not bool(variance):  # all images of a class have the same features
        variance = torch.ones_like(variance)
    scatter.diagonal().add_(prior * size * variance)
    triangle, failed = torch.linalg.cholesky_ex(scatter / (images + prior * size))
    if bool(failed):
        raise EngramError(f"LDA has no solution in float64 with prior={prior:g}; give a larger prior")
    weights = torch.cholesky_solve(means.T, triangle).T / (1 + size * len(counts) / (MEAN_NOISE * images))
    return weights, -(weights * means).sum(dim=1) / 2
