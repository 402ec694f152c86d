"""AFC: adaptive feature consolidation (Kang, Park, Han, CVPR 2022).

The student may change a feature channel of the previous model the less, the more a change in it would raise the loss.
After each stage one pass estimates that importance for every channel of every distillation map; in the next stage the
distance of student and teacher is weighted by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from engram.contract import Learner, Passes, Phase, RecipeHints, Stage, Step, Terms, both_imagenets, register, setting
from engram.methods.blocks import losses
from engram.methods.blocks.importance import check_finite, sampled_rows
from engram.methods.blocks.lsc import (
    LSC_NME,
    LSCMethod,
    LSCSettings,
    Variant,
    classification_loss,
    distilled,
    lsc_phases,
    stage_weight,
)


@dataclass(frozen=True)
class AFCSettings(LSCSettings):
    """AFC's settings beside the host's; the defaults are those of CIFAR-100.

    discrepancy: which reading of the distillation loss, None for "as the variant says". exemplars_only: distil on the
    exemplars alone (eq. upper_bound_3, Table 3). importance_samples: the images the estimate sees, None for all
    (Figure 2).
    """

    discrepancy: Variant | None = setting(None, after_base=True)
    lambda_disc: float = setting(4.0, at_least=0, after_base=True, role="distillation")
    exemplars_only: bool = setting(False, after_base=True)
    importance_samples: int | None = setting(None, at_least=1, after_base=True)


def discrepancy(settings: AFCSettings, step: Step, importance: Sequence[Tensor]) -> Tensor:
    """The distillation loss in the reading these settings ask for, without its weight."""
    assert step.teacher is not None
    counted = step.exemplar if settings.exemplars_only else None
    measure = losses.discrepancy_paper if settings.reading("discrepancy") == "paper" else losses.discrepancy_released
    return measure(step.student.maps, step.teacher.maps, importance, counted)


def read_importance(step: Step) -> list[Tensor]:
    """The importance of each map's channels as estimated after the stage before."""
    return [step.buffers[f"importance.{i}"] for i in range(len(step.student.maps))]


@final
@register(
    "afc",
    settings=AFCSettings,
    title="Adaptive Feature Consolidation",
    paper="Kang, Park, Han, CVPR 2022",
    shares_base=True,
    recipes=RecipeHints(
        nme=LSC_NME,
        imagenet=both_imagenets(
            {
                "lambda_disc": 10.0,
                "train.epochs": 90,
                "train.weight_decay": 1e-4,
                "finetune.lr": 0.02,
                "finetune.weight_decay": 1e-4,
            }
        ),
    ),
)
class AFC(LSCMethod[AFCSettings]):
    """Distils feature maps, each channel weighted by its importance."""

    logged_buffers = ("importance.",)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        weights = {"discrepancy": stage_weight(self.settings.lambda_disc, stage)}
        return lsc_phases(self.settings, learner, stage, passes, self.loss, weights)

    def loss(self, step: Step) -> Terms:
        """Eq. final_loss: classification plus weighted discrepancy."""
        return distilled(self.settings, step, discrepancy=discrepancy(self.settings, step, read_importance(step)))

    def importance(self, step: Step) -> list[Tensor]:
        """What a batch adds to the importance of each map's channels, before it is normalised."""
        return losses.channel_importance(classification_loss(self.settings, step).sum(), step.student.maps)

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Algorithm 1: the importance of each channel, every sample counting the same."""
        rows = sampled_rows(learner, stage, self.settings.importance_samples)
        sums = passes.sweep(learner, stage, rows, self.importance, self.settings.train.batch_size)
        for importance in sums:
            check_finite(importance, stage)
        if any(not bool(importance.any()) for importance in sums):
            learner.notes.append(
                f"after stage {stage.index} no channel had any importance "
                "(the loss has no gradient, as with one class alone): all channels of such a map count the same"
            )
        for i, importance in enumerate(sums):
            learner.store(f"importance.{i}", losses.normalise_importance(importance))
