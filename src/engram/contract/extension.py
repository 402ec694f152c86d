"""Extensions of a phase: what one family of methods adds to a training step, in one place.

An extension is a frozen dataclass in a phase's `extensions`. It carries its plan (further images of a batch), its hooks
(`attach`), its cost (for estimates of the time left) and its recording key. The key is by default the extension itself,
so a field cannot be forgotten in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from engram.contract.batch_plan import BatchPlan
from engram.contract.learner import Learner
from engram.contract.settings import Training
from engram.core.errors import EngramError
from engram.data.stage import Stage
from engram.nn.network import Network, Output

Terms = dict[str, Tensor]
T = TypeVar("T")


class FlatParameters(Protocol):
    """All parameters of a network as one flat tensor, and their gradients as another."""

    values: Tensor
    gradients: Tensor

    @property
    def names(self) -> list[str]:
        """The parameters' names."""
        ...

    def persistent_buffer(self, name: str) -> Tensor:
        """A further flat tensor, zeros at first, whose address never changes."""
        ...

    def fill(self, flat: Tensor, by_name: Mapping[str, Tensor]) -> None:
        """Copy values by parameter into a flat tensor."""
        ...

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor split by parameter (copies)."""
        ...


class PhaseContext(Protocol):
    """The part of the engine that the hooks of an extension may use. Tensors that a step reads keep their addresses.

    index: number of the phase in its stage. num_images: images in the phase's rows. steps, batch_size, last_batch: of
    an epoch. counter: (1,) int64, the row of the plan that the step is at. height_dim: dimension of a batch of images
    that is their height; the width is the next.
    """

    learner: Learner
    stage: Stage
    training: Training
    index: int
    num_images: int
    steps: int
    batch_size: int
    last_batch: int
    image_size: tuple[int, int]
    height_dim: int
    counter: Tensor
    plan: BatchPlan
    device: torch.device

    @property
    def parameters(self) -> FlatParameters: ...

    def persistent_buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor whose address stays the same from stage to stage, with at least as many rows as `shape`."""
        ...

    def images(self, plan: BatchPlan, size: int) -> Tensor:
        """The first `size` images of the plan's row that the counter is at, augmented."""
        ...

    def teacher(self, images: Tensor) -> Output:
        """Output of the teacher, without gradient."""
        ...

    def predict(self, images: Tensor) -> Output:
        """Output of the network with its running statistics, which it leaves unchanged; without gradient."""
        ...

    def record(self, name: str, key: Hashable, step: Callable[[], T]) -> Callable[[], T]:
        """The step, recorded as a CUDA graph where that is possible."""
        ...


class StepHooks:
    """Hooks of an extension in one phase. Every hook does nothing by default."""

    def load_plan(self, plan: BatchPlan, epochs: range) -> None:
        """Called on the CPU with the plan of the next epochs, before their first step."""

    def before_epoch(self, first_row: int) -> None:
        """Called before each epoch; first_row: the plan's row of its first step. May move the counter."""

    def before_forward(self, size: int) -> None:
        """Called in each step before the network sees the batch."""

    def change_images(self, images: Tensor) -> Tensor:
        """Change the augmented batch."""
        return images

    def step_extras(self, labels: Tensor) -> Any:
        """An object for the loss, which finds it by its type: `step.extra(kind)`; None for nothing."""
        return None

    def after_backward(self) -> Terms:
        """Change the gradients before the update; return further loss terms to log."""
        return {}

    def after_update(self, student: Output) -> bool:
        """Called after each update. Return whether it changed parameters."""
        return False

    def state(self) -> dict[str, Tensor]:
        """State of the phase, to be saved and passed to `attach` when the phase is resumed."""
        return {}

    def finish(self) -> None:
        """Called when the phase has ended."""


@dataclass(frozen=True)
class Extension:
    """Base class of extensions.

    needs_teacher: only a phase with a teacher can have it.
    needs_all_images: it calls `PhaseContext.images` with a plan of its own, so all images must be on the device.
    works_on_parts: its hooks do not use the images, labels and outputs of a batch, so each of several processes may
        compute the loss of its own part. If not, hooks and loss get the whole batch in every process.
    """

    needs_teacher: ClassVar[bool] = False
    needs_all_images: ClassVar[bool] = False
    works_on_parts: ClassVar[bool] = False

    def recording_key(self) -> Hashable:
        """The key of a recorded step. Two extensions with equal keys may share a recording."""
        return self

    def cost(self) -> float:
        """Additional cost of an image, relative to training on it without a teacher."""
        return 0.0

    def stream(self) -> tuple[str, int] | None:
        """Name of an additional stream of images, and its images in each batch; None for no stream."""
        return None

    def stream_rows(self, epochs: range, steps: int, purpose: tuple[str | int, ...], seed: int) -> Tensor:
        """The pool rows (S, images) of the stream in all steps of these epochs; needed if `stream` is defined."""
        raise EngramError(
            f"{type(self).__name__} adds a stream of images, but does not say which; define stream_rows(epochs, steps, "
            "purpose, seed) in it, which returns a row of the pool for each step and image (example: SecondStream)"
        )

    def attach(self, context: PhaseContext, state: Mapping[str, Tensor]) -> StepHooks | None:
        """Return the hooks for a phase; state: what `StepHooks.state` returned, if the phase is resumed."""
        return None


@dataclass(frozen=True)
class AfterUpdate(Extension):
    """Changes parameters in place after each update, such as a clamp."""

    works_on_parts = True

    change: Callable[[Network], None]

    def attach(self, context: PhaseContext, state: Mapping[str, Tensor]) -> StepHooks:
        return _AfterUpdateHooks(self.change, context.learner.network)


class _AfterUpdateHooks(StepHooks):
    def __init__(self, change: Callable[[Network], None], network: Network) -> None:
        self._change, self._network = change, network

    def after_update(self, student: Output) -> bool:
        self._change(self._network)
        return True
