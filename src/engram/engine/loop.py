"""The loop of a phase: one step, built from the method's loss, taken again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.data.stage import Stage
from engram.engine.capture import CapturedStep
from engram.engine.plan import EpochPlan, plan_epoch
from engram.errors import EngramError
from engram.learner import Learner
from engram.methods import Phase, Step
from engram.models.network import Part

if TYPE_CHECKING:
    from engram.engine.engine import Engine


class NonFiniteLoss(EngramError):
    """A loss became infinite or not a number; the weights since then are worthless."""


@dataclass(frozen=True, eq=False)
class PhaseState:
    """Where a phase stands: enough, with the learner, to go on exactly.

    rows: the rows of the pool it trains on. epoch, step: the next step to take.
    """

    rows: Tensor
    momentum: Tensor
    epoch: int
    step: int


class PhaseLoop:
    """The steps of one phase. Iterating takes them one by one; between two of them `state` says where the phase stands.

    The step itself reads everything from tensors that keep their place (plan, counter, weights, buffers) and branches
    on nothing that changes from step to step, so that it can be captured and replayed as it is.
    """

    def __init__(
        self,
        engine: Engine,
        learner: Learner,
        stage: Stage,
        phase: Phase,
        index: int,
        resume: PhaseState | None,
    ) -> None:
        self.phase = phase
        self.rows = phase.rows() if resume is None else resume.rows
        if len(self.rows) == 0:
            raise EngramError(f"stage {stage.index} has no image to train on in its {phase.name} phase")
        self.steps, self.batch_size = phase.training.batches(len(self.rows))
        self.epoch, self.step = (0, 0) if resume is None else (resume.epoch, resume.step)
        self._engine, self._learner, self._stage, self._index = engine, learner, stage, index
        self._pool = engine.pool(stage)
        self._optimiser = engine.optimiser(learner.network)
        masks = learner.network.trainable(phase.train, stage.num_old)
        self._optimiser.begin(masks, None if resume is None else resume.momentum)
        device = engine.device
        self._weights = {name: torch.tensor(value, device=device) for name, value in phase.weights.items()}
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._term_names: list[str] = []
        self._history = torch.zeros(0, 0, device=device)  # (S, terms) of this epoch
        self._first = 0  # the first step of this epoch that the history holds
        self._plan: EpochPlan | None = None
        self._steps: dict[int, Callable[[], None]] = {}  # by batch size

    def __iter__(self) -> Iterator[None]:
        self._learner.network.train()
        while self.epoch < self.phase.training.epochs:
            plan = self._begin_epoch()
            while self.step < self.steps:
                self._step_of(plan.last if self.step == self.steps - 1 else self.batch_size)()
                self.step += 1
                yield
            self.epoch, self.step = self.epoch + 1, 0

    def state(self) -> PhaseState:
        """Where the phase stands now; refuses to speak for weights that a non-finite loss has spoilt."""
        self.check_finite()
        return PhaseState(self.rows, self._optimiser.momentum, self.epoch, self.step)

    def terms(self) -> dict[str, float]:
        """The mean of each loss term over this epoch's steps so far. Waits for the device."""
        self.check_finite()
        means = self._history[self._first : self.step].mean(dim=0).tolist()
        return dict(zip(self._term_names, means, strict=True))

    def check_finite(self) -> None:
        """Raises NonFiniteLoss if a term of this epoch was infinite or not a number. Waits for the device."""
        bad = torch.nonzero(~self._history[self._first : self.step].isfinite().all(dim=1))
        if len(bad) == 0:
            return
        step = self._first + int(bad[0])
        values = self._history[step].tolist()
        terms = ", ".join(f"{name} = {value:g}" for name, value in zip(self._term_names, values, strict=True))
        raise NonFiniteLoss(
            f"the loss stopped being finite in stage {self._stage.index}, phase {self.phase.name}, "
            f"epoch {self.epoch + 1}, step {step + 1} of {self.steps} ({terms}); "
            "nothing was saved after it: try a lower learning rate"
        )

    def learning_rate(self) -> float:
        """The learning rate of the last step taken."""
        assert self._plan is not None
        return float(self._plan.lr[self.step - 1])

    def _begin_epoch(self) -> EpochPlan:
        plan = plan_epoch(
            self.phase.training,
            self._engine.augmentation,
            self.rows,
            self.epoch,
            (self._stage.index, self._index),
            self._learner.seed,
            self._engine.device,
        )
        if self._plan is None:
            self._plan = plan
        else:
            self._plan.load(plan)
        self._counter.fill_(self.step)
        self._first = self.step
        self._history.zero_()
        return self._plan

    def _step_of(self, size: int) -> Callable[[], None]:
        """The step for batches of that size: captured on a GPU, as it is elsewhere."""
        if size not in self._steps:
            step = partial(self._take_step, size)
            if self._engine.capture:
                network, optimiser = self._learner.network, self._optimiser
                step = CapturedStep(step, [optimiser.values, optimiser.momentum, self._counter, *network.buffers()])
            self._steps[size] = step
        return self._steps[size]

    def _take_step(self, size: int) -> None:
        engine, learner, phase, plan = self._engine, self._learner, self.phase, self._plan
        assert plan is not None
        rows, draws, lr = plan.row(self._counter, size)
        images = engine.augment(self._pool, rows, draws)
        with engine.autocast():
            student = learner.network(images, train_backbone=Part.BACKBONE in phase.train)
            teacher = None
            if phase.teacher:
                with torch.no_grad():
                    teacher = learner.teacher(images)
        labels, exemplar = self._pool.labels[rows], self._pool.exemplar[rows]
        terms = phase.loss(Step(labels, exemplar, student, teacher, self._weights, learner.buffers))
        values = torch.stack([term.float() for term in terms.values()])
        self._optimiser.zero_grad()
        values.sum().backward()
        training = phase.training
        self._optimiser.step(lr, training.momentum, training.weight_decay, training.clip)
        if not self._term_names:
            self._term_names = list(terms)
            self._history = torch.zeros(self.steps, len(terms), device=engine.device)
        self._history.index_copy_(0, self._counter, values.detach()[None])
        self._counter += 1
