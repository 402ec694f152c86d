"""Quadratic penalty: parameters are held near their values after the previous stage (EWC, SI, MAS).

The methods differ only in omega, how much each parameter matters for what was learned. The loss of a later stage is
cross-entropy plus factor * sum omega (theta - anchor)^2, over the backbone and the rows of the old classes. Without a
memory, only the new classes are compared with each other, and the old rows are frozen; with one, all classes seen are
compared, and every row is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engram.contract import (
    Extension,
    Learner,
    Output,
    Part,
    Passes,
    Phase,
    PhaseContext,
    Settings,
    SettingsT,
    Stage,
    StepHooks,
    Terms,
    Training,
    setting,
)
from engram.core.errors import option
from engram.methods.blocks.importance import check_finite
from engram.methods.blocks.linear import LinearMethod, classify, classify_new, note_single_class
from engram.methods.blocks.phases import EVERYTHING, main_phase

# Prefixes of the learner's buffers of a penalty, followed by the parameter's name.
OMEGA, ANCHOR, PATH = "omega.", "anchor.", "path."
SINGLE_CLASS = (
    "without a memory new classes are only compared with each other: a single class is not learned; bring two or "
    f"more at a time, or keep exemplars ({option('memory', 'per_class=20')})"
)


@dataclass(frozen=True)
class QuadraticPenalty(Extension):
    """Adds factor * sum omega (theta - anchor)^2 to the loss.

    omega and anchor are the learner's buffers OMEGA and ANCHOR, one of each per parameter, in its shape. An omega above
    the ceiling counts as the ceiling. The gradient is added before gradients are clamped, and the value is logged as
    "penalty". traced: -gradient * movement of each parameter is summed over the steps of the phase, with the gradient
    of the loss without the penalty; after the phase the sums are the buffers PATH (SI's path integral).
    """

    factor: float
    ceiling: float = math.inf
    traced: bool = False

    def attach(self, context: PhaseContext, state: Mapping[str, Tensor]) -> StepHooks:
        return _PenaltyHooks(self, context, state)


class _PenaltyHooks(StepHooks):
    """Applies the quadratic penalty on the flat parameters and accumulates SI's path integral."""

    def __init__(self, penalty: QuadraticPenalty, context: PhaseContext, state: Mapping[str, Tensor]) -> None:
        self._penalty, self._learner = penalty, context.learner
        self._parameters = parameters = context.parameters
        self._omega, self._anchor = parameters.persistent_buffer("omega"), parameters.persistent_buffer("anchor")
        for flat, kind in ((self._omega, OMEGA), (self._anchor, ANCHOR)):
            parameters.fill(flat, {name: self._learner.buffers[kind + name] for name in parameters.names})
        self._omega.clamp_(max=penalty.ceiling)
        if penalty.traced:
            self._path, self._before = parameters.persistent_buffer("path"), parameters.persistent_buffer("before")
            self._gradients = parameters.persistent_buffer("gradients")
            self._path.zero_()
            saved = {name.removeprefix(PATH): value for name, value in state.items() if name.startswith(PATH)}
            parameters.fill(self._path, saved)

    def after_backward(self) -> Terms:
        parameters, factor = self._parameters, self._penalty.factor
        if self._penalty.traced:
            self._before.copy_(parameters.values)
            self._gradients.copy_(parameters.gradients)
        difference = parameters.values - self._anchor
        weighted = self._omega * difference
        parameters.gradients.add_(weighted, alpha=2 * factor)
        return {"penalty": factor * (weighted * difference).sum(dim=0, keepdim=True)}

    def after_update(self, student: Output) -> bool:
        if self._penalty.traced:
            self._path.addcmul_(self._gradients, self._parameters.values - self._before, value=-1)
        return False

    def state(self) -> dict[str, Tensor]:
        if not self._penalty.traced:
            return {}
        return {f"{PATH}{name}": value for name, value in self._parameters.by_name(self._path).items()}

    def finish(self) -> None:
        for name, value in self.state().items():
            self._learner.store(name, value)


def penalty_training() -> Training:
    """160 epochs; learning rate times 0.1 after 50% and 75% of them."""
    return Training(schedule="steps", milestones=(0.5, 0.75))


def limited_penalty(factor: float, training: Training, limit: float | None, traced: bool = False) -> QuadraticPenalty:
    """The penalty of a phase, with a ceiling of omega.

    limit: the largest fraction of its distance from the anchor that one step may move a parameter back; None: no limit.
    The gradient is 2 factor omega (theta - anchor), so the fraction is lr * 2 factor omega. Beyond 2 + 2 momentum, a
    parameter overshoots by more than its distance, and training diverges.
    """
    stiffest = 2 * factor * training.lr
    ceiling = math.inf if limit is None or stiffest == 0 else limit / stiffest
    return QuadraticPenalty(factor, ceiling, traced)


def penalty_phase(learner: Learner, stage: Stage, training: Training, penalty: QuadraticPenalty | None) -> Phase:
    """The main phase over the whole pool; its loss and the parts it trains depend on whether there is a memory."""
    loss, train = classify, EVERYTHING
    if learner.memory.config.budget == "none":
        loss, train = classify_new, Part.BACKBONE | Part.NEW_CLASSES
    extensions = () if penalty is None else (penalty,)
    return main_phase(stage, training, loss, train=train, teacher=False, extensions=extensions)


def set_anchor(learner: Learner) -> None:
    """Make the current parameters the anchor; omega gets their shapes, with zeros for new rows."""
    for name, parameter in learner.network.named_parameters():
        learner.store(ANCHOR + name, parameter.detach())
        omega, held = torch.zeros_like(parameter.detach()), learner.buffers.get(OMEGA + name)
        if held is not None:
            omega[tuple(slice(size) for size in held.shape)] = held
        learner.store(OMEGA + name, omega)


def keep_omega(learner: Learner, stage: Stage, fresh: Mapping[str, Tensor], share: float | None) -> None:
    """Merge the omega of this stage: share * before + (1 - share) * fresh.

    share: None is old classes / classes seen. The rows of new classes have no earlier omega: theirs is the fresh one.
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
    """Settings of EWC and MAS. strength: the penalty is strength / 2 * sum omega (theta - anchor)^2.

    merge: weight of the earlier omega in the merged one; None: old classes / classes seen. importance_samples: number
    of images that omega is estimated on; None: all. limit: see `limited_penalty`.
    """

    strength: float = setting(1.0, at_least=0, after_base=True)
    merge: float | None = setting(0.5, at_least=0, at_most=1, after_base=True)
    importance_samples: int | None = setting(None, at_least=1, after_base=True)
    limit: float | None = setting(1.0, at_least=0, after_base=True)
    train: Training = setting(factory=penalty_training, role="main")


class PenaltyMethod(LinearMethod[SettingsT]):
    """A linear head, and an anchor at the start of each stage; a method adds its phases and its omega."""

    predictors = ("cnn",)
    uses_teacher = False
    class_buffers = tuple(f"{kind}head.{name}" for kind in (OMEGA, ANCHOR, PATH) for name in ("weight", "bias"))

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        set_anchor(learner)
        if learner.memory.config.budget == "none":
            note_single_class(learner, stage, SINGLE_CLASS)


MeasuredSettingsT = TypeVar("MeasuredSettingsT", bound=MeasuredSettings)


class MeasuredMethod(PenaltyMethod[MeasuredSettingsT]):
    """A method whose omega is measured after each stage; it adds the measure."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        settings = self.settings
        penalty = None
        if not stage.is_base:
            penalty = limited_penalty(settings.strength / 2, settings.train, settings.limit)
        return [penalty_phase(learner, stage, settings.train, penalty)]
