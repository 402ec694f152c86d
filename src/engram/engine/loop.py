"""The loop of a phase: one step, built from the method's loss, taken again and again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.contract.batches import Mixed
from engram.contract.learner import Learner
from engram.contract.method import Terms
from engram.core.errors import EngramError
from engram.data.stage import Stage
from engram.engine.batch_plan import learning_rates, plan_epochs, plan_mixing
from engram.engine.buffers import TERMS
from engram.engine.neighbours import Surroundings
from engram.engine.penalty import PENALTY, Pull
from engram.methods import Phase, Step
from engram.nn.network import Part

if TYPE_CHECKING:
    from engram.engine.engine import Engine


# On a GPU the host is never more than so many steps ahead: a request to stop is soon answered, and the driver's queue
# does not fill, which would hold up the launches of other runs.
STRIDE, STRIDES = 16, 4


class NonFiniteLoss(EngramError):
    """A loss became infinite or not a number; the weights since then are worthless."""


@dataclass(frozen=True, eq=False)
class PhaseState:
    """Where a phase stands: enough, with the learner, to go on exactly.

    rows: the rows of the pool it trains on. momentum: by parameter. epoch, step: the next step to take. path: by
    parameter, what a traced tether has summed up. terms: the loss terms (S, K) of the epoch's steps so far; None where
    they are not known.
    """

    rows: Tensor
    momentum: dict[str, Tensor]
    epoch: int
    step: int
    path: dict[str, Tensor] = field(default_factory=dict)
    terms: Tensor | None = None


@dataclass(frozen=True)
class Epoch:
    """A finished epoch (from 0): the mean of each loss term over its steps, and its last learning rate."""

    number: int
    terms: dict[str, float]
    lr: float


class PhaseLoop:
    """The steps of one phase. Iterating takes them one by one; between two of them `state` says where the phase stands.

    The step itself reads everything from tensors that keep their place (plan, counter, weights, buffers) and branches
    on nothing that changes from step to step, so that it can be recorded and replayed as it is. On a GPU a step is only
    launched, and the device may be some steps behind; `terms` and `state` wait for it.
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
        if resume is None and phase.start is not None:
            phase.start()
        self.rows = phase.rows() if resume is None else resume.rows
        if len(self.rows) == 0:
            raise EngramError(f"stage {stage.index} has no image to train on in its {phase.name} phase")
        _, size, last = phase.batches(len(self.rows))
        if not phase.frozen and engine.leaves_out(learner.network, size, last):
            phase = replace(phase, training=replace(phase.training, remainder="drop"))
        self.phase = phase
        self.steps, self.batch_size, self._last = phase.batches(len(self.rows))
        self.epoch, self.step = (0, 0) if resume is None else (resume.epoch, resume.step)
        self._first = self.step  # of the epoch in progress, the first step whose loss is known
        self._engine, self._learner, self._stage, self._index = engine, learner, stage, index
        self._forward = engine.bind(learner, self.batch_size)
        masks = learner.network.trainable(phase.train, stage.num_old)
        self._forward.optimiser.begin(masks, None if resume is None else resume.momentum)
        self._forward.refresh(phase.frozen)
        path = {} if resume is None else resume.path
        self._pull = None if phase.tether is None else Pull(phase.tether, self._forward.optimiser, learner, path)
        space = engine.space
        self._pool, self._plan = space.pool(stage), space.plan(self.steps, self.batch_size)
        self._mixing = None if phase.mix is None else space.mixing(len(self._plan), self.batch_size)
        self._weights, self._counter = space.weights(phase.weights), space.counter
        self._history = space.history
        if resume is not None and resume.terms is not None:
            self._first = self.step - len(resume.terms)
            self._history[self._first : self.step, : resume.terms.shape[1]] = resume.terms.to(self._history.device)
        self._arrival = space.arrival(stage, learner.network.head.capacity)
        self._around = None
        if phase.neighbours is not None:
            self._around = Surroundings(engine, learner, stage, phase.neighbours, index, phase.training, len(self.rows))
        self._lr = learning_rates(phase.training, self.steps)
        self._planned = range(self.epoch, self.epoch)  # the epochs that the plan holds
        self._term_names: list[str] = []
        self._ended: deque[tuple[int, int, Tensor, torch.cuda.Event | None]] = deque()
        self._under_way: deque[torch.cuda.Event] = deque()  # one every STRIDE steps
        self._taken = 0
        self._takers: dict[int, Callable[[], list[str]]] = {}  # by batch size

    def __iter__(self) -> Iterator[None]:
        with self._learner.network.in_training(not self.phase.frozen):
            yield from self._take_steps()

    def _take_steps(self) -> Iterator[None]:
        while self.epoch < self.phase.training.epochs:
            if self.epoch not in self._planned:
                self._plan_ahead()
            if self._around is not None:
                start = (self.epoch - self._planned.start) * self.steps
                self._around.survey(start)
                self._counter.fill_(start + self.step)
            while self.step < self.steps:
                self._term_names = self._taker(self._last if self.step == self.steps - 1 else self.batch_size)()
                self.step += 1
                if self._engine.device.type == "cuda":
                    self._keep_pace()
                if self.step == self.steps:
                    self._end_epoch()
                yield
            self.epoch, self.step, self._first = self.epoch + 1, 0, 0
        if self._pull is not None:
            self._pull.end(self._learner)

    def state(self) -> PhaseState:
        """Where the phase stands now; refuses to speak for weights that a non-finite loss has spoilt."""
        for number, first, values, copied in self._ended:
            if copied is not None:
                copied.synchronize()
            self._check(number, first, values)
        terms = self._values().clone()
        self._check(self.epoch, self._first, terms)
        path = {} if self._pull is None else self._pull.path()
        return PhaseState(self.rows, self._forward.optimiser.momentum_by_name(), self.epoch, self.step, path, terms)

    def terms(self) -> dict[str, float]:
        """The mean of each loss term over this epoch's steps so far. Waits for the device."""
        values = self._values()
        self._check(self.epoch, self._first, values)
        return self._means(values)

    def finished(self, wait: bool = False) -> Iterator[Epoch]:
        """The epochs that ended since it was last asked and whose loss is known here by now; all of them, if to wait.

        Raises NonFiniteLoss where a term was infinite or not a number.
        """
        while self._ended:
            number, first, values, copied = self._ended[0]
            if copied is not None:
                if not wait and not copied.query():
                    return
                copied.synchronize()
            self._ended.popleft()
            self._check(number, first, values)
            yield Epoch(number, self._means(values), float(self._lr[(number + 1) * self.steps - 1]))

    def _means(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self._term_names, values.mean(dim=0).tolist(), strict=True))

    def _values(self) -> Tensor:
        """The terms (steps, terms) of this epoch's steps so far, where they are."""
        start = (self.epoch - self._planned.start) * self.steps
        return self._history[start + self._first : start + self.step, : len(self._term_names)].cpu()

    def _keep_pace(self) -> None:
        """Waits until the device is no more than some steps behind."""
        self._taken += 1
        if self._taken % STRIDE:
            return
        reached = torch.cuda.Event(blocking=True)
        reached.record()
        self._under_way.append(reached)
        if len(self._under_way) > STRIDES:
            self._under_way.popleft().synchronize()

    def _end_epoch(self) -> None:
        """Sends the epoch's losses on their way to the host."""
        start = (self.epoch - self._planned.start) * self.steps
        values = self._history[start + self._first : start + self.steps, : len(self._term_names)]
        copied = None
        if values.is_cuda:
            on_host = torch.empty(values.shape, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            values = on_host
        else:
            values = values.clone()
        self._ended.append((self.epoch, self._first, values, copied))

    def _check(self, epoch: int, first: int, values: Tensor) -> None:
        """Refuses the terms of an epoch's steps, from the first given on, that are not finite."""
        bad = torch.nonzero(~values.isfinite().all(dim=1))
        if len(bad) == 0:
            return
        row = int(bad[0])
        named = dict(zip(self._term_names, values[row].tolist(), strict=True))
        terms = ", ".join(f"{name} = {value:g}" for name, value in named.items())
        is_first = (epoch, first + row) == (0, 0)
        raise NonFiniteLoss(
            f"the loss {'is not' if is_first else 'stopped being'} finite in stage {self._stage.index}, "
            f"phase {self.phase.name}, epoch {epoch + 1}, step {first + row + 1} of {self.steps} ({terms}); "
            f"nothing was saved after it: {_look_first(named) if is_first else 'try a lower learning rate'}"
        )

    def _plan_ahead(self) -> None:
        """Plans as many epochs, from this one on, as there is room for."""
        ahead = min(len(self._plan) // self.steps, self.phase.training.epochs - self.epoch)
        self._planned = range(self.epoch, self.epoch + ahead)
        purpose = (self._stage.index, self._index)
        training, seed, augmented = self.phase.training, self._learner.seed, self.phase.augment
        how = (self._planned, purpose, seed)
        plan = plan_epochs(training, self._engine.augmentation, self.rows, *how, augmented, self.phase.beside)
        self._plan.load(plan)
        if self._mixing is not None and self.phase.mix is not None:
            sizes = (self.steps, self.batch_size, self._last)
            self._mixing.load(plan_mixing(self.phase.mix, sizes, self._engine.image_size, *how))
        if self._around is not None:
            self._around.load(plan)
        self._counter.fill_(self.step)

    def _taker(self, size: int) -> Callable[[], list[str]]:
        """What takes a step with a batch of that size: recorded on a GPU, the step as it is elsewhere."""
        if size not in self._takers:
            phase, training = self.phase, self.phase.training
            recipe = (training.momentum, training.weight_decay, training.clip, training.clip_norm)
            acts = (phase.before_update, phase.after_step, phase.observe, phase.mix is None, phase.tether)
            neighbours = None if phase.neighbours is None else phase.neighbours.count
            how = (phase.train, phase.teacher, phase.frozen, *acts, neighbours, tuple(phase.weights))
            key = (phase.loss, *how, size, self.batch_size, recipe)
            step = partial(self._take_step, size)
            slot, what = ("phase", self._index, size), f"the {phase.name} phase"
            self._takers[size] = self._engine.record(slot, key, step, self._learner, what)
        return self._takers[size]

    def _take_step(self, size: int) -> list[str]:
        """One step with a batch of that size; the names of the loss's terms."""
        learner, phase, forward, counter = self._learner, self.phase, self._forward, self._counter
        seen = self._see(size)
        terms = phase.loss(seen)
        values = _values(terms, TERMS if self._pull is None else TERMS - 1, phase.name)
        forward.optimiser.zero_grad()
        values.sum().backward()
        names, values = list(terms), values.detach()
        with torch.no_grad():
            if self._pull is not None:
                names, values = [*names, PENALTY], torch.cat([values, self._pull.pull()])
            if phase.before_update is not None:
                phase.before_update(learner.network)
            forward.update(self._plan.learning_rate(counter), phase.training)
            if phase.after_step is not None:
                phase.after_step(learner.network)
                forward.follow()
            if self._pull is not None:
                self._pull.trace()
            if phase.observe is not None:
                phase.observe(learner.network, seen.student)
        self._history[:, : len(names)].index_copy_(0, counter, values[None])
        counter += 1
        return names

    def _see(self, size: int) -> Step:
        """What the loss sees of the batch that the counter is at."""
        learner, phase, forward, counter = self._learner, self.phase, self._forward, self._counter
        around = () if self._around is None else self._around.look(counter, size)
        images = forward.images(self._pool, self._plan, counter, size)
        cut = None if self._mixing is None else self._mixing.row(counter, size)
        if cut is not None:
            images = cut.paste(images, forward.height_at)
        if phase.frozen:
            look = partial(forward.frozen, images)
        else:
            look = partial(forward.student, images, train_backbone=Part.BACKBONE in phase.train)
        student, teacher = forward.with_teacher(images, look) if phase.teacher else (look(), None)
        rows = self._plan.rows.index_select(0, counter)[0, :size]
        labels, exemplar = self._pool.labels[rows], self._pool.exemplar[rows]
        mixed = None if cut is None else Mixed(labels[cut.partner], cut.share)
        where = (self._arrival, self._engine.space.stage, mixed)
        return Step(labels, exemplar, student, teacher, self._weights, learner.buffers, *where, *around)


def _values(terms: Terms, room: int, phase: str) -> Tensor:
    """The terms of a loss (K,), in their order; refuses what could not be minimised, for whoever writes a method."""
    if not isinstance(terms, Mapping) or not terms:
        raise EngramError(
            f"the loss of the {phase} phase gave {terms!r:.60}; it should give its terms by name, at least one, such "
            'as {"classification": ...}'
        )
    if len(terms) > room:
        raise EngramError(f"a loss may have {room} terms at most, and this one has {len(terms)}")
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.ndim:
            found = f"a tensor of the shape {tuple(term.shape)}" if isinstance(term, Tensor) else f"{term!r:.60}"
            raise EngramError(
                f"the term {name!r} of the {phase} phase is {found}; it should be a tensor with one number, such as a "
                "mean over the batch"
            )
    values = torch.stack([term.float() for term in terms.values()])
    if not values.requires_grad:
        raise EngramError(f"no term of the {phase} phase depends on what it trains, so there is nothing to learn")
    return values


def _look_first(terms: Mapping[str, float]) -> str:
    """What to do about terms that are not finite before the phase has moved anything."""
    wrong = " and ".join(repr(name) for name, value in terms.items() if not math.isfinite(value))
    return (
        f"it is the first step of the phase, so look at how {wrong} is computed (the logits of classes not yet seen "
        "are minus infinity) before trying a lower learning rate"
    )
