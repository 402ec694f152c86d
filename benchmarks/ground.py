"""The two places a step is measured at: in the base stage, and in the first stage with a teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from benchmarks.scale import Scale, afc_config, store_of
from engram.contract import Phase
from engram.contract.exemplars import choose_exemplars
from engram.data.stage import Stage
from engram.data.store import ImageStore
from engram.experiment.learner_config import resolve_device
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session

Kind = Literal["base", "teacher"]
KINDS: tuple[Kind, ...] = ("base", "teacher")

TITLES: dict[Kind, str] = {"base": "base, no teacher", "teacher": "with teacher"}


@dataclass(frozen=True, eq=False)
class Prepared:
    """A session that stands before the first step of a phase."""

    session: Session
    stage: Stage
    phase: Phase


class Ground:
    """Sessions brought to where steps are measured; what they share is made once."""

    def __init__(self, scale: Scale, store: ImageStore | None = None, config: RunConfig | None = None) -> None:
        self.scale = scale
        self.store = store_of(scale) if store is None else store
        self.config = afc_config(scale) if config is None else config

    @property
    def device(self) -> torch.device:
        """The device that the sessions are on."""
        return torch.device(resolve_device(self.config.device, self.config.precision)[0])

    def at(self, kind: Kind, seed: int = 1) -> Prepared:
        """A fresh session before the first step of the base stage, or of the stage after it with its teacher."""
        session = Session(replace(self.config, seed=seed), self.store)
        if kind == "teacher":
            session.learner.load_state_dict(self.after_base)
        return _before_main_phase(session, KINDS.index(kind))

    @cached_property
    def after_base(self) -> dict[str, Tensor]:
        """A learner past the base stage, on the CPU: at most an epoch of training, then all that follows it."""
        session = Session(self.config, self.store)
        learner, method, engine = session.learner, session.method, session.engine
        prepared = _before_main_phase(session, 0)
        loop = engine.start(learner, prepared.stage, prepared.phase, 0)
        for _ in islice(loop, loop.steps):
            pass
        method.finish(learner, prepared.stage, engine)
        chosen = choose_exemplars(learner, prepared.stage, engine)
        learner.memory.update(prepared.stage.pool, chosen, prepared.stage.num_seen)
        learner.snapshot_teacher()
        return {name: value.detach().cpu().clone() for name, value in learner.state_dict().items()}


def _before_main_phase(session: Session, index: int) -> Prepared:
    stage = session.stage(index)
    session.method.grow(session.learner, stage, session.engine)
    phase = session.method.phases(session.learner, stage, session.engine)[0]
    assert phase.teacher == (index > 0), "the step that is measured has a teacher after the base stage only"
    return Prepared(session, stage, phase)


def lengthened(phase: Phase, steps: int) -> Phase:
    """The phase with as many epochs as so many steps take, if it has fewer."""
    per_epoch, _ = phase.training.batches(phase.images)
    epochs = max(phase.training.epochs, -(-steps // per_epoch))
    return replace(phase, training=replace(phase.training, epochs=epochs))
