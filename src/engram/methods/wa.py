"""WA: maintaining discrimination and fairness by weight aligning (Zhao, Xiao, Gan, Zhang, Xia, CVPR 2020).

Training on many new images and few exemplars gives new classes longer weights, and therefore higher scores. Negative
weights are set to 0, so that the length of a weight reflects the size of the scores. After the stage, the weights of
new classes are scaled to the mean length of those of old classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from engram.contract import AfterUpdate, Learner, Passes, Phase, Stage, Step, Terms, Training, register, setting
from engram.contract.phase import mean_over_images
from engram.methods.blocks.linear import LinearMethod, SteppedSettings, convex_distillation, convex_weights
from engram.methods.blocks.phases import stepped
from engram.nn.heads import Head, LinearHead
from engram.nn.network import Network


@dataclass(frozen=True)
class WASettings(SteppedSettings):
    """WA's settings; the defaults are those of CIFAR-100. temperature: of both softmaxes in the distillation."""

    temperature: float = setting(2.0, above=0, after_base=True)
    train: Training = setting(stepped(200, 60, 120, 170, weight_decay=2e-4), role="main")


def clamp_weights(network: Network) -> None:
    """Set negative weights of the head to 0."""
    network.get_parameter("head.weight").clamp_(min=0)


@torch.no_grad()
def align_weights(weight: Tensor, stage: Stage) -> None:
    """Scale the rows of new classes, in place, to the mean length of those of old classes; not in the base stage."""
    if stage.is_base:
        return
    lengths = weight[: stage.num_seen].norm(dim=1)
    old, new = lengths[: stage.num_old].mean(), lengths[stage.num_old :].mean()
    # New weights that are all 0 cannot be scaled.
    weight[stage.num_old : stage.num_seen] *= torch.where(new > 0, old / new, 1.0)


@final
@register("wa", settings=WASettings, title="Weight Aligning", paper="Zhao, Xiao, Gan, Zhang, Xia, CVPR 2020")
class WA(LinearMethod[WASettings]):
    """Distils the scores of old classes, then scales the weights of new classes to the length of the old ones."""

    def head(self, dim: int, capacity: int) -> Head:
        return LinearHead(dim, capacity, bias=False)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        (main,) = super().phases(learner, stage, passes)
        return [replace(main, extensions=(AfterUpdate(clamp_weights),))]

    def weights(self, stage: Stage) -> dict[str, float]:
        return convex_weights(stage)

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """(1 - n_old / n) classification + n_old / n distillation."""
        return convex_distillation(step, self.settings.temperature)

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Align the weights in place, so that evaluation and the next teacher use the aligned model."""
        align_weights(learner.network.get_parameter("head.weight"), stage)
