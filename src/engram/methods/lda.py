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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, final

import torch
from torch import Tensor

from engram.contract import Learner, Method, Network, Passes, Phase, Settings, Stage, register, setting
from engram.core.errors import EngramError
from engram.methods.blocks.closed_form import AveragingNetwork, check_classes, check_tensors
from engram.nn.backbone import Backbone
from engram.nn.heads import Head, LinearHead
from engram.nn.views import CENTRE, MIRRORED, PLAIN, View

# (K,) and (K, D): the number of images of each class, and the mean of their features.
COUNTS, MEANS = "lda.counts", "lda.means"
# (R, D) and (R,): factors F of the classes' scatter F^T F around their means, and the class of each row.
FACTORS, CLASSES = "lda.factors", "lda.classes"
MOST_IMAGES = 10**9  # of a class
FOREIGN = 1e-3  # part of an image's features, relative to their length, that statistics with the image cannot lack
FLOAT32 = 1e-5  # relative size of a singular value of a factor that may come from its rounding to float32
NEGLIGIBLE = 1e-12  # length of a factor's row, relative to its longest
# The scores are divided by 1 + D / (MEAN_NOISE n), with n the mean number of images of a class: the error of the means
# makes plain ones too confident. Held-out groceries and Tiny-ImageNet, 5 to 23 images a class: the confidence that fits
# the accuracy is then that of a temperature between 0.9 and 1.5.
MEAN_NOISE = 4.0
VIEWS: dict[str, tuple[View, ...]] = {
    "one": (PLAIN,),
    "mirror": MIRRORED,
    "centre": (PLAIN, CENTRE),
    "mirror+centre": (*MIRRORED, CENTRE),
}


@dataclass(frozen=True)
class LDASettings(Settings):
    """LDA's settings.

    prior: weight of the assumption that all features vary alike, in images per feature: the covariance is that of the N
        images and of prior D further ones, whose features vary alike and independently. power: of the absolute value of
        each feature; 1 leaves the features as they are. views: "one" (the image), with "mirror" also its mirror image,
        with "centre" also its enlarged centre, in the statistics and in predictions.
    """

    prior: float = setting(0.5, above=0)
    power: float = setting(0.5, above=0, at_most=1)
    views: Literal["one", "mirror", "centre", "mirror+centre"] = setting("mirror+centre", role="views")


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
    confidence_margin = 0.05  # chosen by tools/measure_calibration.py
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
        self._store(learner, Statistics.of(learner).plus(features, labels))
        self.solve(learner)

    def merge(self, learner: Learner, label: int, into: int) -> None:
        self._store(learner, Statistics.of(learner).merged(label, into))

    def relabel(self, learner: Learner, features: Tensor, before: Tensor, after: Tensor | None) -> None:
        found = Statistics.of(learner).minus(features, before)
        self._store(learner, found if after is None else found.plus(features, after))

    def _store(self, learner: Learner, statistics: Statistics) -> None:
        for name, value in statistics.tensors().items():
            learner.store(name, value.to(learner.buffers[name].dtype))

    def check_buffers(self, learner: Learner, buffers: Mapping[str, Tensor]) -> None:
        head, known = learner.network.head, learner.num_classes
        assert isinstance(head, LinearHead)
        capacity, size = head.weight.shape
        if not buffers and not known:
            return
        expected = {
            COUNTS: (torch.int64, (capacity,)),
            MEANS: (torch.float64, (capacity, size)),
            FACTORS: (torch.float32, (-1, size)),
            CLASSES: (torch.int64, (-1,)),
        }
        check_tensors(buffers, expected)
        counts, classes = buffers[COUNTS], buffers[CLASSES]
        check_classes(classes, len(buffers[FACTORS]), known)
        rows = torch.bincount(classes, minlength=capacity)
        fits = bool((rows <= 2 * counts).all()) and int(counts.max()) <= MOST_IMAGES  # each lesson may add a row more
        if not fits or (known and not int(counts[:known].sum())):
            raise EngramError("its numbers of images do not fit what it keeps of them; the model is damaged")

    @torch.no_grad()
    def remove(self, learner: Learner, labels: Sequence[int]) -> None:
        """Take the classes out of the statistics, and set the head to the solution."""
        gone = torch.tensor(sorted(labels), device=learner.buffers[CLASSES].device)
        kept = ~torch.isin(learner.buffers[CLASSES], gone)
        classes = learner.buffers[CLASSES][kept]
        learner.store(FACTORS, learner.buffers[FACTORS][kept])
        learner.store(CLASSES, classes - torch.searchsorted(gone, classes))
        if learner.num_classes:
            self.solve(learner)

    @torch.no_grad()
    def solve(self, learner: Learner, features: Tensor | None = None, labels: Tensor | None = None) -> None:
        """Set the head to the discriminants of the statistics, and of these further images."""
        head, known = learner.network.head, learner.num_classes
        assert isinstance(head, LinearHead)
        assert head.bias is not None
        found = Statistics.of(learner)
        if features is not None and labels is not None:
            found = found.plus(features, labels)
        weights, biases = discriminants(found.counts[:known], found.means[:known], found.factors, self.settings.prior)
        head.weight[:known] = weights.to(head.weight)
        head.bias[:known] = biases.to(head.bias)

    def class_centres(self, learner: Learner, features: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """The means of the classes' features, from the statistics and these further images."""
        means, counts = (learner.buffers[name][: learner.num_classes].clone() for name in (MEANS, COUNTS))
        if features is not None and labels is not None:
            labels = labels.to(means.device)
            sums = (means * counts[:, None]).index_add(0, labels, features.to(means))
            means = sums / (counts + torch.bincount(labels, minlength=len(counts)))[:, None]
        return means


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the classes, as the buffers of a learner hold them, in float64."""

    counts: Tensor
    means: Tensor
    factors: Tensor
    classes: Tensor

    @classmethod
    def of(cls, learner: Learner) -> Self:
        """Those of a learner."""
        counts, means, factors, classes = (learner.buffers[name] for name in (COUNTS, MEANS, FACTORS, CLASSES))
        return cls(counts, means, factors.double(), classes)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names of the buffers."""
        return {COUNTS: self.counts, MEANS: self.means, FACTORS: self.factors, CLASSES: self.classes}

    def plus(self, features: Tensor, labels: Tensor) -> Self:
        """The statistics with further images. features: (N, D). labels: (N,)."""
        counts, means = self.counts.clone(), self.means.clone()
        added: dict[int, Tensor] = {}
        for label in labels.unique().tolist():
            own = features[(labels == label).to(features.device)].double()
            before, count, mean = int(counts[label]), len(own), own.mean(dim=0)
            rows = [self.factors[self.classes == label], own - mean]
            if before:  # the scatter around the common mean is that of both parts and of their means
                rows.append(((mean - means[label]) * (before * count / (before + count)) ** 0.5)[None])
            means[label] += (mean - means[label]) * (count / (before + count))
            counts[label] += count
            added[label] = _shortened(torch.cat(rows))
        return self._with(counts, means, added)

    def minus(self, features: Tensor, labels: Tensor) -> Self:
        """The statistics without images that are in them. features: (N, D). labels: (N,)."""
        counts, means = self.counts.clone(), self.means.clone()
        changed: dict[int, Tensor] = {}
        for label in labels.unique().tolist():
            own = features[(labels == label).to(features.device)].double()
            if len(own) >= int(counts[label]):
                raise EngramError("these are all images that a class was learned from; remove the class instead")
            factor = self.factors[self.classes == label]
            for image in own:
                count = int(counts[label])
                row = (image - means[label]) * (count / (count - 1)) ** 0.5
                factor = _without_row(factor, row)
                means[label] -= (image - means[label]) / (count - 1)
                counts[label] -= 1
            # The scatter of n images has the rank n - 1.
            _, values, vectors = torch.linalg.svd(factor, full_matrices=False)
            rank = int(counts[label]) - 1
            changed[label] = values[:rank, None] * vectors[:rank]
        return self._with(counts, means, changed)

    def merged(self, label: int, into: int) -> Self:
        """The statistics with the images of a class in another; the class has none."""
        counts, means = self.counts.clone(), self.means.clone()
        one, other = int(counts[label]), int(counts[into])
        between = (means[label] - means[into]) * (one * other / max(1, one + other)) ** 0.5
        rows = [self.factors[torch.isin(self.classes, self.classes.new_tensor([label, into]))], between[None]]
        means[into] += (means[label] - means[into]) * (one / max(1, one + other))
        counts[into] += one
        means[label], counts[label] = 0, 0
        return self._with(counts, means, {label: self.factors[:0], into: _shortened(torch.cat(rows))})

    def _with(self, counts: Tensor, means: Tensor, changed: dict[int, Tensor]) -> Self:
        """Statistics with these counts, means and changed factors."""
        others = ~torch.isin(self.classes, self.classes.new_tensor(list(changed)))
        owners = [self.classes.new_full((len(factor),), label) for label, factor in changed.items()]
        factors = torch.cat([self.factors[others], *changed.values()])
        return type(self)(counts, means, factors, torch.cat([self.classes[others], *owners]))


def _shortened(rows: Tensor) -> Tensor:
    """A factor of the same scatter, with at most as many rows as features."""
    triangle = torch.linalg.qr(rows, mode="r").R
    lengths = triangle.norm(dim=1)
    return triangle[lengths > NEGLIGIBLE * lengths.max()]


def _without_row(factor: Tensor, row: Tensor) -> Tensor:
    """A factor of F^T F - v v^T, where F is the factor (R, D) and v a row (D,) of the rows that it was made of."""
    length = float(row.norm())
    if not length:
        return factor
    left, values, right = torch.linalg.svd(factor, full_matrices=False)
    sure = values > FLOAT32 * values.max()
    share = left[:, sure] @ (right[sure] @ row / values[sure])  # v = F^T u
    if float((factor.T @ share - row).norm()) > FOREIGN * length or float(share @ share) > 1 + 10 * FOREIGN:
        raise EngramError(
            "the features of some images are not those that were learned (was it another device or precision?), so "
            "they cannot be taken out; remove the class, and learn it again from the other images"
        )
    square = min(1.0, float(share @ share))
    # I - u u^T = (I - c u u^T)^2
    return factor - ((1 - (1 - square) ** 0.5) / square) * torch.outer(share, share @ factor)


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
