"""Mnemonics: exemplars that are learned (Liu, Su, Liu, Schiele, Sun, CVPR 2020).

After exemplars are chosen, Mnemonics changes their pixels so that a classifier made of only the exemplars does well on
all images of the stage. Losses and head are those of UCIR. From the second stage on, the convolutions keep the weights
of the base stage and learn a factor for each pair of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import Learner, Network, Output, Part, Passes, Phase, Samples, Stage, Terms, Training, setting
from engram.contract.exemplars import choose_exemplars, unit_means
from engram.contract.extension import Extension, PhaseContext, StepHooks
from engram.contract.method_registry import RecipeHints, both_imagenets, register
from engram.contract.passes import ImageTuningStep
from engram.core.errors import EngramError, option
from engram.methods.ucir import IMAGENET as UCIR_IMAGENET
from engram.methods.ucir import RebalancingMethod, RebalancingSettings
from engram.nn.backbone import Backbone
from engram.nn.heads import Head


@dataclass(frozen=True)
class MnemonicsSettings(RebalancingSettings):
    """Mnemonics' settings, in addition to UCIR's; the defaults are those of the released code on CIFAR-100.

    variant: exemplars are tuned by prototypes (released code) or by unrolled training (paper). tune: SGD on normalised
    pixels. storage: how pixels become whole numbers. inner, inner_steps, inner_lr: the part of the network that trains
    on the exemplars in the paper's variant, the number of steps, and the learning rate. factors: whether the
    convolutions are trained only by factors after the base stage.
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


def prototype_entropy(step: ImageTuningStep, labels: Tensor, old: Tensor) -> Tensor:
    """Objective of the released code: cross-entropy of the batch's cosines with the prototypes of all classes.

    labels: of the tuned images; the prototype of a new class is the mean embedding of its tuned images. old: the
    prototypes of the old classes (n_old, D), which do not change.
    """
    embedding, _ = step.network(step.tuned, {})
    owners = F.one_hot(labels - len(old)).to(embedding)
    prototypes = torch.cat([old, F.normalize(owners.T @ embedding / owners.sum(dim=0)[:, None], dim=1)])
    with torch.no_grad():
        features, _ = step.network(step.images, {})
    return F.cross_entropy(F.normalize(features, dim=1) @ prototypes.T, step.labels)


def unrolled_entropy(step: ImageTuningStep, labels: Tensor, settings: MnemonicsSettings) -> Tensor:
    """Objective of the paper: cross-entropy of the batch under a copy that was trained on only the tuned images.

    Its gradient goes through this training, including second derivatives. labels: of the tuned images.
    """
    moving = {
        name: value.detach().requires_grad_()
        for name, value in step.parameters.items()
        if name == "head.weight" or (settings.inner == "network" and not name.startswith("factors."))
    }
    for _ in range(settings.inner_steps):
        _, logits = step.network(step.tuned, moving)
        gradients = torch.autograd.grad(F.cross_entropy(logits, labels), list(moving.values()), create_graph=True)
        moving = {
            name: value - settings.inner_lr * gradient
            for (name, value), gradient in zip(moving.items(), gradients, strict=True)
        }
    _, logits = step.network(step.images, moving)
    return F.cross_entropy(logits, step.labels)


def to_uint8(levels: Tensor, storage: Literal["truncate", "round"]) -> Tensor:
    """Convert pixels to 8 bits: rounded, or truncated to the next lower whole number; limited to [0, 255]."""
    whole = levels.round() if storage == "round" else levels.floor()
    return whole.clamp(0, 255).to(torch.uint8)


def split_halves(kept: Mapping[int, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Split the old exemplars in two halves: (name, rows to tune, rows of the other half to learn from).

    An empty list if a half is empty, because each class has only one exemplar.
    """
    first, second = (torch.cat([rows[start::2] for rows in kept.values()] or [torch.zeros(0)]) for start in (0, 1))
    return [("first half", first, second), ("second half", second, first)] if len(second) else []


class Factors(nn.Module):
    """A factor, initially 1, for each (C_out, C_in) of a backbone's convolutions, and their base weights.

    The weights of the convolutions are base times factor, so the backbone can be run as usual. To train the factors,
    call `take_gradients` before an update and `give_weights` after it.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        weights = convolution_weights(backbone)
        self.values = nn.ParameterList(
            nn.Parameter(torch.ones(weight.shape[:2], device=weight.device), requires_grad=weight.requires_grad)
            for weight in weights
        )
        for number, weight in enumerate(weights):
            self.register_buffer(f"base_{number}", weight.detach().clone(memory_format=torch.contiguous_format))

    @property
    def bases(self) -> list[Tensor]:
        """The weights that the factors multiply, in the order of the modules."""
        return [self.get_buffer(f"base_{number}") for number in range(len(self.values))]

    @torch.no_grad()
    def take_gradients(self, backbone: Backbone) -> None:
        """Set the factors' gradients from those of the weights: dL/ds = sum over the kernel of dL/dW * base."""
        for factor, base, weight in zip(self.values, self.bases, convolution_weights(backbone), strict=True):
            assert factor.grad is not None
            assert weight.grad is not None
            factor.grad.copy_((weight.grad * base).sum(dim=(2, 3)))

    @torch.no_grad()
    def give_weights(self, backbone: Backbone) -> None:
        """Set the backbone's weights to base times factor."""
        for factor, base, weight in zip(self.values, self.bases, convolution_weights(backbone), strict=True):
            weight.copy_(base * factor[:, :, None, None])


def convolution_weights(backbone: Backbone) -> list[Tensor]:
    """The weights (C_out, C_in, 3, 3) of all convolutions, in the order of the modules."""
    return [module.weight for module in backbone.modules() if isinstance(module, nn.Conv2d)]


class FactoredNetwork(Network):
    """A network whose convolutions are trained by their factors only, once it has any."""

    factors: Factors | None

    def __init__(self, backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(backbone, head, mean, std)
        self.factors = None

    def add_factors(self) -> None:
        """Keep the current weights of the convolutions as base, and train only their factors from now on."""
        self.factors = Factors(self.backbone)

    def part_of(self, name: str, parameter: Tensor) -> Part | None:
        is_convolution = parameter.ndim == 4
        return None if self.factors is not None and is_convolution else super().part_of(name, parameter)

    def resize_for_state(self, state: Mapping[str, Tensor]) -> None:
        super().resize_for_state(state)
        if not any(name.startswith("factors.") for name in state):
            self.factors = None
        elif self.factors is None:
            self.add_factors()

    def reset(self, generator: torch.Generator) -> None:
        self.factors = None
        super().reset(generator)


def as_factored(network: Network) -> FactoredNetwork:
    """The network as the type that `Mnemonics.network` makes."""
    assert isinstance(network, FactoredNetwork)
    return network


@dataclass(frozen=True)
class TrainFactors(Extension):
    """Trains the factors of the convolutions instead of their weights."""

    works_on_parts = True

    def attach(self, context: PhaseContext, state: Mapping[str, Tensor]) -> StepHooks:
        return _FactorHooks(as_factored(context.learner.network))


class _FactorHooks(StepHooks):
    def __init__(self, network: FactoredNetwork) -> None:
        self._network = network

    def after_backward(self) -> Terms:
        assert self._network.factors is not None
        self._network.factors.take_gradients(self._network.backbone)
        return {}

    def after_update(self, student: Output) -> bool:
        assert self._network.factors is not None
        self._network.factors.give_weights(self._network.backbone)
        return True


@final
@register(
    "mnemonics",
    settings=MnemonicsSettings,
    title="Mnemonics: learned exemplars",
    paper="Liu, Su, Liu, Schiele, Sun, CVPR 2020",
    brightened=False,
    shares_base=True,
    recipes=RecipeHints(imagenet=both_imagenets(UCIR_IMAGENET)),
)
class Mnemonics(RebalancingMethod[MnemonicsSettings]):
    """UCIR with tuned exemplars, and convolutions that are trained by factors."""

    logged_buffers = ("exemplars.changed",)
    changes_images = True

    def backbone(self, backbone: Backbone) -> Backbone:
        factored = {id(weight) for weight in convolution_weights(backbone)}
        others = [name for name, each in backbone.named_parameters() if each.ndim > 1 and id(each) not in factored]
        if self.settings.factors and others:
            raise EngramError(
                f"mnemonics trains only factors of convolutions after the base stage, but the backbone "
                f"{backbone.known_as} has weights of other layers, such as {others[0]}; choose another backbone, or "
                f"set {option('factors', False)}"
            )
        return backbone

    def network(self, backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]) -> Network:
        return FactoredNetwork(backbone, head, mean, std)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        network, teacher = as_factored(learner.network), as_factored(learner.teacher)
        if self.settings.factors and not stage.is_base and network.factors is None:
            network.add_factors()
            teacher.add_factors()  # the teacher must be able to hold the network's state

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        if learner.memory.config.budget == "all":
            raise EngramError("mnemonics tunes exemplars, but memory=all keeps every image unchanged; give a budget")
        phases = super().phases(learner, stage, passes)
        if stage.is_base or not self.settings.factors:
            return phases
        return [replace(phase, extensions=(TrainFactors(),)) for phase in phases]

    def exemplars(self, learner: Learner, stage: Stage, passes: Passes) -> Mapping[int, Tensor | Samples]:
        """The chosen images of the new classes, tuned; in the paper's variant, also the exemplars of old classes."""
        chosen = choose_exemplars(learner, stage, passes)
        if self.settings.tune.epochs == 0:
            return chosen
        quota = learner.memory.config.per_class(stage.num_seen)
        kept = {label: stage.rows_of(label)[:quota] for label in range(stage.num_old)}
        new = torch.cat(list(chosen.values()))
        parts = [("new", new, stage.all_rows)]
        if self.settings.variant == "paper":
            chosen |= kept
            parts += split_halves(kept)
        rows = torch.cat(list(chosen.values()))
        at = torch.zeros(len(stage.pool), dtype=torch.int64)
        at[rows] = torch.arange(len(rows))  # where a row of the pool is among the chosen ones
        before = stage.pool[rows].pixels
        images = before.clone()
        for name, own, seen in parts:
            objective = self._objective(learner, stage, passes, stage.pool.labels[own], kept)
            levels = passes.tune(learner, stage, before[at[own]], seen, objective, self.settings.tune, name)
            images[at[own]] = to_uint8(levels, self.settings.storage)
        kept_samples = replace(stage.pool[rows], images=images)
        tuned = at[torch.cat([own for _, own, _ in parts])]
        apart = (images[tuned].float() - before[tuned].float()).abs()
        changed = torch.stack([(apart > 0).float().mean(), apart.mean()])
        learner.store("exemplars.changed", changed.to(learner.network.mean.device))
        return {label: kept_samples[at[own]] for label, own in chosen.items()}

    def _objective(
        self, learner: Learner, stage: Stage, passes: Passes, labels: Tensor, kept: Mapping[int, Tensor]
    ) -> Callable[[ImageTuningStep], Tensor]:
        """The objective for tuning images with these labels. kept: the rows of the exemplars of old classes."""
        device = learner.network.mean.device
        labels = labels.to(device)
        if self.settings.variant == "paper":
            return partial(unrolled_entropy, labels=labels, settings=self.settings)
        old = torch.zeros(0, learner.network.backbone.dim, device=device)
        if kept:
            old = unit_means(learner, stage.pool[torch.cat(list(kept.values()))], stage.num_old, passes)
        return partial(prototype_entropy, labels=labels, old=old)
