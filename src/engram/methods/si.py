"""SI: synaptic intelligence (Zenke, Poole, Ganguli, ICML 2017), in its class-incremental form.

The more the movement of a parameter reduced the loss in training, the less the parameter may change. -gradient *
movement is summed over the steps of a stage, and omega grows by this sum divided by the squared total movement.
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

    damping: xi, which limits the omega of a parameter that hardly moved. limit: see `limited_penalty`.
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
    """Penalises changes of each parameter by how much its movement in training reduced the loss."""

    def base_key(self) -> None:
        """None: the base stage is not shared, because its weights do not contain the path integral."""

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        # In the base stage, omega is 0: the penalty only sums the path integral.
        settings = self.settings
        penalty = limited_penalty(settings.strength, settings.train, settings.limit, traced=True)
        return [penalty_phase(learner, stage, settings.train, penalty)]

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Increase omega by path / (distance^2 + xi)."""
        buffers = learner.buffers
        for name, parameter in learner.network.named_parameters():
            distance = parameter.detach() - buffers[ANCHOR + name]
            # A parameter whose movement increased the loss is free; a negative omega would push it away.
            grown = buffers[PATH + name].clamp(min=0) / (distance.square() + self.settings.damping)
            check_finite(grown, stage)
            learner.store(OMEGA + name, buffers[OMEGA + name] + grown)
