"""PODNet: pooled outputs distillation (Douillard et al., ECCV 2020).

Distils the embedding (the flat term) and, of each feature map, the sums over rows and over columns (the spatial term),
so that a map may still change inside a row or a column. Head and balanced fine-tuning are those of the LSC family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, final

from engram.contract import RecipeHints, Stage, Step, Terms, mean_over_images, register, setting
from engram.methods.blocks import losses
from engram.methods.blocks.lsc import LSC_NME, LSCMethod, LSCSettings, distilled, stage_weight


@dataclass(frozen=True)
class PODNetSettings(LSCSettings):
    """PODNet's settings, in addition to those of the family; the defaults are those of the CNN recipe on CIFAR-100.

    The NME recipe has lambda_spatial 5; the ImageNet recipes have lambda_flat 10 and lambda_spatial 8.
    """

    lambda_flat: float = setting(1.0, at_least=0, after_base=True)
    lambda_spatial: float = setting(3.0, at_least=0, after_base=True)


def _imagenet(weight_decay: float) -> dict[str, Any]:
    # As in the published configuration files. For ImageNet-1000 the author advises batches of 256 and lr 0.2.
    return {
        "lambda_flat": 10.0,
        "lambda_spatial": 8.0,
        "train.epochs": 90,
        "train.batch_size": 64,
        "train.lr": 0.05,
        "train.weight_decay": weight_decay,
        "finetune.batch_size": 64,
        "finetune.lr": 0.01,
        "finetune.weight_decay": weight_decay,
    }


IMAGENET = {"imagenet100": _imagenet(5e-4), "imagenet1000": _imagenet(1e-4)}


PODNetSettingsT = TypeVar("PODNetSettingsT", bound=PODNetSettings)


class PODMethod(LSCMethod[PODNetSettingsT]):
    """PODNet's loss, for PODNet and what is built on it."""

    needs_maps = True

    def weights(self, stage: Stage) -> dict[str, float]:
        return {
            "flat": stage_weight(self.settings.lambda_flat, stage),
            "spatial": stage_weight(self.settings.lambda_spatial, stage),
        }

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """Classification, and the flat and the spatial term with their weights."""
        student, teacher = step.student, step.teacher
        assert teacher is not None
        flat = losses.cosine_distance(student.embedding, teacher.embedding)
        spatial = losses.pooled_distance(student.maps, teacher.maps, losses.over_rows_and_columns)
        return distilled(self.settings, step, flat=flat, spatial=spatial)


@final
@register(
    "podnet",
    settings=PODNetSettings,
    title="PODNet: embedding and pooled maps",
    paper="Douillard et al., ECCV 2020",
    shares_base=True,
    recipes=RecipeHints(nme={**LSC_NME, "lambda_spatial": 5.0}, imagenet=IMAGENET),
)
class PODNet(PODMethod[PODNetSettings]):
    """Distils the embedding and the maps pooled over rows and over columns."""

    returning_classes = True
