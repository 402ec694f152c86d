"""DER: dynamically expandable representation (Yan, Xie, He, CVPR 2021), without its pruning.

Backbones do not forget: at each stage, the newest is frozen, and a copy of it learns the new classes. A new head uses
the embeddings of all backbones together. A second, small head makes the newest backbone distinguish the new classes
from each other and from all old classes. Afterwards, only the head is trained again, on a balanced set.

The older backbones are frozen: their values are buffers, so that no optimiser sees them, and they always run with their
running statistics.

Legend: B batch, D embedding of one backbone, N older backbones, K capacity in classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import Learner, Method, Passes, Phase, Settings, Stage, Step, Terms, Training, setting
from engram.contract.extension import Extension
from engram.contract.method_registry import RecipeHints, register
from engram.contract.phase import mean_over_images
from engram.core.rng import generator
from engram.methods.blocks.expanding import freeze, residual
from engram.methods.blocks.linear import classify, seen_columns
from engram.methods.blocks.losses import cross_entropy
from engram.methods.blocks.phases import balanced_phase, main_phase, stepped
from engram.nn.backbone import Backbone
from engram.nn.heads import Head
from engram.nn.resnet import ResNet

BRANCH_COST = 0.3  # of an image, relative to training on it without a teacher
OLDER = "older."


class ExpandingBackbone(ResNet):
    """The newest of several backbones, and the older ones in their order.

    Called, it is only the newest; the older ones are its `branches`. dim: the embedding size of all together.
    """

    def __init__(self, first: ResNet) -> None:
        super().__init__(first.specification, torch.Generator())
        self.load_state_dict(first.state_dict())
        self.width = self.dim
        self.older = nn.ModuleList()

    def expand(self) -> None:
        """Freeze the newest; a copy of it continues to train.

        What is added is the frozen one, so that the tensors of the newest keep their addresses.
        """
        self.resize(len(self.older) + 1)

    def resize(self, branches: int) -> None:
        """Set the number of older backbones: add frozen copies of the newest, or remove the last ones."""
        del self.older[branches:]
        while len(self.older) < branches:
            self.older.append(self._frozen_copy())
        self.dim = self.width * (branches + 1)

    def train(self, mode: bool = True) -> ExpandingBackbone:
        """Set the mode of the newest; the older ones stay in eval mode."""
        super().train(mode)
        self.older.eval()
        return self

    @property
    def branches(self) -> Sequence[ResNet]:
        return [each for each in self.older if isinstance(each, ResNet)]

    def count_branches(self, names: Iterable[str]) -> int:
        return len({name.removeprefix(OLDER).split(".")[0] for name in names if name.startswith(OLDER)})

    def _frozen_copy(self) -> nn.Module:
        """Return a frozen copy of the part that a stage added: here the whole newest backbone."""
        copy = ResNet(self.specification, torch.Generator())
        state = self.state_dict()
        copy.load_state_dict({name: state[name] for name in copy.state_dict()})
        copy = copy.to(self.conv.weight.device)
        freeze(copy)
        return copy


class ExpandingHead(Head):
    """A weight per class over the embeddings of all backbones, and a second one over the newest's; no bias.

    auxiliary: the second weights, (K, D). It has the rows of the new classes, and row 0 for all old classes together
    (class 0 is never new after the base stage).
    """

    class_parameters = ("weight", "auxiliary")
    rectified = True

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(capacity, learned_scale=False)
        self.weight = nn.Parameter(torch.zeros(capacity, dim))
        self.auxiliary = nn.Parameter(torch.zeros(capacity, dim))

    def widen(self, dim: int) -> None:
        """Set the size of the embeddings. If it changes, the weights are new and zero."""
        if self.weight.shape[1] != dim:
            self.weight = nn.Parameter(self.weight.new_zeros(self.capacity, dim))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight)

    def extra_outputs(self, features: Tensor) -> Mapping[str, Tensor]:
        """auxiliary: the second weights' scores (B, K) of the newest backbone's features (B, D)."""
        return {"auxiliary": F.linear(features, self.auxiliary)}


@dataclass(frozen=True)
class FrozenBranches(Extension):
    """The number of frozen backbones that run in each step, for estimates of the time left."""

    works_on_parts = True

    count: int

    def recording_key(self) -> None:
        """They are part of the network."""

    def cost(self) -> float:
        return BRANCH_COST * self.count


@dataclass(frozen=True)
class DERSettings(Settings):
    """DER's settings; the defaults are those of CIFAR-100.

    warmup: length of the warm-up before the main phase, as a share of its epochs (10 of 160); the heads are initialised
    again after it. lambda_aux: weight of the auxiliary term. temperature: divides the scores in the balanced phase.
    """

    warmup: float = setting(1 / 16, at_least=0)
    lambda_aux: float = setting(1.0, at_least=0, after_base=True)
    temperature: float = setting(5.0, above=0, after_base=True)
    train: Training = setting(stepped(160, 100, 120), role="main")
    finetune: Training = setting(stepped(30, 15), after_base=True, role="finetune")


def auxiliary_loss(scores: Tensor, labels: Tensor, new: Tensor) -> Tensor:
    """Cross-entropy (B,) over the new classes and one class for all old classes, whose scores are in column 0.

    scores: (B, K). new: (K,) bool, without column 0.
    """
    old_together = torch.arange(len(new), device=new.device) == 0
    return cross_entropy(scores, torch.where(new[labels], labels, 0), new | old_together)


@final
@register(
    "der",
    settings=DERSettings,
    title="Dynamically Expandable Representation (without pruning)",
    paper="Yan, Xie, He, CVPR 2021",
    recipes=RecipeHints(finetune={"epochs": 30, "batch_size": 8}, backbones=("resnet18-small",)),
)
class DER(Method[DERSettings]):
    """Adds a backbone at every stage, freezes the earlier ones, and has one head over all of them."""

    uses_teacher = False
    family = "DER"

    def backbone(self, backbone: Backbone) -> Backbone:
        return ExpandingBackbone(residual("der", backbone))

    def head(self, dim: int, capacity: int) -> Head:
        return ExpandingHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Freeze the backbone and continue with a copy; initialise the head for all classes and all embeddings."""
        backbone, head = learner.network.backbone, learner.network.head
        assert isinstance(backbone, ExpandingBackbone)
        assert isinstance(head, ExpandingHead)
        if not stage.is_base:
            backbone.expand()
            head.widen(backbone.dim)
        super().grow(learner, stage, passes)
        renew_head(learner, stage, "grow")

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings, extensions = self.settings, (FrozenBranches(stage.index),)
        loss, weights = (classify, {}) if stage.is_base else (self.loss, {"auxiliary": settings.lambda_aux})
        main = main_phase(stage, settings.train, loss, teacher=False, weights=weights, extensions=extensions)
        phases = [main]
        warmup = round(settings.warmup * settings.train.epochs)
        if warmup:
            rising = replace(settings.train, epochs=warmup, schedule="rise")
            phases = [
                replace(main, name="warm-up", training=rising),
                replace(main, start=partial(renew_head, learner, stage, "main")),
            ]
        if not stage.is_base and settings.finetune.epochs:
            balance = balanced_phase(
                learner,
                stage,
                passes,
                settings.finetune,
                self.balance,
                frozen=True,
                start=partial(renew_head, learner, stage, "balance"),
                extensions=extensions,
            )
            phases.append(balance)
        return phases

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """Classification of all classes seen by all backbones, plus the auxiliary term of the newest backbone."""
        apart = auxiliary_loss(step.student.extras["auxiliary"], step.labels, step.new).mean()
        return {**classify(step), "auxiliary": step.weights["auxiliary"] * apart}

    @mean_over_images
    def balance(self, step: Step) -> Terms:
        """Classification of all classes seen, by scores divided by the temperature."""
        logits = step.student.logits / self.settings.temperature
        return {"classification": cross_entropy(logits, step.labels, seen_columns(step)).mean()}


def renew_head(learner: Learner, stage: Stage, moment: str) -> None:
    """Initialise the rows in use of both heads again, at random."""
    learner.network.head.initialise(generator(learner.seed, "head", stage.index, moment))
