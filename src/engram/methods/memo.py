"""MEMO: memory-efficient expandable model (Zhou, Wang, Ye, Zhan, ICLR 2023).

Early layers hardly differ from stage to stage, deep ones do. So all stages share the early groups of the backbone, and
each adds a copy of the last ones, a *tail*; older tails are frozen. One head uses the embeddings of all tails together,
and a second, small head makes the newest tail distinguish the new classes from each other and from all old classes.
Afterwards the weights of new classes are scaled to the length of the old ones.

Legend: B batch, D embedding of one tail, N older tails, K capacity in classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import (
    Learner,
    Method,
    Network,
    Part,
    Passes,
    Phase,
    Settings,
    Stage,
    Step,
    Terms,
    Training,
    setting,
)
from engram.contract.method_registry import RecipeHints, register
from engram.contract.phase import mean_over_images
from engram.core.rng import generator
from engram.methods.blocks.expanding import WideningHead, freeze, residual
from engram.methods.blocks.linear import classify
from engram.methods.blocks.phases import main_phase, stepped
from engram.methods.der import ExpandingBackbone, FrozenBranches, auxiliary_loss
from engram.methods.wa import align_weights
from engram.nn.backbone import Backbone
from engram.nn.heads import Head
from engram.nn.resnet import ResNet


class TailedBackbone(ExpandingBackbone):
    """A backbone whose groups of the last width, the tail, exist once per stage, over groups that all stages share.

    Called, it returns the maps of the newest tail; but the last map is that of all tails side by side, older ones
    first, (B, (N + 1) D, H, W), and the embedding is its mean. Unlike frozen backbones, older tails pass on gradients:
    the groups below them may still train.

    split: the number of groups that are shared. train_base: whether these train after the base stage.
    """

    def __init__(self, first: ResNet, train_base: bool) -> None:
        super().__init__(first)
        self.split = self.widths.index(self.widths[-1])
        self.train_base = train_base

    @property
    def branches(self) -> Sequence[ResNet]:
        """None: older tails are part of this backbone's own output."""
        return ()

    @property
    def trains_shared(self) -> bool:
        """Whether the shared groups train now."""
        return self.train_base or len(self.older) == 0

    def is_shared(self, name: str) -> bool:
        """Whether a parameter of that name is one of the stem or of the shared groups."""
        return not name.startswith(tuple(f"groups.{group}." for group in range(self.split, len(self.groups))))

    def train(self, mode: bool = True) -> TailedBackbone:
        """Set the mode of what trains; older tails, and shared groups that do not train, stay in eval mode."""
        super().train(mode)
        if not self.trains_shared:
            for module in (self.conv, self.bn, *self.groups[: self.split]):
                module.eval()
        return self

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        with torch.set_grad_enabled(self.trains_shared and torch.is_grad_enabled()):
            x = F.relu(self.bn(self.conv(x)), inplace=True)
            maps = self._maps(x, self.groups[: self.split], self.pooled[: self.split])
        shared = maps[-1] if maps else x
        tails = (*self.older, self.groups[self.split :])
        each = [self._maps(shared, tail.children(), self.pooled[self.split :]) for tail in tails]
        last = torch.cat([own[-1] for own in each], dim=1)
        return (*maps, *each[-1][:-1], last), last.mean(dim=(2, 3))

    def _maps(self, x: Tensor, groups: Iterable[nn.Module], pooled: Iterable[bool]) -> list[Tensor]:
        """The maps of some groups, one after the other."""
        maps: list[Tensor] = []
        for group, is_pooled in zip(groups, pooled, strict=True):
            x = group(F.max_pool2d(x, 3, stride=2, padding=1) if is_pooled else x)
            maps.append(x)
        return maps

    def _frozen_copy(self) -> nn.Module:
        tail = deepcopy(self.groups[self.split :])
        freeze(tail)
        return tail


class TailedNetwork(Network):
    """A network whose shared groups may be excluded from training."""

    def part_of(self, name: str, parameter: Tensor) -> Part | None:
        part, backbone = super().part_of(name, parameter), self.backbone
        assert isinstance(backbone, TailedBackbone)
        if part is Part.BACKBONE and not backbone.trains_shared and backbone.is_shared(name.removeprefix("backbone.")):
            return None
        return part


@dataclass(frozen=True)
class MEMOSettings(Settings):
    """MEMO's settings; the defaults are those of CIFAR-100.

    train, expand: training of the base stage, and of later stages. train_base: whether the shared groups are trained
    after the base stage. lambda_aux: weight of the auxiliary term.
    """

    train_base: bool = setting(True, after_base=True)
    lambda_aux: float = setting(1.0, at_least=0, after_base=True)
    train: Training = setting(stepped(200, 60, 120, 170), role="main")
    expand: Training = setting(stepped(170, 80, 120, 150, weight_decay=2e-4), after_base=True, role="later")


@final
@register(
    "memo",
    settings=MEMOSettings,
    title="Memory-efficient Expandable Model",
    paper="Zhou, Wang, Ye, Zhan, ICLR 2023",
    recipes=RecipeHints(later_as_base=True),
)
class MEMO(Method[MEMOSettings]):
    """Adds a copy of the last groups of the backbone at every stage, and has one head over all copies."""

    uses_teacher = False
    family = "MEMO"

    def backbone(self, backbone: Backbone) -> Backbone:
        return TailedBackbone(residual("memo", backbone, "its last groups"), self.settings.train_base)

    def head(self, dim: int, capacity: int) -> Head:
        return WideningHead(dim, capacity)

    def network(self, backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]) -> Network:
        return TailedNetwork(backbone, head, mean, std)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Freeze the newest tail and continue with a copy; extend the head, and initialise the auxiliary one."""
        backbone, head = learner.network.backbone, learner.network.head
        assert isinstance(backbone, TailedBackbone)
        assert isinstance(head, WideningHead)
        if not stage.is_base:
            backbone.expand()
        head.extend(backbone.dim, stage.num_new, generator(learner.seed, "head", stage.index))

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings = self.settings
        if stage.is_base:
            return [main_phase(stage, settings.train, classify)]
        tails = (FrozenBranches(stage.index),)
        return [main_phase(stage, settings.expand, self.loss, teacher=False, extensions=tails)]

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """Classification of all classes seen by all tails, plus the auxiliary term of the newest tail."""
        apart = auxiliary_loss(step.student.extras["auxiliary"], step.labels, step.new).mean()
        return {**classify(step), "auxiliary": self.settings.lambda_aux * apart}

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Scale the weights of new classes to the mean length of those of old classes."""
        align_weights(learner.network.get_parameter("head.weight"), stage)
