"""BiC: large scale incremental learning by bias correction (Wu, Chen, Wang, Ye, Liu, Guo, Fu, CVPR 2019).

A model trained on many new images and few exemplars is biased towards the new classes, in the same way for all of them.
Two numbers correct this: the scores of new classes become factor * score + offset, fitted on a few images of every
class that are not used for training. The next stage distils the corrected scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor, nn

from engram.contract import Learner, Part, Passes, Phase, Stage, Step, Terms, Training, mean_over_images, setting
from engram.contract.exemplars import choose_exemplars
from engram.contract.method_registry import RecipeHints, both_imagenets, register
from engram.core.errors import EngramError
from engram.core.rng import generator
from engram.methods.blocks.linear import LinearMethod, SteppedSettings, classify, convex_distillation, convex_weights
from engram.methods.blocks.losses import binary_cross_entropy
from engram.methods.blocks.phases import main_phase, stepped
from engram.nn.heads import Head, LinearHead


@dataclass(frozen=True)
class BiCSettings(SteppedSettings):
    """BiC's settings; the defaults are those of CIFAR-100.

    distillation: "softmax": weighted against the classification by the share of old classes, as in the paper.
    "sigmoid": added as the mean over the old classes, as in the re-implementation that the published tables come from.
    temperature: of the distillation. validation: share of a class's exemplars that are never trained on. penalty: on
    offset^2 / 2 and, if there is only one new class, on (factor - 1)^2 / 2.
    """

    distillation: Literal["softmax", "sigmoid"] = "softmax"
    temperature: float = setting(2.0, above=0)
    validation: float = setting(0.1, above=0, at_most=0.5)
    penalty: float = setting(0.1, at_least=0)
    train: Training = setting(stepped(250, 100, 150, 200, weight_decay=2e-4), role="main")
    # Weight decay would pull the factor to 0.
    correction: Training = setting(
        stepped(200, 60, 120, 160, 180, weight_decay=0.0, remainder="keep"), role="correction"
    )

    @property
    def held(self) -> slice:
        """The positions of the held-out exemplars of a class (best first), evenly spread: a prefix keeps the share."""
        return slice(1, None, round(1 / self.validation))


class CorrectedHead(LinearHead):
    """A linear head without a bias, with an affine correction (factor, offset) of the scores of some classes.

    correction: (2,), (1, 0) at first. corrected: (K,) bool, the classes whose scores it changes.
    """

    class_buffers: Mapping[str, float] = {"seen": 0, "corrected": 0}
    corrected: Tensor

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(dim, capacity, bias=False)
        self.correction = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.register_buffer("corrected", torch.zeros(capacity, dtype=torch.bool))

    def correct(self, labels: range) -> None:
        """Start a new correction, of these classes only."""
        with torch.no_grad():
            self.correction.copy_(torch.tensor([1.0, 0.0]))
            self.corrected.zero_()
            self.corrected[labels.start : labels.stop] = True

    def forward(self, features: Tensor) -> Tensor:
        scores = super().forward(features)
        factor, offset = self.correction
        return torch.where(self.corrected, factor * scores + offset, scores)

    def extra_outputs(self, features: Tensor) -> Mapping[str, Tensor]:
        return {"correction": self.correction}


def held_back(settings: BiCSettings, learner: Learner, stage: Stage) -> dict[int, Tensor]:
    """For each class, the rows of the pool that the main phase does not train on.

    For a new class, they are drawn at random, as many as its exemplars will hold out. They become exemplars, so no
    stage ever trains on an image that is used for validation.
    """
    quota = learner.memory.config.per_class(stage.num_seen)
    held = {label: stage.rows_of(label)[settings.held] for label in range(stage.num_old)}
    for label in stage.new_labels:
        rows = stage.rows_of(label)
        count = len(range(len(rows) if quota is None else min(quota, len(rows)))[settings.held])
        held[label] = rows[torch.randperm(len(rows), generator=generator(learner.seed, "validation", label))[:count]]
    return held


def balanced_validation(held: dict[int, Tensor]) -> Tensor:
    """The same number of rows for each class: the smallest number that a class has, not counting empty ones."""
    count = min(len(rows) for rows in held.values() if len(rows))
    return torch.cat([rows[:count] for rows in held.values()])


@final
@register(
    "bic",
    settings=BiCSettings,
    title="Bias Correction",
    paper="Wu, Chen, Wang, Ye, Liu, Guo, Fu, CVPR 2019",
    brightened=False,
    recipes=RecipeHints(
        imagenet=both_imagenets(
            {
                "train.epochs": 100,
                "train.batch_size": 64,
                "train.lr": 0.025,
                "train.milestones": (0.3, 0.6, 0.8, 0.9),
                "train.weight_decay": 1e-4,
            }
        )
    ),
)
class BiC(LinearMethod[BiCSettings]):
    """Distils the scores of old classes, then corrects the scores of new classes by two numbers."""

    family = None  # the base stage is not shared: the images that it holds out depend on the memory

    def head(self, dim: int, capacity: int) -> Head:
        return CorrectedHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        # Only the teacher has the correction of the previous stage; the student learns it by distillation.
        head = learner.network.head
        assert isinstance(head, CorrectedHead)
        head.correct(stage.new_labels)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        held = held_back(self.settings, learner, stage)
        seen = torch.ones(len(stage.pool), dtype=torch.bool)
        seen[torch.cat(list(held.values()))] = False
        loss, weights = classify if stage.is_base else self.loss, convex_weights(stage)
        main = main_phase(stage, self.settings.train, loss, rows=stage.all_rows[seen], weights=weights)
        if stage.is_base:
            return [main]
        if not any(len(held[label]) for label in range(stage.num_old)):
            raise EngramError(
                "bic needs two exemplars of a class, one to train on and one to hold out, but in stage "
                f"{stage.index} no old class has two; use a larger memory, or more images per class"
            )
        if not any(len(held[label]) for label in stage.new_labels):
            return [main]  # each new class has only one image
        return [main, self._correction_phase(stage, balanced_validation(held))]

    def _correction_phase(self, stage: Stage, rows: Tensor) -> Phase:
        """The phase that trains only factor and offset, on images without augmentation."""
        training, penalty = self.settings.correction, self.settings.penalty
        # A single new class has only a few images to fit two numbers to: penalise both.
        weights = {"offset": penalty, "factor": penalty if stage.num_new == 1 else 0.0}
        phase = main_phase(
            stage, training, self.correct, rows=rows, train=Part.HEAD_SHARED, teacher=False, weights=weights
        )
        return replace(phase, name="correct", augment=False, frozen=True)

    @mean_over_images
    def loss(self, step: Step) -> Terms:
        """Classification, and distillation of the teacher's corrected scores."""
        if self.settings.distillation == "softmax":
            return convex_distillation(step, self.settings.temperature)
        assert step.teacher is not None
        ours, theirs = step.student.logits / self.settings.temperature, step.teacher.logits / self.settings.temperature
        distilled = binary_cross_entropy(ours, theirs.detach().sigmoid(), step.old).mean() / step.old.sum()
        return {**classify(step), "distillation": distilled}

    @mean_over_images
    def correct(self, step: Step) -> Terms:
        """Cross-entropy of the corrected scores, and the penalty on the correction."""
        factor, offset = step.student.extras["correction"].unbind()
        held = step.weights["offset"] * offset.square() + step.weights["factor"] * (factor - 1).square()
        return {**classify(step), "penalty": held / 2}

    def exemplars(self, learner: Learner, stage: Stage, passes: Passes) -> dict[int, Tensor]:
        """The exemplars of each new class: the held-out images at their positions, and the usual choice elsewhere."""
        held = held_back(self.settings, learner, stage)
        chosen = choose_exemplars(learner, stage, passes)
        for label, rows in chosen.items():
            is_held = torch.zeros(len(rows), dtype=torch.bool)
            is_held[self.settings.held] = True
            others = rows[~torch.isin(rows, held[label])]
            merged = torch.empty_like(rows)
            merged[is_held], merged[~is_held] = held[label], others[: int((~is_held).sum())]
            chosen[label] = merged
        return chosen
