"""Mnemonics: exemplars that are learned (Liu, Su, Liu, Schiele, Sun, CVPR 2020).

Which images to keep is chosen from those there are; Mnemonics goes on from there and changes their pixels, so that a
classifier made of the exemplars alone does well on all of the stage's images. Losses and head are UCIR's. From the
second stage on the convolutions keep the base stage's weights and learn a factor for each pair of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.exemplars import choose_exemplars, unit_means
from engram.contract.learner import Learner
from engram.contract.look import Look
from engram.contract.method import Passes, Phase, Step, Terms, Training, register
from engram.contract.settings import setting
from engram.core.errors import EngramError
from engram.data.stage import Samples, Stage
from engram.methods.blocks.cosine import CosineMethod, cosine_phases
from engram.methods.ucir import RebalancingSettings, rebalanced, rebalancing_weights
from engram.nn.network import Network


@dataclass(frozen=True)
class MnemonicsSettings(RebalancingSettings):
    """Mnemonics' settings beside UCIR's; the defaults are those of the released code on CIFAR-100.

    variant: how exemplars learn, by prototypes as released or by unrolled training as in the paper. tune: their SGD, in
    pixels as the network sees them. storage: how the result becomes whole numbers. inner, inner_steps, inner_lr: what
    of the network trains on the exemplars in the paper's form, how many steps, and how fast. factors: whether the
    convolutions move by factors alone after the base stage.
    """

    variant: Literal["released", "paper"] = setting("released", after_base=True, role="variant")
    tune: Training = setting(
        factory=lambda: Training(epochs=1, lr=1e-5, schedule="constant", clip=None, remainder="keep"), after_base=True
    )
    storage: Literal["truncate", "round"] = setting("truncate", after_base=True)
    inner: Literal["network", "head"] = setting("network", after_base=True)
    inner_steps: int = setting(1, at_least=1, after_base=True)
    inner_lr: float = setting(0.01, above=0, after_base=True)
    factors: bool = setting(True, after_base=True)


def prototype_entropy(look: Look, labels: Tensor, old: Tensor) -> Tensor:
    """The released objective: cross-entropy of the batch's cosines with the prototypes of all classes.

    A new class's prototype is the mean embedding of its tuned images, whose labels are given; those of the classes
    before, (n_old, D), stand still.
    """
    embedding, _ = look.network(look.tuned, {})
    owners = F.one_hot(labels - len(old)).to(embedding)
    prototypes = torch.cat([old, F.normalize(owners.T @ embedding / owners.sum(dim=0)[:, None], dim=1)])
    with torch.no_grad():
        features, _ = look.network(look.images, {})
    return F.cross_entropy(F.normalize(features, dim=1) @ prototypes.T, look.labels)


def unrolled_entropy(look: Look, labels: Tensor, settings: MnemonicsSettings) -> Tensor:
    """The paper's objective: cross-entropy of the batch under a copy that has trained on the tuned images alone.

    Its gradient goes through that training, the second derivatives included.
    """
    moving = {
        name: value.detach().requires_grad_()
        for name, value in look.parameters.items()
        if name == "head.weight" or (settings.inner == "network" and not name.startswith("factors."))
    }
    for _ in range(settings.inner_steps):
        _, logits = look.network(look.tuned, moving)
        gradients = torch.autograd.grad(F.cross_entropy(logits, labels), list(moving.values()), create_graph=True)
        moving = {
            name: value - settings.inner_lr * gradient
            for (name, value), gradient in zip(moving.items(), gradients, strict=True)
        }
    _, logits = look.network(look.images, moving)
    return F.cross_entropy(logits, look.labels)


def stored(levels: Tensor, storage: Literal["truncate", "round"]) -> Tensor:
    """The pixels as they are kept, in 8 bits: the nearest whole number, or the one below; within 0 and 255."""
    whole = levels.round() if storage == "round" else levels.floor()
    return whole.clamp(0, 255).to(torch.uint8)


def halves(kept: Mapping[int, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """The old exemplars in two halves, each with the other to learn from: name, rows, rows to see.

    None where a half is empty: classes that have one exemplar each.
    """
    first, second = (torch.cat([rows[start::2] for rows in kept.values()] or [torch.zeros(0)]) for start in (0, 1))
    return [("first half", first, second), ("second half", second, first)] if len(second) else []


def take_gradients(network: Network) -> None:
    """Before an update: the factors' gradients, from the convolutions'."""
    assert network.factors is not None
    network.factors.take_gradients(network.backbone)


def give_weights(network: Network) -> None:
    """After an update: the convolutions' weights, from their factors."""
    assert network.factors is not None
    network.factors.give_weights(network.backbone)


@final
@register(
    "mnemonics",
    settings=MnemonicsSettings,
    title="Mnemonics: learned exemplars",
    paper="Liu, Su, Liu, Schiele, Sun, CVPR 2020",
    brightened=False,
    shares_base=True,
)
class Mnemonics(CosineMethod[MnemonicsSettings]):
    """UCIR with exemplars that learn, and convolutions that move by factors."""

    told_buffers = ("exemplars.changed",)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        if self.settings.factors and not stage.is_base and learner.network.factors is None:
            learner.network.add_factors()
            learner.teacher.add_factors()  # so that it has room for what it will take over

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        if learner.memory.config.budget == "all":
            raise EngramError("mnemonics learns what to keep, and memory=all keeps every image; give a budget")
        phases = cosine_phases(self.settings, stage, self.loss, rebalancing_weights(self.settings, stage))
        if stage.is_base or not self.settings.factors:
            return phases
        return [replace(phase, before_update=take_gradients, after_step=give_weights) for phase in phases]

    def loss(self, step: Step) -> Terms:
        """UCIR's three terms."""
        return rebalanced(self.settings, step)

    def exemplars(self, learner: Learner, stage: Stage, passes: Passes) -> Mapping[int, Tensor | Samples]:
        """The chosen images of the new classes, tuned; in the paper's form those kept of the old classes too."""
        chosen = choose_exemplars(learner, stage, passes)
        if self.settings.tune.epochs == 0:
            return chosen
        quota = learner.memory.config.per_class(stage.num_seen)
        kept = {label: stage.rows_of(label)[:quota] for label in range(stage.num_old)}
        new = torch.cat(list(chosen.values()))
        parts = [("new", new, stage.all_rows)]
        if self.settings.variant == "paper":
            chosen |= kept
            parts += halves(kept)
        images = stage.pool.images.clone()
        for name, own, seen in parts:
            objective = self._objective(learner, stage, passes, stage.pool.labels[own], kept)
            levels = passes.tune(learner, stage, stage.pool.images[own], seen, objective, self.settings.tune, name)
            images[own] = stored(levels, self.settings.storage)
        pool = replace(stage.pool, images=images)
        tuned = torch.cat([own for _, own, _ in parts])
        apart = (pool.images[tuned].float() - stage.pool.images[tuned].float()).abs()
        changed = torch.stack([(apart > 0).float().mean(), apart.mean()])
        learner.store("exemplars.changed", changed.to(learner.network.mean.device))
        return {label: pool[rows] for label, rows in chosen.items()}

    def _objective(
        self, learner: Learner, stage: Stage, passes: Passes, labels: Tensor, kept: Mapping[int, Tensor]
    ) -> Callable[[Look], Tensor]:
        """What images of these labels learn by; kept: the rows of the old classes' exemplars."""
        device = learner.network.mean.device
        labels = labels.to(device)
        if self.settings.variant == "paper":
            return partial(unrolled_entropy, labels=labels, settings=self.settings)
        old = torch.zeros(0, learner.network.backbone.dim, device=device)
        if kept:
            old = unit_means(learner, stage.pool[torch.cat(list(kept.values()))], stage.num_old, passes)
        return partial(prototype_entropy, labels=labels, old=old)
