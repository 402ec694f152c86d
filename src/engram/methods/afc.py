"""AFC: adaptive feature consolidation (Kang, Park, Han, CVPR 2022).

The more a change of a feature channel would increase the loss, the less the student may change it. After each stage,
one pass estimates this importance for every channel of every distillation map. In the next stage, the distance of
student and teacher is weighted by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from engram.contract import Learner, Passes, RecipeHints, Stage, Step, Terms, both_imagenets, register, setting
from engram.contract.phase import mean_over_images
from engram.methods.blocks import losses, lsc
from engram.methods.blocks.lsc import LSC_IMAGENET, LSC_NME, LSCMethod, LSCSettings, Variant, distilled, stage_weight
from engram.methods.blocks.phases import check_finite, sampled_rows


@dataclass(frozen=True)
class AFCSettings(LSCSettings):
    """AFC's settings, in addition to those of the family; the defaults are those of CIFAR-100.

    discrepancy: the distillation loss of the paper or of the released code; None: as in the variant. exemplars_only:
    distil on exemplars only (Eq. (10) instead of (11), Table 3). importance_samples: number of images for the estimate
    of the importance; None: all (Figure 2).
    """

    discrepancy: Variant | None = setting(None, after_base=True)
    lambda_disc: float = setting(4.0, at_least=0, after_base=True, role="distillation")
    exemplars_only: bool = setting(False, after_base=True)
    importance_samples: int | None = setting(None, at_least=1, after_base=True)


def discrepancy(settings: AFCSettings, step: Step, importance: Sequence[Tensor]) -> Tensor:
    """The distillation loss of the paper or of the released code, without its weight."""
    assert step.teacher is not None
    counted = step.exemplar if settings.exemplars_only else None
    measure = losses.discrepancy_paper if settings.reading("discrepancy") == "paper" else losses.discrepancy_released
    return measure(step.student.maps, step.teacher.maps, importance, counted)


def read_importance(step: Step) -> list[Tensor]:
    """The importance of each map's channels, as estimated after the previous stage."""
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
        imagenet=both_imagenets({"lambda_disc": 10.0, **LSC_IMAGENET}),
    ),
)
class AFC(LSCMethod[AFCSettings]):
    """Distils feature maps, each channel weighted by its importance."""

    needs_maps = True
    logged_buffers = ("importance.",)
    returning_classes = True

    def weights(self, stage: Stage) -> dict[str, float]:
        return {"discrepancy": stage_weight(self.settings.lambda_disc, stage)}

    @mean_over_images(unless="exemplars_only")
    def loss(self, step: Step) -> Terms:
        """Eq. (16): classification plus weighted discrepancy."""
        return distilled(self.settings, step, discrepancy=discrepancy(self.settings, step, read_importance(step)))

    def importance(self, step: Step) -> list[Tensor]:
        """The contribution of a batch to the importance of each map's channels, before normalisation."""
        return losses.channel_importance(lsc.classification_loss(self.settings, step).sum(), step.student.maps)

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Algorithm 1: estimate the importance of each channel; every sample has the same weight."""
        rows = sampled_rows(learner, stage, self.settings.importance_samples)
        sums = passes.sweep(learner, stage, rows, self.importance, self.settings.train.batch_size)
        for importance in sums:
            check_finite(importance, stage)
        if any(not bool(importance.any()) for importance in sums):
            learner.notes.append(
                f"after stage {stage.index}, all channels of a map have importance 0 (the loss has no gradient, as "
                "with a single class), so they are weighted equally"
            )
        for i, importance in enumerate(sums):
            learner.store(f"importance.{i}", losses.normalise_importance(importance))
