"""GDumb: greedy sampler and dumb learner (Prabhu, Torr, Dokania, ECCV 2020).

A baseline for all other methods: nothing is kept from the stream except a balanced memory. At each stage, the backbone
is reset to its weights after the base stage, gets a new head for all classes seen, and is trained on the memory only.
Half of the steps use CutMix. There is no teacher, and nothing else is carried from stage to stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import Learner, Method, Passes, Phase, Settings, Stage, Step, Terms, Training, setting
from engram.contract.method_registry import RecipeHints, register
from engram.core.rng import generator
from engram.methods.blocks.batches import CutMix, Mixed
from engram.methods.blocks.phases import EVERYTHING, balanced_phase, main_phase
from engram.nn.heads import Head

KEPT = "base."


def _training(epochs: int) -> Training:
    """The training of the paper: batches of 16, and a learning rate with restarts, each cycle twice as long."""
    return Training(epochs, 16, lr=0.05, schedule="restarts", factor=0.01, weight_decay=1e-6, clip=None, clip_norm=10.0)


@dataclass(frozen=True)
class GDumbSettings(Settings):
    """GDumb's settings; the defaults are those of CIFAR-100.

    train: training of the base stage. rehearse: training of each later stage. cutmix: in both.
    """

    train: Training = setting(_training(256), role="main")
    rehearse: Training = setting(_training(32), after_base=True, role="later")
    cutmix: CutMix = setting(CutMix())


class NormalisedHead(Head):
    """A weight per class, and a batch norm that gives the scores of each class mean 0 and variance 1 in a batch.

    gain, shift: the norm's parameters. mean, variance: running statistics, for evaluation.
    """

    class_parameters = ("weight", "gain", "shift")
    class_buffers: Mapping[str, float] = {"seen": 0, "mean": 0, "variance": 1}
    rectified = True
    mean: Tensor
    variance: Tensor

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(capacity, learned_scale=False)
        self.weight = nn.Parameter(torch.zeros(capacity, dim))
        self.gain = nn.Parameter(torch.zeros(capacity))
        self.shift = nn.Parameter(torch.zeros(capacity))
        self.register_buffer("mean", torch.zeros(capacity))
        self.register_buffer("variance", torch.ones(capacity))

    def _initial_rows(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if name == "weight":
            return super()._initial_rows(name, shape, generator)
        return torch.full(shape, float(name == "gain"))

    def _randomise(self, labels: range, generator: torch.Generator) -> None:
        super()._randomise(labels, generator)
        self.mean[labels.start : labels.stop] = 0
        self.variance[labels.start : labels.stop] = 1

    def forward(self, features: Tensor) -> Tensor:
        scores = F.linear(features, self.weight)
        # A single sample has no variance: use the running one.
        by_batch = self.training and len(scores) > 1
        return F.batch_norm(scores, self.mean, self.variance, self.gain, self.shift, training=by_batch)


def classify(step: Step) -> Terms:
    """Cross-entropy over all classes seen; for a mixed image with both labels, weighted by their share of the image."""
    own = F.cross_entropy(step.student.logits, step.labels)
    mixed = step.extra(Mixed)
    if mixed is None:
        return {"classification": own}
    other = F.cross_entropy(step.student.logits, mixed.labels)
    return {"classification": mixed.share * own + (1 - mixed.share) * other}


@final
@register(
    "gdumb",
    settings=GDumbSettings,
    title="Greedy sampler, dumb learner",
    paper="Prabhu, Torr, Dokania, ECCV 2020",
    selection="random",
    brightened=False,
    recipes=RecipeHints(imagenet={"imagenet100": {"train.epochs": 128, "rehearse.epochs": 16}}),
)
class GDumb(Method[GDumbSettings]):
    """Trains on the memory only, in each stage from the weights of the base stage."""

    uses_teacher = False
    family = "gdumb"

    def head(self, dim: int, capacity: int) -> Head:
        return NormalisedHead(dim, capacity)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        network, fresh = learner.network, generator(learner.seed, "head", stage.index)
        network.head.grow(stage.num_new, fresh)
        if not stage.is_base:
            kept = {name: learner.buffers[KEPT + name] for name in network.backbone.state_dict()}
            network.backbone.load_state_dict(kept)
            network.head.initialise(fresh)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings = self.settings
        extensions = (settings.cutmix,) if settings.cutmix.probability else ()
        if stage.is_base:
            return [main_phase(stage, settings.train, classify, teacher=False, extensions=extensions)]
        balance = balanced_phase(
            learner, stage, passes, settings.rehearse, classify, train=EVERYTHING, extensions=extensions
        )
        return [replace(balance, name="main")]

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Store the backbone that every later stage starts from."""
        if stage.is_base:
            for name, value in learner.network.backbone.state_dict().items():
                learner.store(KEPT + name, value)
