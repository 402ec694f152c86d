"""EWC, MAS and SI: parameters are held near their values after the previous stage, by a quadratic penalty.

The methods differ only in omega, how much each parameter matters for what was learned. The loss of a later stage is
cross-entropy plus factor * sum omega (theta - anchor)^2, over the backbone and the rows of the old classes. Without a
memory, only the new classes are compared with each other, and the old rows are frozen; with one, all classes seen are
compared, and every row is trained. All are in their class-incremental form.

- EWC, elastic weight consolidation (Kirkpatrick et al., PNAS 2017): omega is the diagonal of the Fisher information,
  the mean over images of the squared gradient of the log-likelihood of a label.
- MAS, memory aware synapses (Aljundi et al., ECCV 2018): omega is the mean over images of the absolute gradient of the
  squared length of the scores. It uses no labels.
- SI, synaptic intelligence (Zenke, Poole, Ganguli, ICML 2017): -gradient * movement is summed over the steps of a
  stage, and omega grows by this sum divided by the squared total movement.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, final

import torch
from torch import Tensor

from engram.contract import Learner, Output, Part, Passes, Phase, Stage, Step, Terms, Training, register, setting
from engram.contract.extension import Extension, PhaseContext, StepHooks
from engram.core.errors import option
from engram.methods.blocks import linear
from engram.methods.blocks.losses import MASKED, cross_entropy
from engram.methods.blocks.phases import EVERYTHING, check_finite, main_phase, sampled_rows, stepped

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

    works_on_parts = True

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


def limited_penalty(factor: float, training: Training, limit: float | None, traced: bool = False) -> QuadraticPenalty:
    """The penalty of a phase, with a ceiling of omega.

    limit: the largest fraction of its distance from the anchor that one step may move a parameter back; None: no limit.
    The gradient is 2 factor omega (theta - anchor), so the fraction is lr * 2 factor omega. Beyond 2 + 2 momentum, a
    parameter overshoots by more than its distance, and training diverges.
    """
    stiffest = 2 * factor * training.lr
    ceiling = math.inf if limit is None or stiffest == 0 else limit / stiffest
    return QuadraticPenalty(factor, ceiling, traced)


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
class PenaltySettings(linear.SteppedSettings):
    """Settings of all three. strength: of the penalty. limit: see `limited_penalty`."""

    strength: float = setting(1.0, at_least=0, after_base=True)
    limit: float | None = setting(1.0, at_least=0, after_base=True)
    train: Training = setting(stepped(160, 80, 120, clip=5.0), role="main")


PenaltySettingsT = TypeVar("PenaltySettingsT", bound=PenaltySettings)


class PenaltyMethod(linear.LinearMethod[PenaltySettingsT]):
    """A linear head, and an anchor at the start of each stage; a method adds its penalty and its omega."""

    predictors = ("cnn",)
    uses_teacher = False
    class_buffers = tuple(f"{kind}head.{name}" for kind in (OMEGA, ANCHOR, PATH) for name in ("weight", "bias"))

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        super().grow(learner, stage, passes)
        set_anchor(learner)
        if learner.memory.config.budget == "none":
            linear.note_single_class(learner, stage, SINGLE_CLASS)

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """The main phase over the whole pool; its loss and the parts it trains depend on whether there is a memory."""
        loss, train = linear.classify, EVERYTHING
        if learner.memory.config.budget == "none":
            loss, train = linear.classify_new, Part.BACKBONE | Part.NEW_CLASSES
        extensions = self.penalties(stage)
        return [main_phase(stage, self.settings.train, loss, train=train, teacher=False, extensions=extensions)]

    @abstractmethod
    def penalties(self, stage: Stage) -> tuple[QuadraticPenalty, ...]:
        """The penalty of a stage, or none."""


@dataclass(frozen=True)
class MeasuredSettings(PenaltySettings):
    """Settings of EWC and MAS. strength: the penalty is strength / 2 * sum omega (theta - anchor)^2.

    merge: weight of the earlier omega in the merged one; None: old classes / classes seen. importance_samples: number
    of images that omega is estimated on; None: all.
    """

    merge: float | None = setting(0.5, at_least=0, at_most=1, after_base=True)
    importance_samples: int | None = setting(None, at_least=1, after_base=True)


MeasuredSettingsT = TypeVar("MeasuredSettingsT", bound=MeasuredSettings)


class MeasuredMethod(PenaltyMethod[MeasuredSettingsT]):
    """A method whose omega is measured after each stage: the mean over images of |gradient of the measure|^power."""

    power: ClassVar[Literal[1, 2]]
    needs_image_gradients = True

    def penalties(self, stage: Stage) -> tuple[QuadraticPenalty, ...]:
        settings = self.settings
        return () if stage.is_base else (limited_penalty(settings.strength / 2, settings.train, settings.limit),)

    @abstractmethod
    def measure(self, step: Step, numbers: Tensor) -> Tensor:
        """A value for each image (B,). numbers: a uniform random number per image."""

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Measure omega, and merge it with that of the previous stages."""
        rows = sampled_rows(learner, stage, self.settings.importance_samples)
        fresh = passes.sensitivity(learner, stage, rows, self.measure, self.power)
        keep_omega(learner, stage, fresh, self.settings.merge)


Label = Literal["true", "predicted", "sampled"]


@dataclass(frozen=True)
class EWCSettings(MeasuredSettings):
    """EWC's settings. label: the label whose likelihood is used: true, predicted, or sampled from the prediction."""

    strength: float = setting(5000.0, at_least=0, after_base=True)
    label: Label = setting("predicted", after_base=True)


def draw_labels(logits: Tensor, columns: Tensor, numbers: Tensor) -> Tensor:
    """Draw labels (B,) from the softmax over the columns. numbers: uniform in [0, 1), (B,)."""
    below = logits.masked_fill(~columns, MASKED).softmax(dim=1).cumsum(dim=1)
    return (below <= numbers[:, None] * below[:, -1:]).sum(dim=1)


@final
@register(
    "ewc",
    settings=EWCSettings,
    title="Elastic weight consolidation",
    paper="Kirkpatrick et al., PNAS 2017",
    memory="optional",
    shares_base=True,
)
class EWC(MeasuredMethod[EWCSettings]):
    """Penalises changes of each parameter by its Fisher information."""

    power = 2

    def measure(self, step: Step, numbers: Tensor) -> Tensor:
        """log p(y | x) over all classes seen, (B,), where y is the label chosen by the settings."""
        logits, columns, labels = step.student.logits, linear.seen_columns(step), step.labels
        if self.settings.label == "predicted":
            labels = logits.detach().masked_fill(~columns, -torch.inf).argmax(dim=1)
        elif self.settings.label == "sampled":
            labels = draw_labels(logits.detach(), columns, numbers)
        return -cross_entropy(logits, labels, columns)


@final
@register(
    "mas",
    settings=MeasuredSettings,
    title="Memory aware synapses",
    paper="Aljundi et al., ECCV 2018",
    memory="optional",
    shares_base=True,
)
class MAS(MeasuredMethod[MeasuredSettings]):
    """Penalises changes of each parameter by how much the scores depend on it."""

    power = 1

    def measure(self, step: Step, numbers: Tensor) -> Tensor:
        """The squared length of each image's scores for the classes seen, (B,)."""
        return torch.where(linear.seen_columns(step), step.student.logits, 0).square().sum(dim=1)


@dataclass(frozen=True)
class SISettings(PenaltySettings):
    """SI's settings. strength: the penalty is strength * sum omega (theta - anchor)^2.

    damping: xi, which limits the omega of a parameter that hardly moved.
    """

    strength: float = setting(0.1, at_least=0, after_base=True)
    damping: float = setting(0.1, above=0, after_base=True)


@final
@register(
    "si",
    settings=SISettings,
    title="Synaptic intelligence",
    paper="Zenke, Poole, Ganguli, ICML 2017",
    memory="optional",
)
class SI(PenaltyMethod[SISettings]):
    """Penalises changes of each parameter by how much its movement in training reduced the loss."""

    family = None  # the base stage is not shared: its weights do not contain the path integral

    def penalties(self, stage: Stage) -> tuple[QuadraticPenalty, ...]:
        # In the base stage, omega is 0: the penalty only sums the path integral.
        settings = self.settings
        return (limited_penalty(settings.strength, settings.train, settings.limit, traced=True),)

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Increase omega by path / (distance^2 + xi)."""
        buffers = learner.buffers
        for name, parameter in learner.network.named_parameters():
            distance = parameter.detach() - buffers[ANCHOR + name]
            # A parameter whose movement increased the loss is free; a negative omega would push it away.
            grown = buffers[PATH + name].clamp(min=0) / (distance.square() + self.settings.damping)
            check_finite(grown, stage)
            learner.store(OMEGA + name, buffers[OMEGA + name] + grown)
