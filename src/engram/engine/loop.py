"""The loop of a phase: one step, built from the method's loss, repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from engram.contract.batch_plan import BatchPlan
from engram.contract.extension import StepHooks
from engram.contract.image_state import ImageStateRows
from engram.contract.learner import Learner
from engram.contract.phase import Phase, Step, Terms
from engram.contract.schedules import learning_rates
from engram.core.errors import EngramError
from engram.data.stage import Stage
from engram.engine.buffers import TERMS
from engram.engine.forward import Forward
from engram.engine.loss_history import Epoch, LossHistory
from engram.engine.planning import plan_epochs
from engram.engine.runtime import Runtime
from engram.engine.sharing import collect_output, collected_pass
from engram.nn.network import Part

T = TypeVar("T")

# On a GPU the host is at most STRIDE * STRIDES steps ahead: a request to stop is answered soon, and the driver's queue
# does not fill up, which would delay the launches of other runs.
STRIDE, STRIDES = 16, 4


@dataclass(frozen=True, eq=False)
class PhaseState:
    """Where a phase is: with the learner, enough to continue exactly.

    rows: the rows of the pool it trains on. optimiser: the tensors that the optimiser keeps (`FlatOptimiser.saved`).
    epoch, step: the next step. extensions: state of the extensions. terms: the loss terms (S, K) of the epoch's steps
    so far; None: unknown. image_state: the tensors kept per image of the pool.
    """

    rows: Tensor
    optimiser: dict[str, Tensor]
    epoch: int
    step: int
    extensions: dict[str, Tensor] = field(default_factory=dict)
    terms: Tensor | None = None
    image_state: dict[str, Tensor] = field(default_factory=dict)


class PhaseLoop:
    """The steps of one phase. Iterating takes them one by one; between two of them `state` can be saved.

    A step reads everything from tensors that keep their addresses (plan, counter, weights, buffers) and branches on
    nothing that changes, so that it can be recorded and replayed. On a GPU a step is only launched, and the device may
    be some steps behind; `terms` and `state` wait for it.
    """

    def __init__(
        self,
        runtime: Runtime,
        learner: Learner,
        stage: Stage,
        phase: Phase,
        index: int,
        resume: PhaseState | None,
        reads_maps: bool = True,
    ) -> None:
        if resume is None and phase.start is not None:
            phase.start()
        self.rows = phase.rows() if resume is None else resume.rows
        if len(self.rows) == 0:
            raise EngramError(f"stage {stage.index} has no image to train on in its {phase.name} phase")
        _, size, last = phase.batches(len(self.rows))
        if not phase.frozen and runtime.drops_last_image(learner.network, size, last):
            phase = replace(phase, training=replace(phase.training, remainder="drop"))
        self.phase = phase
        self.steps, self.batch_size, self._last = phase.batches(len(self.rows))
        self.epoch, self.step = (0, 0) if resume is None else (resume.epoch, resume.step)
        self._runtime, self._learner, self._stage, self._index = runtime, learner, stage, index
        self._processes, self._reads_maps = runtime.processes, reads_maps
        self._forward = runtime.bind(learner, self.batch_size)
        masks = learner.network.trainable(phase.train, stage.num_old)
        held = None if resume is None else resume.optimiser
        self._forward.optimiser.begin(masks, phase.training.optimiser, held)
        self._forward.refresh(phase.frozen)
        buffers = runtime.buffers
        if resume is not None and resume.image_state:
            stage.pool.state.update(resume.image_state)
            buffers.load_image_state(stage)
        self._plan = buffers.plan(self.steps, self.batch_size)
        context = _Context(self, runtime, self._forward)
        saved = {} if resume is None else resume.extensions
        attached = (extension.attach(context, saved) for extension in phase.extensions)
        self._hooks: list[StepHooks] = [hooks for hooks in attached if hooks is not None]
        self._mixing = [hooks for hooks in self._hooks if type(hooks).change_images is not StepHooks.change_images]
        parts = [self._part(size) for size in {self.batch_size, self._last}]
        self._pool = buffers.pool(stage, max(part.stop - part.start for part in parts))
        self._streams = _stream_slices(phase)
        self._weights, self._counter = buffers.weights(phase.weights), buffers.counter
        self._history, lr = buffers.history, learning_rates(phase.training, self.steps)
        self._losses = LossHistory(self._history, self.steps, lr, f"stage {stage.index}, phase {phase.name}")
        self._losses.continue_from(self.step, None if resume is None else resume.terms)
        self._arrival = buffers.arrival(stage, learner.network.head.capacity)
        self._planned = range(self.epoch, self.epoch)  # the epochs in the plan
        self._launched: deque[torch.cuda.Event] = deque()  # one every STRIDE steps
        self._taken = 0
        self._takers: dict[int, Callable[[], list[str]]] = {}  # by batch size
        self._feeding = ExitStack()  # the images of the plan, on their way to the device
        self._next_images: Callable[[], AbstractContextManager[None]] = nullcontext

    def __iter__(self) -> Iterator[None]:
        with self._learner.network.in_training(not self.phase.frozen), self._feeding:
            yield from self._take_steps()

    def _take_steps(self) -> Iterator[None]:
        while self.epoch < self.phase.training.epochs:
            if self.epoch not in self._planned:
                self._plan_ahead()
            first_row = (self.epoch - self._planned.start) * self.steps
            for hooks in self._hooks:
                hooks.before_epoch(first_row)
            self._counter.fill_(first_row + self.step)
            while self.step < self.steps:
                with self._next_images():
                    take = self._taker(self._last if self.step == self.steps - 1 else self.batch_size)
                    self._losses.names = take()
                self.step += 1
                if self._runtime.device.type == "cuda":
                    self._wait_for_device()
                if self.step == self.steps:
                    self._losses.end_epoch(self.epoch, first_row)
                yield
            self.epoch, self.step = self.epoch + 1, 0
            self._losses.continue_from(0, None)
        self._runtime.average_norms(self._learner.network)
        for hooks in self._hooks:
            hooks.finish()
        self._runtime.buffers.save_image_state(self._stage)

    def state(self) -> PhaseState:
        """Where the phase is now; raises NonFiniteLoss if the weights are worthless. Every process must call it."""
        self._runtime.average_norms(self._learner.network)
        self._losses.check_ended()
        terms = self._terms_so_far().clone()
        self._runtime.buffers.save_image_state(self._stage)
        return PhaseState(
            rows=self.rows,
            optimiser=self._forward.optimiser.saved(),
            epoch=self.epoch,
            step=self.step,
            extensions={name: value for hooks in self._hooks for name, value in hooks.state().items()},
            terms=terms,
            image_state={name: value.clone() for name, value in self._stage.pool.state.items()},
        )

    def terms(self) -> dict[str, float]:
        """The mean of each loss term over this epoch's steps so far. Waits for the device."""
        return self._losses.means(self._terms_so_far())

    def finished(self, wait: bool = False) -> Iterator[Epoch]:
        """The epochs that ended since the last call and whose loss has arrived; with `wait`, all of them.

        Raises NonFiniteLoss if a term was infinite or NaN.
        """
        return self._losses.finished(wait)

    def _terms_so_far(self) -> Tensor:
        """The terms (steps, terms) of this epoch's steps so far, on the CPU."""
        return self._losses.so_far(self.epoch, (self.epoch - self._planned.start) * self.steps, self.step)

    def _wait_for_device(self) -> None:
        """Wait until the device is at most some steps behind."""
        self._taken += 1
        if self._taken % STRIDE:
            return
        reached = torch.cuda.Event(blocking=True)
        reached.record()
        self._launched.append(reached)
        if len(self._launched) > STRIDES:
            self._launched.popleft().synchronize()

    def _plan_ahead(self) -> None:
        """Plan as many epochs, from this one on, as the plan can hold."""
        ahead = min(len(self._plan) // self.steps, self.phase.training.epochs - self.epoch)
        self._planned = range(self.epoch, self.epoch + ahead)
        plan = plan_epochs(
            self.phase.training,
            self._runtime.augmentation,
            self.rows,
            self._planned,
            (self._stage.index, self._index),
            self._learner.seed,
            self.phase.augment,
            self.phase.extensions,
            self._runtime.image_size,
            self._runtime.buffers.photographs is not None,
        )
        self._feeding.close()
        self._plan.load(plan)
        parts = [*[self._part(self.batch_size)] * (self.steps - 1), self._part(self._last)] * ahead
        feeding = self._runtime.buffers.feeding(self._stage, self._plan, plan, parts, self.step)
        self._next_images = self._feeding.enter_context(feeding)
        for hooks in self._hooks:
            hooks.load_plan(plan, self._planned)

    def _taker(self, size: int) -> Callable[[], list[str]]:
        """The function that takes a step with a batch of that size: recorded on a GPU."""
        if size not in self._takers:
            slot, key = ("phase", self._index, size), (self.phase.recording_key(), size, self.batch_size)
            step, what = partial(self._take_step, size), f"the {self.phase.name} phase"
            self._takers[size] = self._runtime.record(slot, key, step, self._learner, what)
        return self._takers[size]

    def _take_step(self, size: int) -> list[str]:
        """Take one step with a batch of that size; return the names of the loss's terms."""
        phase, forward, counter = self.phase, self._forward, self._counter
        step = self._see(size)
        terms = phase.loss(step)
        values = _stack_terms(terms, TERMS - len(self._hooks), phase.name)
        forward.optimiser.zero_grad()
        names, values = list(terms), self._backward(values, size)
        with torch.no_grad():
            for hooks in self._hooks:
                further = hooks.after_backward()
                if further:
                    names = [*names, *further]
                    values = torch.cat([values, *(term.view(1) for term in further.values())])
            forward.update(self._plan.learning_rate(counter), phase.training)
            changed = [hooks.after_update(step.student) for hooks in self._hooks]
            if any(changed):
                forward.follow()
            if step.images.written and self._is_of_part(size):
                raise EngramError(
                    f"the loss of the {phase.name} phase keeps tensors per image, so several processes must compute it "
                    "of the whole batch; remove mean_over_images from it"
                )
            for name, (rows, written) in step.images.written.items():
                self._pool.state[name].index_copy_(0, rows, written)
        self._history[:, : len(names)].index_copy_(0, counter, values[None])
        counter += 1
        return names

    def _is_of_part(self, size: int) -> bool:
        """Whether this process computes the loss of its own part of a batch of that size only."""
        return self.phase.splits and self._processes.share(size).is_split

    def _backward(self, values: Tensor, size: int) -> Tensor:
        """The gradients of the whole batch's loss, from the terms (K,) that this process has; return its terms."""
        processes = self._processes
        if processes.count == 1:
            values.sum().backward()
            return values.detach()
        share = processes.share(size)
        part = share.count / size if self._is_of_part(size) else 1 / processes.count
        # The loss of all images, of outputs that were collected, has in each process its own images' whole gradient.
        is_collected = share.is_split and not self._is_of_part(size)
        (values.sum() if is_collected else part * values.sum()).backward()
        return self._forward.optimiser.sum_over(processes, part * values.detach())

    def _part(self, size: int) -> slice:
        """The images of a batch of that size that this process reads: its own, or all, if an extension mixes them."""
        return slice(0, size) if self._mixing else self._processes.share(size).own

    def _images(self, size: int) -> Tensor:
        """The augmented images of the batch that the counter is at, of which this process takes its part."""
        phase, forward, share = self.phase, self._forward, self._processes.share(size)
        if share.is_split and not self._mixing:
            own = self._plan.part(self._counter, share.own)
            return forward.images(self._pool, own, self._runtime.buffers.first_step, share.count, phase.augment)
        images = forward.images(self._pool, self._plan, self._counter, size, phase.augment)
        for hooks in self._mixing:
            images = hooks.change_images(images)
        return images[share.own] if share.is_split else images

    def _see(self, size: int) -> Step:
        """The input of the loss for the batch that the counter is at."""
        phase, forward, counter, pool = self.phase, self._forward, self._counter, self._pool
        share = self._processes.share(size)
        for hooks in self._hooks:
            hooks.before_forward(size)
        images = self._images(size)
        if phase.frozen:
            student_pass = partial(forward.frozen, images)
        else:
            student_pass = partial(forward.student, images, train_backbone=Part.BACKBONE in phase.train)
        with self._runtime.synchronised(share):
            student, teacher = forward.with_teacher(images, student_pass) if phase.teacher else (student_pass(), None)
        rows, streams = self._plan.rows.index_select(0, counter)[0, :size], self._streams
        if self._is_of_part(size):
            rows, streams = rows[share.own], {}  # a part has no order of streams
        elif share.is_split:
            student = collect_output(self._processes, share, student, self._reads_maps)
            teacher = teacher and collect_output(self._processes, share, teacher, self._reads_maps)
        labels = pool.labels[rows]
        extras = (hooks.step_extras(labels) for hooks in self._hooks)
        return Step(
            labels,
            pool.exemplar[rows],
            student,
            teacher,
            self._weights,
            self._learner.buffers,
            arrival=self._arrival,
            stage=self._runtime.buffers.stage,
            images=ImageStateRows(pool.state, rows, pool.ids),
            streams=streams,
            extras=tuple(extra for extra in extras if extra is not None),
        )


class _Context:
    """The PhaseContext of a phase: the parts of the engine that its extensions may use."""

    def __init__(self, loop: PhaseLoop, runtime: Runtime, forward: Forward) -> None:
        self._runtime, self._forward = runtime, forward
        self.learner, self.stage, self.index = loop._learner, loop._stage, loop._index
        self.training, self.num_images = loop.phase.training, len(loop.rows)
        self.steps, self.batch_size, self.last_batch = loop.steps, loop.batch_size, loop._last
        self.image_size, self.height_dim = runtime.image_size, forward.height_dim
        self.counter, self.plan, self.parameters = runtime.buffers.counter, loop._plan, forward.optimiser
        self.device, self.persistent_buffer = runtime.device, runtime.buffers.persistent_buffer
        # Hooks have the whole batch, of which each process passes a part.
        self.teacher = collected_pass(runtime.processes, forward.teacher)
        self.predict = collected_pass(runtime.processes, forward.predict)
        self._strong = loop.phase.augment

    def images(self, plan: BatchPlan, size: int) -> Tensor:
        return self._forward.images(self._runtime.buffers.pool(self.stage), plan, self.counter, size, self._strong)

    def record(self, name: str, key: Hashable, step: Callable[[], T]) -> Callable[[], T]:
        return self._runtime.record((name, self.index, key), (name, key), step, self.learner, f"the {name}")


def _stream_slices(phase: Phase) -> dict[str, slice]:
    """The part of a batch that each stream fills; "main" is the phase's own rows, which come last."""
    slices, start = {}, 0
    for name, count in phase.streams:
        slices[name] = slice(start, start + count)
        start += count
    return slices | {"main": slice(start, None)}


def _stack_terms(terms: Terms, most: int, phase: str) -> Tensor:
    """The terms of a loss (K,), in their order; refuses what could not be minimised."""
    if not isinstance(terms, Mapping) or not terms:
        raise EngramError(
            f"the loss of the {phase} phase returned {terms!r:.60}; it should return its terms by name, at least one, "
            'such as {"classification": ...}'
        )
    if len(terms) > most:
        raise EngramError(f"a loss may have {most} terms at most, but this one has {len(terms)}")
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
