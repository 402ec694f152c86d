"""SI: synaptic intelligence (Zenke, Poole, Ganguli, ICML 2017), in its class-incremental form.

A parameter may move the less, the more of the loss its way took off while it was learned: over the steps of a stage
-gradient * movement is summed up, and omega grows by that sum over the squared distance that the parameter came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from engram.contract import Learner, Passes, Phase, Settings, Stage, Training, register, setting
from engram.methods.blocks.importance import check_finite
from engram.methods.blocks.penalty import (
    ANCHOR,
    OMEGA,
    PATH,
    PenaltyMethod,
    limited_penalty,
    penalty_phase,
    penalty_training,
)


@dataclass(frozen=True)
class SISettings(Settings):
    """SI's settings. strength: the penalty is strength * sum omega (theta - anchor)^2.

    damping: xi, which keeps a parameter that hardly moved from having an omega out of bounds. limit: the most of its
    way back that a step may take a parameter, None for no limit.
    """

    strength: float = setting(0.1, at_least=0, after_base=True)
    damping: float = setting(0.1, above=0, after_base=True)
    limit: float | None = setting(1.0, at_least=0, after_base=True)
    train: Training = setting(factory=penalty_training, role="main")


@final
@register(
    "si",
    settings=SISettings,
    title="Synaptic intelligence",
    paper="Zenke, Poole, Ganguli, ICML 2017",
    memory="optional",
)
class SI(PenaltyMethod[SISettings]):
    """Ties each parameter by what its way through the training took off the loss."""

    def base_key(self) -> None:
        """It is not shared: a base stage trained elsewhere leaves its weights and not the way they came."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        # In the base stage omega is zero: the penalty is only there to be traced.
        settings = self.settings
        penalty = limited_penalty(settings.strength, settings.train, settings.limit, traced=True)
        return [penalty_phase(learner, stage, settings.train, penalty)]

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Omega grows by path / (distance^2 + xi)."""
        buffers = learner.buffers
        for name, parameter in learner.network.named_parameters():
            distance = parameter.detach() - buffers[ANCHOR + name]
            # A parameter whose way raised the loss is free; with an omega below 0 it would be driven off.
            grown = buffers[PATH + name].clamp(min=0) / (distance.square() + self.settings.damping)
            check_finite(grown, stage)
            learner.store(OMEGA + name, buffers[OMEGA + name] + grown)
