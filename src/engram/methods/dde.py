"""DDE, an addition to other methods: distil the data effect and remove the momentum effect (Hu et al., CVPR 2021).

Old images are gone, but their effect can be estimated from new images that are similar for the old model: an image is
classified together with its neighbours (causal effect of the old data). Training on mostly new images moves all
embeddings in one direction, which favours the new classes: its effect on the scores is subtracted in prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import Learner, Method, Passes, Phase, RecipeHints, Settings, Stage, Step, Terms, register, setting
from engram.contract.exemplars import balanced_rows
from engram.contract.extension import BatchPlan, Extension, PhaseContext, StepHooks
from engram.core.errors import EngramError
from engram.core.rng import generator
from engram.data.augment import Draws
from engram.methods.podnet import IMAGENET as PODNET_IMAGENET
from engram.methods.podnet import PODMethod, PODNetSettings
from engram.methods.ucir import IMAGENET as UCIR_IMAGENET
from engram.methods.ucir import RebalancingMethod, RebalancingSettings
from engram.nn.heads import Head
from engram.nn.network import Network, Output

Removal = Literal["fixed", "learned", "none"]
# If more than MANY_CLASSES classes are seen, only one neighbour is used, searched among that many images of an epoch.
MANY_CLASSES, SEARCHED = 500, 10_000
FIT_BATCH = 128


@dataclass(frozen=True)
class DDESettings(Settings):
    """Settings of DDE.

    neighbours: per image; None: 10, or 1 if more than 500 classes are seen; 0: the usual classification of the method.
    removal: the momentum effect is subtracted with a fixed factor, with two factors that are learned on a balanced set
    after the stage, or not at all. strength: the fixed factor, and the initial value of the learned one. fit_epochs,
    fit_rate: for learning them.
    """

    neighbours: int | None = setting(None, at_least=0)
    removal: Removal = "fixed"
    strength: float = setting(0.5, at_least=0)
    fit_epochs: int = setting(20, at_least=0)
    fit_rate: float = setting(2e-3, at_least=0)

    def neighbour_search(self, stage: Stage) -> Neighbours | None:
        """The search for neighbours in a stage, or None."""
        if stage.is_base or self.neighbours == 0:
            return None
        many = stage.num_seen > MANY_CLASSES
        return Neighbours(self.neighbours or (1 if many else 10), SEARCHED if many else None)


DECAY = 0.9


class MomentumEffect(nn.Module):
    """Computes the effect on the scores of the direction in which a stage's embeddings have accumulated.

    moving: (D,), the decaying sum of the batches' mean embeddings in the current stage; before: that of the previous
    stage. factors: (2,), how much of the effect of `before` and of `moving` is subtracted; 0 at first.
    """

    moving: Tensor
    before: Tensor
    factors: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("moving", torch.zeros(dim))
        self.register_buffer("before", torch.zeros(dim))
        self.register_buffer("factors", torch.zeros(2))

    def begin(self) -> None:
        """Start a stage: the current direction becomes the previous one, and a new one starts from zero."""
        self.before.copy_(self.moving)
        self.moving.zero_()

    def track(self, embedding: Tensor) -> None:
        """Add a batch of embeddings (B, D): v = 0.9 v + their mean."""
        self.moving.mul_(DECAY).add_(embedding.detach().mean(dim=0))

    def remove(self, before: float | Tensor, moving: float | Tensor) -> None:
        """Set how much of each direction's effect is subtracted."""
        self.factors.copy_(torch.stack([torch.as_tensor(before), torch.as_tensor(moving)]))

    def each(self, embedding: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """The effect (B, 2, K) of each direction u on the scores of embeddings (B, D): cos(h, u) * head(u).

        A direction that is still zero has none.
        """
        directions = F.normalize(torch.stack([self.before, self.moving]), dim=1)
        cosines = F.normalize(embedding, dim=1) @ directions.T
        return cosines[:, :, None] * head(directions)

    def forward(self, embedding: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """The effect (B, K) to subtract from the head's scores of embeddings (B, D)."""
        return torch.einsum("bjk,j->bk", self.each(embedding, head), self.factors)


ENTRIES = 2**24  # similarities at a time: 64 MB
NEIGHBOUR_COST = 0.08  # of a neighbour, relative to training on an image without a teacher


class NeighbourLogits(NamedTuple):
    """The neighbours of a batch, for the loss. logits: (B, N, K), without gradient. shares: (B, N), their weights.

    The weights are 1 / (number of neighbours that exist), and 0 for those that do not.
    """

    logits: Tensor
    shares: Tensor


@dataclass(frozen=True)
class Neighbours(Extension):
    """Finds, before each epoch, the images of new classes nearest to each image in the teacher's embedding.

    count: neighbours per image. first: search among the first images of new classes only; None: among all.
    The loss finds their logits by `step.extra(NeighbourLogits)`.
    """

    needs_teacher = True
    needs_all_images = True  # the neighbours are known only when the epoch begins

    count: int
    first: int | None = None

    def cost(self) -> float:
        """The neighbours of each image, and the teacher's pass over the image before the epoch."""
        return NEIGHBOUR_COST * (self.count + 1)

    def attach(self, context: PhaseContext, state: Mapping[str, Tensor]) -> StepHooks:
        return _NeighbourLookup(self, context)


@dataclass(frozen=True)
class TrackMomentum(Extension):
    """Adds each batch's mean embedding to the momentum effect of the network's head."""

    def attach(self, context: PhaseContext, state: Mapping[str, Tensor]) -> StepHooks:
        return _TrackHooks(context.learner.network)


class _TrackHooks(StepHooks):
    def __init__(self, network: Network) -> None:
        self._network = network

    def after_update(self, student: Output) -> bool:
        momentum_effect(self._network).track(student.embedding)
        return False


def nearest(unit: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each of the embeddings (M, D) of length 1 the places (M, count) of the nearest ones, nearest first.

    Only embeddings at `places` (C,) are searched, and no embedding is its own neighbour. The second result, bool
    (M, count), is False for places beyond the last neighbour. Computes M C D products and holds ENTRIES at a time.
    """
    candidates, width = unit[places], min(count, len(places))
    found: list[Tensor] = []
    exists: list[Tensor] = []
    for part in torch.arange(len(unit), device=unit.device).split(max(1, ENTRIES // max(1, len(places)))):
        # The nearest of vectors of length 1 have the largest products.
        alike = (unit[part] @ candidates.T).masked_fill_(part[:, None] == places, -torch.inf)
        best = alike.topk(width, dim=1)
        found.append(places[best.indices])
        exists.append(best.values > -torch.inf)
    missing = (0, count - width)
    return F.pad(torch.cat(found), missing), F.pad(torch.cat(exists), missing)


class _NeighbourLookup(StepHooks):
    """The neighbours of a phase's images, planned as further images of each step, one epoch at a time.

    A neighbour has the augmentation that it has as an image of the epoch itself. The neighbours of an epoch depend only
    on its plan and on the teacher, so a resumed epoch finds the same ones.
    """

    def __init__(self, neighbours: Neighbours, context: PhaseContext) -> None:
        self._context, self._count, self._first = context, neighbours.count, neighbours.first
        self._used = min(context.steps * context.batch_size, context.num_images)
        rows, width = len(context.plan), context.batch_size * self._count
        planned_rows, lr, *draws = (
            context.persistent_buffer(
                f"neighbours.{i}", (rows, width, *own.shape[2:]) if own.ndim > 1 else (rows,), own.dtype
            )
            for i, own in enumerate(context.plan.tensors())
        )
        self._planned = BatchPlan(planned_rows, Draws(*draws), lr)
        self._shares = context.persistent_buffer("neighbours.shares", (rows, width))
        dim = context.learner.network.backbone.dim
        self._unit = context.persistent_buffer("neighbours.embeddings", (rows, context.batch_size, dim))
        self._is_new = torch.zeros(0, dtype=torch.bool)
        self._takers: dict[int, Callable[[], None]] = {}  # by batch size
        self._now: NeighbourLogits | None = None

    def load_plan(self, plan: BatchPlan, epochs: range) -> None:
        stage = self._context.stage
        self._is_new = stage.pool.labels[plan.rows] >= stage.num_old

    @torch.no_grad()
    def before_epoch(self, first_row: int) -> None:
        context, steps = self._context, self._context.steps
        context.counter.fill_(first_row)
        for step in range(steps):
            self._taker(context.last_batch if step == steps - 1 else context.batch_size)()
        epoch = slice(first_row, first_row + steps)
        # If an epoch ends in a smaller batch, the rest of its last row holds no image.
        places = self._is_new[epoch].flatten()[: self._used].nonzero().squeeze(1)[: self._first]
        found, exists = nearest(self._unit[epoch].flatten(0, 1), places.to(context.counter.device), self._count)
        for target, own in zip(self._planned.tensors(), context.plan.tensors(), strict=True):
            if own.ndim > 1:  # not the learning rate
                target[epoch] = own[epoch].flatten(0, 1)[found].view(steps, -1, *own.shape[2:])
        shares = exists / exists.sum(dim=1, keepdim=True).clamp(min=1)
        self._shares[epoch] = shares.view(steps, -1)

    def _taker(self, size: int) -> Callable[[], None]:
        """Passes a batch of that size through the teacher: recorded on a GPU."""
        if size not in self._takers:
            key = (size, self._context.batch_size)
            self._takers[size] = self._context.record("search for neighbours", key, partial(self._embed, size))
        return self._takers[size]

    @torch.no_grad()
    def _embed(self, size: int) -> None:
        context = self._context
        unit = F.normalize(context.teacher(context.images(context.plan, size)).embedding, dim=1)
        self._unit[:, :size].index_copy_(0, context.counter, unit[None])
        context.counter.add_(1)

    def before_forward(self, size: int) -> None:
        context, width = self._context, size * self._count
        logits = context.predict(context.images(self._planned, width)).logits
        shares = self._shares.index_select(0, context.counter)[0, :width]
        self._now = NeighbourLogits(logits.view(size, self._count, -1), shares.view(size, self._count))

    def step_extras(self, labels: Tensor) -> NeighbourLogits | None:
        return self._now


def neighbour_entropy(logits: Tensor, labels: Tensor, neighbours: Tensor, shares: Tensor) -> Tensor:
    """-log of (softmax(z(x)) + mean of softmax(z(neighbour))) / 2 at the label, one value per sample (B,).

    logits: (B, K). neighbours: (B, N, K), without gradient. shares: (B, N), weights of the neighbours in the mean. For
    an image without neighbours, this is cross-entropy.
    """
    at = labels[:, None]
    own = logits.log_softmax(dim=1).gather(1, at).squeeze(1)
    theirs = neighbours.detach().log_softmax(dim=2).gather(2, at.expand_as(shares)[:, :, None]).squeeze(2)
    around = (theirs + shares.log()).logsumexp(dim=1) - math.log(2)  # minus infinity without neighbours
    return -torch.logaddexp(own + (1 - shares.sum(dim=1) / 2).log(), around)


def with_neighbours(step: Step, terms: Terms) -> Terms:
    """A method's terms, but classification is the mean entropy of the images with their neighbours, if it has any."""
    neighbours = step.extra(NeighbourLogits)
    if neighbours is None:
        return terms
    entropy = neighbour_entropy(step.student.logits, step.labels, neighbours.logits, neighbours.shares)
    return {**terms, "classification": entropy.mean()}


def momentum_effect(network: Network) -> MomentumEffect:
    """The momentum effect of the network's head."""
    effect = network.head.get_submodule("effect")
    assert isinstance(effect, MomentumEffect)
    return effect


def fit_removal(
    settings: DDESettings, learner: Learner, stage: Stage, embeddings: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Fit a1 and a2 of z - a2 ((1 - a1) b(previous direction) + a1 b(this one)), by Adam on the cross-entropy.

    They start at 1 and `strength`, which is the fixed removal; after half of the epochs, the rate is a tenth.
    """
    head, effect = learner.network.head, momentum_effect(learner.network)
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
            adjusted = scores - strength * ((1 - blend) * before + blend * moving)
            loss = F.cross_entropy((scale * adjusted).masked_fill(~head.seen, -torch.inf), labels[batch])
            (numbers.grad,) = torch.autograd.grad(loss, numbers)
            optimiser.step()
    blend, strength = numbers.detach()
    return blend, strength


@dataclass(frozen=True)
class WithDDESettings(Settings):
    """The settings of a method with DDE: those of DDE are in `dde`."""

    dde: DDESettings = setting(factory=DDESettings, after_base=True)


WithDDESettingsT = TypeVar("WithDDESettingsT", bound=WithDDESettings)


class WithDDE(Method[WithDDESettingsT]):
    """Mixin that adds DDE to a family of methods: `class PODNetDDE(WithDDE[...], PODMethod[...])`."""

    def head(self, dim: int, capacity: int) -> Head:
        head = super().head(dim, capacity)
        head.add_adjustment("effect", MomentumEffect(dim))
        return head

    def base_key(self) -> dict[str, Any] | None:
        """Not the key of the family: the network contains the momentum effect."""
        return {**(super().base_key() or {}), "effect": True}

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Start a new direction; from the second stage on, its effect is subtracted in predictions."""
        super().grow(learner, stage, passes)
        effect, settings = momentum_effect(learner.network), self.settings.dde
        effect.begin()
        effect.remove(0.0, 0.0 if stage.is_base or settings.removal == "none" else settings.strength)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """The method's phases; the first tracks the momentum and, after the base stage, finds neighbours."""
        main, *others = super().phases(learner, stage, passes)
        neighbours = self.settings.dde.neighbour_search(stage)
        extensions = (TrackMomentum(),) if neighbours is None else (neighbours, TrackMomentum())
        return [replace(main, extensions=extensions), *others]

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """If the removal is learned, fit it on as many images of each class as the memory keeps."""
        settings = self.settings.dde
        if settings.removal != "learned" or stage.is_base:
            return
        rows = balanced_rows(learner, stage, passes)
        embeddings = passes.embed(learner.network, stage.pool.images[rows])
        labels = stage.pool.labels[rows].to(embeddings.device)
        blend, strength = fit_removal(settings, learner, stage, embeddings, labels)
        if not bool((blend + strength).isfinite()):
            raise EngramError(f"the removal learned after stage {stage.index} is not finite; try a lower fit_rate")
        momentum_effect(learner.network).remove(strength * (1 - blend), strength * blend)


@dataclass(frozen=True)
class PODNetDDESettings(WithDDESettings, PODNetSettings):
    """Settings of PODNet and DDE."""


@final
@register(
    "podnet-dde",
    settings=PODNetDDESettings,
    title="PODNet with the data effect distilled and the momentum effect removed",
    paper="Hu et al., CVPR 2021",
    recipes=RecipeHints(imagenet=PODNET_IMAGENET),
)
class PODNetDDE(WithDDE[PODNetDDESettings], PODMethod[PODNetDDESettings]):
    """PODNet that classifies an image together with its neighbours."""

    def loss(self, step: Step) -> Terms:
        """The entropy of an image and its neighbours, and PODNet's distillation."""
        return with_neighbours(step, super().loss(step))


@dataclass(frozen=True)
class UCIRDDESettings(WithDDESettings, RebalancingSettings):
    """Settings of UCIR and DDE."""


@final
@register(
    "ucir-dde",
    settings=UCIRDDESettings,
    title="UCIR with the data effect distilled and the momentum effect removed",
    paper="Hu et al., CVPR 2021",
    brightened=False,
    # The released configuration for ImageNet-100 has half of UCIR's lambda_embedding.
    recipes=RecipeHints(
        imagenet={"imagenet100": {**UCIR_IMAGENET, "lambda_embedding": 5.0}, "imagenet1000": UCIR_IMAGENET}
    ),
)
class UCIRDDE(WithDDE[UCIRDDESettings], RebalancingMethod[UCIRDDESettings]):
    """UCIR that classifies an image together with its neighbours."""

    def loss(self, step: Step) -> Terms:
        """The entropy of an image and its neighbours, and UCIR's two other terms."""
        return with_neighbours(step, super().loss(step))
