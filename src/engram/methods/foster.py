"""FOSTER: feature boosting and compression (Wang, Zhou, Ye, Zhan, ECCV 2022).

A stage has two phases. In the first, the network of the stage before is frozen, and a copy of its backbone learns what
is missing, as in gradient boosting: one head uses both embeddings. In the second, this doubled network teaches a
single one, which begins as the network of the stage before. The next stage starts from that single network, so the
size stays the same. Predictions are by the doubled network until then, as in the published tables.

Legend: B batch, D embedding of one backbone, K capacity in classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract import Learner, Method, Passes, Phase, Settings, Stage, Step, Terms, Training, setting
from engram.contract.learner import load_network
from engram.contract.method_registry import RecipeHints, register
from engram.contract.phase import mean_over_images
from engram.core.errors import EngramError
from engram.core.rng import generator
from engram.methods.blocks.expanding import WideningHead, residual
from engram.methods.blocks.linear import classify, distil, seen_columns
from engram.methods.blocks.losses import cross_entropy, distillation
from engram.methods.blocks.phases import main_phase
from engram.methods.der import ExpandingBackbone, FrozenBranches
from engram.nn.backbone import Backbone
from engram.nn.heads import Head

SINGLE = "single."  # prefix of the single network's tensors, from one stage's end to the next
BOOSTING, COMPRESSION = "scale.boosting", "scale.compression"


@dataclass(frozen=True)
class FOSTERSettings(Settings):
    """FOSTER's settings; the defaults are those of CIFAR-100 with 50 base classes.

    train, boost, compress: training of the base stage, and of the two phases of later stages. beta1: strength of the
    class scale while boosting, a value for each stage after the base; the last one also serves all stages after it.
    beta2: of that in the compression. lambda_kd: weight of the distillation while boosting. temperature: of all
    distillation. evaluate: the network that predicts and chooses exemplars after a stage.
    """

    beta1: tuple[float, ...] = setting((0.94,), after_base=True)
    beta2: float = setting(0.97, after_base=True)
    lambda_kd: float = setting(1.0, at_least=0, after_base=True)
    temperature: float = setting(2.0, above=0, after_base=True)
    evaluate: Literal["boosted", "compressed"] = setting("boosted", after_base=True)
    train: Training = setting(Training(200, clip=None), role="main")
    boost: Training = setting(Training(170, clip=None), after_base=True, role="later")
    compress: Training = setting(Training(130, weight_decay=0.0, clip=None), after_base=True, role="finetune")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("beta1", self.beta1), ("beta2", (self.beta2,))):
            if not values or not all(0 <= value < 1 for value in values):
                found = self.beta2 if name == "beta2" else self.beta1
                raise EngramError(f"{name} must be at least 0 and below 1, got {found}", parameter=name, value=found)


def class_scale(counts: Tensor, beta: float) -> Tensor:
    """The scale (n,) of classes with that many training images each (n,): high for rare classes, 1 on average.

    A class with N images counts as (1 - beta^N) / (1 - beta) images; its scale is proportional to the inverse.
    """
    effective = (1 - beta ** counts.clamp(min=1).double()) / (1 - beta)
    return (len(counts) / effective / (1 / effective).sum()).float()


@final
@register(
    "foster",
    settings=FOSTERSettings,
    title="Feature Boosting and Compression",
    paper="Wang, Zhou, Ye, Zhan, ECCV 2022",
    recipes=RecipeHints(later_as_base=True),
)
class FOSTER(Method[FOSTERSettings]):
    """Adds a backbone that learns what the frozen network lacks, then distils both into a single one."""

    family = "FOSTER"
    class_buffers = tuple(f"{SINGLE}head.{name}" for name in (*WideningHead.class_parameters, "seen"))

    def backbone(self, backbone: Backbone) -> Backbone:
        return ExpandingBackbone(residual("foster", backbone))

    def head(self, dim: int, capacity: int) -> Head:
        return WideningHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Return to the single network, freeze its backbone, and continue with a copy and a head over both."""
        network = learner.network
        backbone, head = network.backbone, network.head
        assert isinstance(backbone, ExpandingBackbone)
        assert isinstance(head, WideningHead)
        if not stage.is_base:
            load_network(network, learner.buffers, SINGLE)
            backbone.expand()
            store_scales(learner, stage, self.settings)
        head.extend(backbone.dim, stage.num_new, generator(learner.seed, "head", stage.index))

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings = self.settings
        if stage.is_base:
            return [main_phase(stage, settings.train, classify)]
        frozen = (FrozenBranches(1),)
        boost = main_phase(stage, settings.boost, self.boost, teacher=False, extensions=frozen)
        compress = replace(
            boost,
            name="compression",
            loss=self.compress,
            training=settings.compress,
            teacher=True,
            start=partial(begin_compression, learner, stage),
        )
        return [boost, compress]

    @mean_over_images
    def boost(self, step: Step) -> Terms:
        """Classification by the scaled logits and by the newest backbone alone, and distillation of the old classes."""
        logits, seen, settings = step.student.logits, seen_columns(step), self.settings
        scaled = cross_entropy(logits / step.buffers[BOOSTING], step.labels, seen)
        alone = cross_entropy(step.student.extras["auxiliary"], step.labels, seen)
        # The frozen backbone's features come first: the network of the stage before is its old head on them.
        weight, bias = (step.buffers[f"{SINGLE}head.{name}"] for name in ("weight", "bias"))
        assert step.student.features is not None
        before = F.linear(step.student.features[:, : weight.shape[1]], weight, bias)
        kept = distillation(logits, before, step.old, settings.temperature)
        return {
            "classification": scaled.mean(),
            "auxiliary": alone.mean(),
            "distillation": settings.lambda_kd * kept.mean(),
        }

    @mean_over_images
    def compress(self, step: Step) -> Terms:
        """Distillation of all classes seen, the doubled network's probabilities multiplied by the class scale."""
        assert step.teacher is not None
        temperature = self.settings.temperature
        # A factor of a probability is a summand of its logit.
        logits = step.teacher.logits + temperature * step.buffers[COMPRESSION].log()
        teacher = step.teacher._replace(logits=logits)
        return {"distillation": distil(replace(step, teacher=teacher), seen_columns(step), temperature)}

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Keep the single network for the next stage; predict by the doubled one, unless `evaluate` says otherwise."""
        for name, value in learner.network.state_dict().items():
            learner.store(SINGLE + name, value)
        if self.settings.evaluate == "boosted" and not stage.is_base:
            load_network(learner.network, learner.teacher.state_dict(), "")


def store_scales(learner: Learner, stage: Stage, settings: FOSTERSettings) -> None:
    """Store the class scales of the stage, (K,); 1 for classes that have not come."""
    head = learner.network.head
    counts = torch.bincount(stage.pool.labels, minlength=stage.num_seen)
    beta1 = settings.beta1[min(stage.index, len(settings.beta1)) - 1]
    for name, beta in ((BOOSTING, beta1), (COMPRESSION, settings.beta2)):
        scale = torch.ones(max(head.capacity, stage.num_seen))
        scale[: stage.num_seen] = class_scale(counts, beta)
        learner.store(name, scale.to(head.seen.device))


def begin_compression(learner: Learner, stage: Stage) -> None:
    """Make the doubled network the teacher; continue with the network of the stage before, with rows for new classes.

    The rows of old classes are those of that network.
    """
    learner.snapshot_teacher()
    load_network(learner.network, learner.buffers, SINGLE)
    learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index, "compression"))
