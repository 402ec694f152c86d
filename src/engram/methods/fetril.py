"""FeTrIL: feature translation (Petit, Popescu, Schindler, Picard, Delezoide, WACV 2023).

The backbone is frozen after the base stage, and one mean of features is kept per class. Features of an old class are
imitated: those of the most similar new class, moved by the difference of the two means. A linear classifier over all
classes is then fitted to the features of new classes and the imitated ones of old classes.

Legend: N images, D features, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import Learner, Passes, Stage, register, setting
from engram.core.errors import EngramError
from engram.core.rng import generator
from engram.methods.blocks.closed_form import FrozenBackboneMethod, new_features
from engram.methods.blocks.linear import SteppedSettings
from engram.nn.heads import Head, LinearHead

MEANS = "fetril.means"  # (K, D), of each class's features
# Of Newton's method: the most steps; what a last step promises, of the objective; of what a step promises, how much it
# must fall by; the shortest step.
NEWTON_STEPS, NEWTON_GAP, ENOUGH, SHORTEST = 200, 1e-12, 1e-4, 1e-12
MOMENTUM = 0.9


@dataclass(frozen=True)
class FeTrILSettings(SteppedSettings):
    """FeTrIL's settings; all but `train` have no effect on the training of the base stage.

    similarity: by which the new class is chosen whose features imitate those of an old class, of the means of features:
    the largest cosine or the smallest distance. classifier: "svm": linear support vector machines with squared hinge,
    each class against all others, on features of length 1. "fc": a softmax layer, trained by SGD. penalty: the factor
    of the losses in the objective of the machines (C). fit_epochs, fit_batch, fit_lr, fit_decay: of SGD; the rate falls
    to 0 by a cosine. train: of the base stage.
    """

    similarity: Literal["cosine", "euclidean"] = setting("cosine", after_base=True)
    classifier: Literal["svm", "fc"] = setting("svm", after_base=True)
    penalty: float = setting(1.0, above=0, after_base=True)
    fit_epochs: int = setting(50, at_least=0, after_base=True)
    fit_batch: int = setting(128, at_least=1, after_base=True)
    fit_lr: float = setting(0.05, at_least=0, after_base=True)
    fit_decay: float = setting(5e-4, at_least=0, after_base=True)


class UnitInputHead(LinearHead):
    """A linear head that sees features of length 1 in predictions; while the base stage trains, it sees them as are."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features if self.training else F.normalize(features, dim=1))


def most_similar(old: Tensor, new: Tensor, similarity: Literal["cosine", "euclidean"]) -> Tensor:
    """For each old mean (O, D), the row of the most similar new mean (N, D): int64 (O,)."""
    if similarity == "cosine":
        return (F.normalize(old, dim=1) @ F.normalize(new, dim=1).T).argmax(dim=1)
    return torch.cdist(old, new, compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=1)


def imitate_old(features: Tensor, labels: Tensor, means: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
    """Features that imitate those of the old classes, and their labels.

    Parameters
    ----------
    features, labels: of the new classes, (N, D) and (N,).
    means: of all classes, (K, D), those of the old classes first.
    nearest: the label of the new class for each old class, (O,).
    """
    moved, whose = [], []
    for label, source in enumerate(nearest.tolist()):
        own = features[labels == source]
        moved.append(own - means[source] + means[label])
        whose.append(torch.full((len(own),), label, device=labels.device))
    return torch.cat(moved), torch.cat(whose)


def fit_machine(inputs: Tensor, signs: Tensor, penalty: float) -> Tensor:
    """The weight w (D,) that minimises |w|^2 / 2 + penalty * sum_i max(0, 1 - signs_i w.x_i)^2, by Newton's method.

    inputs: the x_i, (N, D), float64. signs: (N,), 1 or -1. Each step is halved until the objective falls enough. The
    objective is strictly convex and piecewise quadratic, so a few steps reach its minimum.
    """

    def slack_and_objective(weight: Tensor) -> tuple[Tensor, float]:
        slack = (1 - signs * (inputs @ weight)).clamp(min=0)
        return slack, float(weight.square().sum() / 2 + penalty * slack.square().sum())

    weight = inputs.new_zeros(inputs.shape[1])
    slack, objective = slack_and_objective(weight)
    for _ in range(NEWTON_STEPS):
        gradient = weight - 2 * penalty * (inputs.T @ (signs * slack))
        active = inputs[slack > 0]
        curvature = 2 * penalty * (active.T @ active)
        curvature.diagonal().add_(1)
        direction = torch.linalg.solve(curvature, gradient)
        gain = float(gradient @ direction)  # twice the fall that a whole step promises
        if gain <= NEWTON_GAP * objective:
            return weight - direction
        rate, before = 1.0, objective
        slack, objective = slack_and_objective(weight - direction)
        while before - objective < ENOUGH * rate * gain and rate > SHORTEST:
            rate /= 2
            slack, objective = slack_and_objective(weight - rate * direction)
        weight = weight - rate * direction
    raise EngramError(
        f"no support vector machine was found with penalty={penalty:g} in {NEWTON_STEPS} steps; "
        "give a smaller penalty, or classifier=fc"
    )


def fit_machines(features: Tensor, labels: Tensor, num_classes: int, penalty: float) -> Tensor:
    """The weights (K, D + 1) of a machine per class against all others, on features of length 1 and a constant 1."""
    unit = F.normalize(features.double(), dim=1)
    inputs = torch.cat([unit, unit.new_ones(len(unit), 1)], dim=1)
    signs = [torch.where(labels == label, 1.0, -1.0).to(inputs) for label in range(num_classes)]
    return torch.stack([fit_machine(inputs, own, penalty) for own in signs])


def fit_softmax(
    settings: FeTrILSettings, features: Tensor, labels: Tensor, num_classes: int, seed: int, stage: int
) -> Tensor:
    """The weights (K, D + 1) of a softmax layer, the bias last, trained by SGD from random weights and no bias."""
    dim = features.shape[1]
    weight = torch.randn(num_classes, dim, generator=generator(seed, "classifier", stage)) / math.sqrt(dim)
    weight = weight.to(features).requires_grad_()
    bias = features.new_zeros(num_classes, requires_grad=True)
    optimiser = torch.optim.SGD([weight, bias], settings.fit_lr, MOMENTUM, weight_decay=settings.fit_decay)
    for epoch in range(settings.fit_epochs):
        rate = settings.fit_lr * (1 + math.cos(math.pi * epoch / settings.fit_epochs)) / 2
        optimiser.param_groups[0]["lr"] = rate
        order = torch.randperm(len(labels), generator=generator(seed, "classifier", stage, epoch))
        for batch in order.to(labels.device).split(settings.fit_batch):
            loss = F.cross_entropy(F.linear(features[batch], weight, bias), labels[batch])
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimiser.step()
    fitted = torch.cat([weight, bias[:, None]], dim=1).detach()
    if not bool(fitted.isfinite().all()):
        raise EngramError(f"the classifier fitted after stage {stage} is not finite; try a lower fit_lr")
    return fitted


@final
@register(
    "fetril",
    settings=FeTrILSettings,
    title="Feature Translation",
    paper="Petit, Popescu, Schindler, Picard, Delezoide, WACV 2023",
    memory="optional",
    shares_base=True,
)
class FeTrIL(FrozenBackboneMethod[FeTrILSettings]):
    """Imitates the features of old classes by moving those of new ones, and fits a linear classifier to all."""

    class_buffers = (MEANS,)

    def head(self, dim: int, capacity: int) -> Head:
        return (UnitInputHead if self.settings.classifier == "svm" else LinearHead)(dim, capacity)

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Keep the means of the new classes, and fit the head from scratch to all classes seen."""
        settings, head = self.settings, learner.network.head
        assert isinstance(head, LinearHead)
        assert head.bias is not None
        features, labels = new_features(learner, stage, passes)
        held = learner.buffers.get(MEANS)
        means = features.new_zeros(head.capacity, features.shape[1]) if held is None else held.clone()
        for label in stage.new_labels:
            means[label] = features[labels == label].double().mean(dim=0)
        learner.store(MEANS, means)
        if not stage.is_base:
            old, new = means[: stage.num_old], means[stage.num_old : stage.num_seen]
            nearest = stage.num_old + most_similar(old, new, settings.similarity)
            imitated, whose = imitate_old(features, labels, means, nearest)
            features, labels = torch.cat([features, imitated]), torch.cat([labels, whose])
        if settings.classifier == "svm":
            fitted = fit_machines(features, labels, stage.num_seen, settings.penalty)
        else:
            fitted = fit_softmax(settings, features, labels, stage.num_seen, learner.seed, stage.index)
        with torch.no_grad():
            head.weight[: stage.num_seen] = fitted[:, :-1]
            head.bias[: stage.num_seen] = fitted[:, -1]
