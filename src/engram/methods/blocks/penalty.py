"""What EWC, SI and MAS share: a linear head, and parameters tied to where they stood after the stage before.

The methods differ in omega alone, how much each parameter matters to what was learned. The loss of a later stage is
cross-entropy plus factor * sum omega (theta - anchor)^2, over the backbone and the rows of the old classes. Without a
memory the new classes are told apart among themselves and the old rows stand still; with one, all classes seen are, and
every row may move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engram.contract.learner import Learner
from engram.contract.method import ANCHOR, OMEGA, PATH, Passes, Phase, Settings, SettingsT, Tether, Training
from engram.contract.settings import setting
from engram.core.errors import option
from engram.data.stage import Stage
from engram.methods.blocks.importance import check_finite
from engram.methods.blocks.linear import EVERYTHING, LinearMethod, classify, classify_new, note_single_class
from engram.nn.network import Part

SINGLE_CLASS = (
    "without a memory new classes are told apart among themselves alone: such a class is not learned; bring two or "
    f"more at a time, or keep exemplars ({option('memory', 'per_class=20')})"
)


def tethered_training() -> Training:
    """160 epochs, a tenth of the rate after half and three quarters of them."""
    return Training(schedule="steps", milestones=(0.5, 0.75))


def tether(factor: float, training: Training, limit: float | None, traced: bool = False) -> Tether:
    """The tether of a phase, no stiffer than that a step takes a parameter `limit` of its way back; None: no limit.

    With a step of lr against the gradient 2 factor omega (theta - anchor), lr 2 factor omega is that share. Beyond
    2 + 2 momentum a parameter would be thrown to the other side further than it was off, and training diverges.
    """
    stiffest = 2 * factor * training.lr
    ceiling = math.inf if limit is None or stiffest == 0 else limit / stiffest
    return Tether(factor, ceiling, traced)


def tethered_phase(learner: Learner, stage: Stage, training: Training, held: Tether | None) -> Phase:
    """Everything in the pool; what is classified, and what moves, is as the memory says."""
    alone = learner.memory.config.budget == "none"
    loss, train = (classify_new, Part.BACKBONE | Part.NEW_CLASSES) if alone else (classify, EVERYTHING)
    return Phase("main", len(stage.pool), lambda: stage.all_rows, loss, train, training, tether=held)


def hold(learner: Learner) -> None:
    """Makes the parameters as they are now the anchor; omega has their shapes, with zeros for what is new."""
    for name, parameter in learner.network.named_parameters():
        learner.store(ANCHOR + name, parameter.detach())
        omega, held = torch.zeros_like(parameter.detach()), learner.buffers.get(OMEGA + name)
        if held is not None:
            omega[tuple(slice(size) for size in held.shape)] = held
        learner.store(OMEGA + name, omega)


def keep_omega(learner: Learner, stage: Stage, fresh: Mapping[str, Tensor], share: float | None) -> None:
    """Merges the omega of this stage into that of all: share * before + (1 - share) * fresh.

    share: None is old classes / classes seen. The rows of new classes have nothing before: theirs is the fresh one.
    """
    share = stage.num_old / stage.num_seen if share is None else share
    rows = {f"head.{name}" for name in learner.network.head.class_parameters}
    for name, new in fresh.items():
        check_finite(new, stage)
        merged = new
        if not stage.is_base:
            merged = share * learner.buffers[OMEGA + name] + (1 - share) * new
            if name in rows:
                merged[stage.num_old :] = new[stage.num_old :]
        learner.store(OMEGA + name, merged)


@dataclass(frozen=True)
class MeasuredSettings(Settings):
    """What EWC and MAS both have. strength: the penalty is strength / 2 * sum omega (theta - anchor)^2.

    merge: the share of the omega before in the merged one, None for old classes / classes seen. importance_samples: the
    images omega is estimated on, None for all. limit: the most of its way back that a step may take a parameter, None
    for no limit.
    """

    strength: float = setting(1.0, at_least=0, after_base=True)
    merge: float | None = setting(0.5, at_least=0, at_most=1, after_base=True)
    importance_samples: int | None = setting(None, at_least=1, after_base=True)
    limit: float | None = setting(1.0, at_least=0, after_base=True)
    train: Training = setting(factory=tethered_training, role="main")


class TetheredMethod(LinearMethod[SettingsT]):
    """A linear head, and an anchor where the stage starts; each method adds its phases and its omega."""

    predictors = ("cnn",)
    taught = False
    class_buffers = tuple(f"{kind}head.{name}" for kind in (OMEGA, ANCHOR, PATH) for name in ("weight", "bias"))

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        hold(learner)
        if learner.memory.config.budget == "none":
            note_single_class(learner, stage, SINGLE_CLASS)


MeasuredSettingsT = TypeVar("MeasuredSettingsT", bound=MeasuredSettings)


class MeasuredMethod(TetheredMethod[MeasuredSettingsT]):
    """One whose omega is measured once a stage is trained; it adds the measure."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings = self.settings
        held = None if stage.is_base else tether(settings.strength / 2, settings.train, settings.limit)
        return [tethered_phase(learner, stage, settings.train, held)]
