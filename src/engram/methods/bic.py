"""BiC: large scale incremental learning by bias correction (Wu, Chen, Wang, Ye, Liu, Guo, Fu, CVPR 2019).

A model trained on many new images and few exemplars leans towards the new classes, and it does so in the same way for
all of them. Two numbers mend it: the new classes' scores become factor * score + offset, fitted on a few images of
every class that the training never saw. The next stage distils the corrected scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from engram.contract import (
    Learner,
    Part,
    Passes,
    Phase,
    RecipeHints,
    Settings,
    Stage,
    Step,
    Terms,
    Training,
    both_imagenets,
    choose_exemplars,
    register,
    setting,
)
from engram.core.errors import EngramError
from engram.core.rng import generator
from engram.methods.blocks.linear import LinearMethod, classify, convex_distillation, convex_weights, main_phase
from engram.methods.blocks.losses import binary_cross_entropy
from engram.nn.heads import Head, LinearHead


def bic_training() -> Training:
    """250 epochs, a tenth of the rate after 100, 150 and 200."""
    return Training(250, schedule="steps", milestones=(0.4, 0.6, 0.8), weight_decay=2e-4, clip=None)


def correction_training() -> Training:
    """200 epochs of few images: every one of them counts, and nothing pulls the factor to 0."""
    milestones = (0.3, 0.6, 0.8, 0.9)
    return Training(200, schedule="steps", milestones=milestones, weight_decay=0.0, clip=None, remainder="keep")


@dataclass(frozen=True)
class BiCSettings(Settings):
    """BiC's settings; the defaults are those of CIFAR-100.

    distillation: of softmaxes, weighted against the classification by the share of old classes, as in the paper; or of
    sigmoids, added to it as the mean over the old classes, as in the re-implementation that the published tables come
    from. temperature: of either. validation: the share of a class's exemplars that the training never sees. penalty: on
    half the square of the offset and, where one class is new, of the factor's distance from 1.
    """

    distillation: Literal["softmax", "sigmoid"] = "softmax"
    temperature: float = setting(2.0, above=0)
    validation: float = setting(0.1, above=0, at_most=0.5)
    penalty: float = setting(0.1, at_least=0)
    train: Training = setting(factory=bic_training, role="main")
    correction: Training = setting(factory=correction_training, role="correction")

    @property
    def held(self) -> slice:
        """The places in a class's exemplars, best first, of those held back: after each shrinking the same share."""
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
    """For each class the rows of the pool that the main phase does not see.

    Of a new class as many, drawn at random, as will be held back among its exemplars; they become exemplars, so that
    an image to validate on is one that no stage ever trained on.
    """
    quota = learner.memory.config.per_class(stage.num_seen)
    held = {label: stage.rows_of(label)[settings.held] for label in range(stage.num_old)}
    for label in stage.new_labels:
        rows = stage.rows_of(label)
        count = len(range(len(rows) if quota is None else min(quota, len(rows)))[settings.held])
        held[label] = rows[torch.randperm(len(rows), generator=generator(learner.seed, "validation", label))[:count]]
    return held


def balanced_validation(held: dict[int, Tensor]) -> Tensor:
    """As many rows of each class as every class has that has any."""
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
    """Distils the old classes' scores, then corrects those of the new by two numbers."""

    def head(self, dim: int, capacity: int) -> Head:
        return CorrectedHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        # The correction of the stage before is the teacher's alone; the student learns it by distillation.
        head = learner.network.head
        assert isinstance(head, CorrectedHead)
        head.correct(stage.new_labels)

    def base_key(self) -> None:
        """It is not shared: what the base stage holds back depends on the memory."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings, held = self.settings, held_back(self.settings, learner, stage)
        seen = torch.ones(len(stage.pool), dtype=torch.bool)
        seen[torch.cat(list(held.values()))] = False
        loss = classify if stage.is_base else self.loss
        main = main_phase(stage, settings.train, loss, rows=stage.all_rows[seen], weights=convex_weights(stage))
        if stage.is_base:
            return [main]
        if not any(len(held[label]) for label in range(stage.num_old)):
            raise EngramError(
                "bic holds back one exemplar of a class and trains on another, and in stage "
                f"{stage.index} no old class has two; give a larger memory, or more images of each class"
            )
        if not any(len(held[label]) for label in stage.new_labels):
            return [main]  # new classes of a single image each
        return [main, self._correction_phase(stage, balanced_validation(held))]

    def _correction_phase(self, stage: Stage, rows: Tensor) -> Phase:
        """The network stands still and sees the images as they are; factor and offset alone move."""
        penalty = self.settings.penalty
        # One new class has a few images to fit two numbers to: both are held then.
        weights = {"offset": penalty, "factor": penalty if stage.num_new == 1 else 0.0}
        return Phase(
            name="correct",
            images=len(rows),
            rows=lambda: rows,
            loss=self.correct,
            train=Part.HEAD_SHARED,
            training=self.settings.correction,
            weights=weights,
            augment=False,
            frozen=True,
        )

    def loss(self, step: Step) -> Terms:
        """Classification, and distillation of the teacher's corrected scores."""
        if self.settings.distillation == "softmax":
            return convex_distillation(step, self.settings.temperature)
        assert step.teacher is not None
        ours, theirs = step.student.logits / self.settings.temperature, step.teacher.logits / self.settings.temperature
        distilled = binary_cross_entropy(ours, theirs.detach().sigmoid(), step.old).mean() / step.old.sum()
        return {**classify(step), "distillation": distilled}

    def correct(self, step: Step) -> Terms:
        """Cross-entropy of the corrected scores, and what holds the correction back."""
        factor, offset = step.student.extras["correction"].unbind()
        held = step.weights["offset"] * offset.square() + step.weights["factor"] * (factor - 1).square()
        return {**classify(step), "penalty": held / 2}

    def exemplars(self, learner: Learner, stage: Stage, passes: Passes) -> dict[int, Tensor]:
        """The images held back among them, each in its place; the others as chosen."""
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
