"""DDE, an add-on to a host: distilling the data effect and removing the momentum effect (Hu et al., CVPR 2021).

Old images are gone, but their effect can be had through new ones that the old model finds alike: an image is classified
together with its neighbours (causal effect of the old data). And the direction that training on mostly new images
carries every embedding in speaks for the new classes: what it adds to the scores is taken away in prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.exemplars import balanced_rows
from engram.contract.learner import Learner
from engram.contract.method import Method, Neighbours, Passes, Phase, Step, Terms, register
from engram.contract.settings import Settings, setting
from engram.core.errors import EngramError
from engram.core.rng import generator
from engram.data.stage import Stage
from engram.methods.blocks.cosine import CosineMethod, cosine_phases, cross_entropy
from engram.methods.blocks.lsc import HostMethod, classification_loss, host_phases, weighted
from engram.methods.podnet import PODNetSettings, pod_distances, pod_weights
from engram.methods.ucir import RebalancingSettings, rebalancing, rebalancing_weights
from engram.nn.effect import MomentumEffect
from engram.nn.heads import Head
from engram.nn.network import Network, Output

Removal = Literal["fixed", "learned", "none"]
# Where more classes are seen than that, one neighbour among the first so many images of an epoch has to do.
MANY_CLASSES, FIRST = 500, 10_000
FIT_BATCH = 128


@dataclass(frozen=True)
class DDESettings(Settings):
    """The add-on's settings.

    neighbours: of each image; None is 10, or 1 where more than 500 classes are seen; 0 leaves the host's own
    classification. removal: the momentum effect is taken away by a fixed factor, by two that are learned on a balanced
    set after the stage, or not at all. strength: the fixed factor, and where the learned ones start. fit_epochs,
    fit_rate: how they are learned.
    """

    neighbours: int | None = setting(None, at_least=0)
    removal: Removal = "fixed"
    strength: float = setting(0.5, at_least=0)
    fit_epochs: int = setting(20, at_least=0)
    fit_rate: float = setting(2e-3, at_least=0)

    def around(self, stage: Stage) -> Neighbours | None:
        """What neighbours an image has in a stage."""
        if stage.is_base or self.neighbours == 0:
            return None
        many = stage.num_seen > MANY_CLASSES
        return Neighbours(self.neighbours or (1 if many else 10), FIRST if many else None)


def neighbour_entropy(logits: Tensor, labels: Tensor, neighbours: Tensor, shares: Tensor) -> Tensor:
    """-log of (softmax(z(x)) + mean of softmax(z(neighbour))) / 2 at the label, one value a sample (B,).

    logits: (B, K). neighbours: (B, N, K), without gradient. shares: (B, N), what each neighbour counts in the mean; an
    image that has none is classified alone.
    """
    at = labels[:, None]
    own = logits.log_softmax(dim=1).gather(1, at).squeeze(1)
    theirs = neighbours.detach().log_softmax(dim=2).gather(2, at.expand_as(shares)[:, :, None]).squeeze(2)
    around = (theirs + shares.log()).logsumexp(dim=1) - math.log(2)  # minus infinity where there is none
    return -torch.logaddexp(own + (1 - shares.sum(dim=1) / 2).log(), around)


def dde_classification(step: Step, host: Tensor) -> Tensor:
    """The mean entropy of the images, each with its neighbours; the host's own term in phases without them."""
    if step.neighbours is None:
        return host
    assert step.shares is not None
    return neighbour_entropy(step.student.logits, step.labels, step.neighbours, step.shares).mean()


def track_effect(network: Network, student: Output) -> None:
    """Each step: v = 0.9 v + the batch's mean embedding."""
    effect_of(network).track(student.embedding)


def effect_of(network: Network) -> MomentumEffect:
    """The network's momentum effect."""
    assert network.head.effect is not None
    return network.head.effect


def with_neighbours(settings: DDESettings, stage: Stage, phases: Sequence[Phase]) -> list[Phase]:
    """The host's phases; the first follows the momentum and, after the base stage, looks at neighbours."""
    main, *others = phases
    return [replace(main, observe=track_effect, neighbours=settings.around(stage)), *others]


def begin_effect(settings: DDESettings, learner: Learner, stage: Stage) -> None:
    """A new direction for the stage, of which predictions are freed from the second stage on."""
    effect = effect_of(learner.network)
    effect.begin()
    effect.remove(0.0, 0.0 if stage.is_base or settings.removal == "none" else settings.strength)


def finish_effect(settings: DDESettings, learner: Learner, stage: Stage, passes: Passes) -> None:
    """Where the removal is learned, fits it on as many images of each class as the memory keeps."""
    if settings.removal != "learned" or stage.is_base:
        return
    rows = balanced_rows(learner, stage, passes)
    embeddings = passes.embed(learner.network, stage.pool.images[rows])
    labels = stage.pool.labels[rows].to(embeddings.device)
    blend, strength = fit_removal(settings, learner, stage, embeddings, labels)
    if not bool((blend + strength).isfinite()):
        raise EngramError(f"the removal learned after stage {stage.index} is not finite; try a lower fit_rate")
    effect_of(learner.network).remove(strength * (1 - blend), strength * blend)


def fit_removal(
    settings: DDESettings, learner: Learner, stage: Stage, embeddings: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """a1 and a2 of z - a2 ((1 - a1) b(previous direction) + a1 b(this one)), by Adam on the cross-entropy.

    They start where the fixed removal is, at 1 and its strength; after half of the epochs the rate is a tenth.
    """
    head, effect = learner.network.head, effect_of(learner.network)
    scale = torch.ones((), device=embeddings.device) if head.scale is None else head.scale.detach()
    numbers = torch.tensor([1.0, settings.strength], device=embeddings.device, requires_grad=True)
    optimiser = torch.optim.Adam([numbers], lr=settings.fit_rate)
    for epoch in range(settings.fit_epochs):
        optimiser.param_groups[0]["lr"] = settings.fit_rate * (1 if 2 * epoch < settings.fit_epochs else 0.1)
        order = torch.randperm(len(labels), generator=generator(learner.seed, "removal", stage.index, epoch))
        for batch in order.to(labels.device).split(FIT_BATCH):
            with torch.no_grad():
                scores, (before, moving) = head(embeddings[batch]), effect.each(embeddings[batch], head).unbind(dim=1)
            blend, strength = numbers
            mended = scores - strength * ((1 - blend) * before + blend * moving)
            loss = F.cross_entropy((scale * mended).masked_fill(~head.seen, -torch.inf), labels[batch])
            (numbers.grad,) = torch.autograd.grad(loss, numbers)
            optimiser.step()
    blend, strength = numbers.detach()
    return blend, strength


@dataclass(frozen=True)
class WithDDESettings(Settings):
    """The add-on's settings beside those of its host."""

    dde: DDESettings = setting(factory=DDESettings, after_base=True)


WithDDESettingsT = TypeVar("WithDDESettingsT", bound=WithDDESettings)


class WithDDE(Method[WithDDESettingsT]):
    """The add-on's part of a method, before that of its host: `class PODNetDDE(WithDDE[...], HostMethod[...])`."""

    def head(self, dim: int, capacity: int) -> Head:
        head = super().head(dim, capacity)
        head.effect = MomentumEffect(dim)
        return head

    def base_key(self) -> dict[str, Any] | None:
        """Not the host's own: the network carries the momentum effect."""
        return {**(super().base_key() or {}), "effect": True}

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        begin_effect(self.settings.dde, learner, stage)

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        finish_effect(self.settings.dde, learner, stage, passes)


@dataclass(frozen=True)
class PODNetDDESettings(WithDDESettings, PODNetSettings):
    """PODNet's settings and the add-on's."""


@final
@register(
    "podnet-dde",
    settings=PODNetDDESettings,
    title="PODNet with the data effect distilled and the momentum effect removed",
    paper="Hu et al., CVPR 2021",
)
class PODNetDDE(WithDDE[PODNetDDESettings], HostMethod[PODNetDDESettings]):
    """PODNet that classifies an image together with its neighbours."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = pod_weights(self.settings, stage)
        host = host_phases(self.settings, learner, stage, passes, self.loss, weights)
        return with_neighbours(self.settings.dde, stage, host)

    def loss(self, step: Step) -> Terms:
        """The entropy of an image and its neighbours, and PODNet's distillation."""
        classification = dde_classification(step, classification_loss(self.settings, step).mean())
        return {"classification": classification, **weighted(step, **pod_distances(step))}


@dataclass(frozen=True)
class UCIRDDESettings(WithDDESettings, RebalancingSettings):
    """UCIR's settings and the add-on's."""


@final
@register(
    "ucir-dde",
    settings=UCIRDDESettings,
    title="UCIR with the data effect distilled and the momentum effect removed",
    paper="Hu et al., CVPR 2021",
    brightened=False,
)
class UCIRDDE(WithDDE[UCIRDDESettings], CosineMethod[UCIRDDESettings]):
    """UCIR that classifies an image together with its neighbours."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        host = cosine_phases(self.settings, stage, self.loss, rebalancing_weights(self.settings, stage))
        return with_neighbours(self.settings.dde, stage, host)

    def loss(self, step: Step) -> Terms:
        """The entropy of an image and its neighbours, and UCIR's two other terms."""
        classification = dde_classification(step, cross_entropy(step))
        return {"classification": classification, **rebalancing(self.settings, step)}
