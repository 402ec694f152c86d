"""iCaRL: incremental classifier and representation learning (Rebuffi, Kolesnikov, Sperl, Lampert, CVPR 2017).

Every class has its own sigmoid. The targets of old classes are the outputs of the previous model, for new images and
exemplars; those of new classes are the labels. The network is used as a representation: predictions are the nearest
mean of exemplars, which are chosen by herding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from engram.contract import RecipeHints, Step, Terms, Training, both_imagenets, mean_over_images, register, setting
from engram.methods.blocks.linear import LinearMethod, SteppedSettings, seen_columns
from engram.methods.blocks.losses import binary_cross_entropy
from engram.methods.blocks.phases import stepped


@dataclass(frozen=True)
class ICaRLSettings(SteppedSettings):
    """iCaRL's settings; the defaults are those of CIFAR-100."""

    # The learning rate is high because the loss is also a mean over classes.
    train: Training = setting(stepped(70, 49, 63, lr=2.0, factor=0.2, weight_decay=5e-5), role="main")


@final
@register(
    "icarl",
    settings=ICaRLSettings,
    title="Incremental Classifier and Representation Learning",
    paper="Rebuffi, Kolesnikov, Sperl, Lampert, CVPR 2017",
    brightened=False,
    recipes=RecipeHints(
        imagenet=both_imagenets(
            {
                "train.epochs": 60,
                "train.batch_size": 64,
                "train.lr": 1.0,
                "train.milestones": (20 / 60, 30 / 60, 40 / 60, 50 / 60),
                "train.weight_decay": 1e-5,
            }
        )
    ),
)
class ICaRL(LinearMethod[ICaRLSettings]):
    """Distils the sigmoids of the old classes and predicts by the nearest mean of exemplars."""

    predictors = ("nme", "cnn")

    @mean_over_images
    def base_loss(self, step: Step) -> Terms:
        """Binary cross-entropy with the labels, a mean over batch and classes."""
        return {"classification": self._mean(step, _is_label(step), step.new)}

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """Binary cross-entropy, split by the source of the targets: labels, or the previous model."""
        assert step.teacher is not None
        return {
            **self.base_loss(step),
            "distillation": self._mean(step, step.teacher.logits.sigmoid(), step.old),
        }

    def _mean(self, step: Step, targets: Tensor, columns: Tensor) -> Tensor:
        """The part of the mean over the batch and all classes seen that comes from these columns."""
        sums = binary_cross_entropy(step.student.logits, targets, columns)
        return (sums / seen_columns(step).sum()).mean()


def _is_label(step: Step) -> Tensor:
    """(B, K), 1 at each sample's label and 0 elsewhere."""
    columns = torch.arange(step.student.logits.shape[1], device=step.labels.device)
    return (step.labels[:, None] == columns).to(step.student.logits.dtype)
