"""DER: dynamically expandable representation (Yan, Xie, He, CVPR 2021), without its pruning.

No backbone has to forget: at each stage the newest is frozen for good, and a copy of it learns the new classes beside
it. A new head takes the embeddings of all of them together, and a second, small one makes the newest tell the new
classes from each other and from all old ones. Afterwards the head alone is trained anew, on a balanced set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from engram.contract.exemplars import balanced_count, balanced_rows
from engram.contract.learner import Learner
from engram.contract.method import Method, Passes, Phase, Settings, Step, Terms, Training, register
from engram.contract.settings import base_settings, setting
from engram.core.rng import generator
from engram.data.stage import Stage
from engram.methods.blocks.linear import EVERYTHING, classify, seen_columns
from engram.methods.blocks.losses import cross_entropy
from engram.nn.backbones import ResNet
from engram.nn.expanding import ExpandingBackbone, ExpandingHead
from engram.nn.heads import Head
from engram.nn.network import Part


def der_training() -> Training:
    """160 epochs, a tenth of the rate after 100 and 120; a warm-up comes before."""
    return Training(160, schedule="steps", milestones=(100 / 160, 120 / 160), clip=None)


def der_finetuning() -> Training:
    """30 epochs of the head alone, a tenth of the rate after 15."""
    return Training(30, schedule="steps", milestones=(0.5,), clip=None)


@dataclass(frozen=True)
class DERSettings(Settings):
    """DER's settings; the defaults are those of CIFAR-100.

    warmup: the epochs before the main phase in which the rate rises, as a share of its epochs (10 of 160); the heads
    start anew after it. temperature: what the scores are divided by when the head is trained again. lambda_aux: weight
    of the auxiliary term.
    """

    warmup: float = setting(1 / 16, at_least=0)
    lambda_aux: float = setting(1.0, at_least=0, after_base=True)
    temperature: float = setting(5.0, above=0, after_base=True)
    train: Training = setting(factory=der_training, role="main")
    finetune: Training = setting(factory=der_finetuning, after_base=True, role="finetune")


def auxiliary_loss(scores: Tensor, labels: Tensor, new: Tensor) -> Tensor:
    """Cross-entropy (B,) among the new classes and one that stands for all old ones, whose scores are in column 0.

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
)
class DER(Method[DERSettings]):
    """Adds a backbone at every stage and freezes those before; a head over all of them."""

    taught = False

    def backbone(self, backbone: ResNet) -> ResNet:
        return ExpandingBackbone(backbone)

    def head(self, dim: int, capacity: int) -> Head:
        return ExpandingHead(dim, capacity)

    def base_key(self) -> dict[str, Any] | None:
        return {"host": "DER", **base_settings(self.settings)}

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Freezes the backbone and goes on with its copy; a new head over all embeddings, for old classes too."""
        backbone, head = learner.network.backbone, learner.network.head
        assert isinstance(backbone, ExpandingBackbone)
        assert isinstance(head, ExpandingHead)
        if not stage.is_base:
            backbone.expand()
            head.widen(backbone.dim)
        head.grow(stage.num_new, generator(learner.seed, "head", stage.index))
        renew_head(learner, stage, "grow")

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings, older = self.settings, stage.index
        loss, weights = (classify, {}) if stage.is_base else (self.loss, {"auxiliary": settings.lambda_aux})
        main = Phase(
            "main",
            len(stage.pool),
            lambda: stage.all_rows,
            loss,
            EVERYTHING,
            settings.train,
            weights=weights,
            older_backbones=older,
        )
        phases = [main]
        warmup = round(settings.warmup * settings.train.epochs)
        if warmup:
            rising = replace(settings.train, epochs=warmup, schedule="rise")
            phases = [
                replace(main, name="warm-up", training=rising),
                replace(main, start=partial(renew_head, learner, stage, "main")),
            ]
        if not stage.is_base and settings.finetune.epochs:
            balance = Phase(
                "balance",
                balanced_count(learner, stage),
                partial(balanced_rows, learner, stage, passes),
                self.balance,
                Part.OLD_CLASSES | Part.NEW_CLASSES,
                settings.finetune,
                frozen=True,
                start=partial(renew_head, learner, stage, "balance"),
                older_backbones=older,
            )
            phases.append(balance)
        return phases

    def loss(self, step: Step) -> Terms:
        """Classification of all classes seen by all backbones, plus that of the new ones by the newest alone."""
        assert step.student.auxiliary is not None
        apart = auxiliary_loss(step.student.auxiliary, step.labels, step.new).mean()
        return {**classify(step), "auxiliary": step.weights["auxiliary"] * apart}

    def balance(self, step: Step) -> Terms:
        """Classification of all classes seen, by scores divided by the temperature."""
        logits = step.student.logits / self.settings.temperature
        return {"classification": cross_entropy(logits, step.labels, seen_columns(step)).mean()}


def renew_head(learner: Learner, stage: Stage, moment: str) -> None:
    """Random weights for every row in use of both heads."""
    learner.network.head.initialise(generator(learner.seed, "head", stage.index, moment))
