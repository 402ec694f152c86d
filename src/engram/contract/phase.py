"""Phase and Step: one training loop inside a stage, and what its loss sees of one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, TypeVar

from torch import Tensor

from engram.contract.extension import Extension, Terms
from engram.contract.image_state import ImageStateRows
from engram.contract.settings import Training
from engram.nn.network import Output, Part

T = TypeVar("T")
LossT = TypeVar("LossT", bound=Callable[..., Terms])

_MEAN = "_is_mean_over_images"


def mean_over_images(loss: Callable[..., Terms] | None = None, *, unless: str | None = None) -> Any:
    """A decorator of a loss (a function, or the `__call__` of a class): each term is a mean over the batch's images.

    That is, a mean over all images of a value that depends on one image, or a value that depends on none. A mean over
    some of the images, such as the exemplars, is something else. If several processes share a batch, each then computes
    the loss of its own images. A loss without this mark gets the outputs for all images in every process, which is
    right for any loss, and slower. A subclass that overrides the loss marks its own, or not.

    unless: the name of a setting of the method; where it is true, the loss is not such a mean.
    """

    def decorate(function: LossT) -> LossT:
        setattr(function, _MEAN, unless or True)
        return function

    return decorate if loss is None else decorate(loss)


def is_mean_over_images(loss: Callable[..., Terms]) -> bool:
    """Whether a loss is marked by `mean_over_images`."""
    marked = getattr(loss, _MEAN, None) or getattr(type(loss).__call__, _MEAN, None)
    if isinstance(marked, str):
        return not getattr(loss.__self__.settings, marked)  # pyright: ignore[reportFunctionMemberAccess]
    return marked is True


@dataclass(frozen=True)
class Step:
    """The input of a loss in one training step: tensors of fixed shapes.

    labels: (B,). exemplar: (B,) bool, true for images of the memory. teacher: None in phases without one. weights: the
    phase's loss weights by name, (). buffers: the method's tensors in the learner, by name. arrival: (K,), the stage
    that each class came with, NEVER for a class that has not come. stage: (), the current stage. images: which images
    these are (`images.ids`) and the tensors kept for each (`Method.image_state`). streams: which part of the batch is
    from which stream; "main" is the phase's own rows.
    """

    labels: Tensor
    exemplar: Tensor
    student: Output
    teacher: Output | None
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    _: KW_ONLY
    arrival: Tensor | None = None
    stage: Tensor | None = None
    images: ImageStateRows = field(default_factory=ImageStateRows)
    streams: Mapping[str, slice] = field(default_factory=lambda: {"main": slice(None)})
    extras: tuple[Any, ...] = ()

    @property
    def old(self) -> Tensor:
        """(K,) bool, the columns of the classes that came before this stage."""
        assert self.arrival is not None
        assert self.stage is not None
        return self.arrival < self.stage

    @property
    def new(self) -> Tensor:
        """(K,) bool, the columns of this stage's new classes."""
        assert self.arrival is not None
        assert self.stage is not None
        return self.arrival == self.stage

    def extra(self, kind: type[T]) -> T | None:
        """The object of that type that an extension of the phase added (`StepHooks.step_extras`)."""
        return next((each for each in self.extras if isinstance(each, kind)), None)


# Fields that only matter before a step, or that a step reads from tensors.
_PLANNED = {"key": lambda _: None}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One training loop inside a stage.

    Parameters
    ----------
    images: the number of rows, for plans made in advance.
    rows: returns the rows of the stage's pool to train on; called when the phase starts, after the phases before it.
    loss: returns named terms, whose sum is minimised.
    train: the parts of the network that are trained.
    teacher: the loss sees the teacher's output.
    weights: loss weights by name; they may change from stage to stage.
    augment: images are cropped, mirrored and brightened at random, else used unchanged.
    frozen: the network runs with its running statistics, and only the head can be trained.
    start: called when the phase starts, before `rows`, and not again when the phase is resumed.
    extensions: what else a step does.
    """

    name: str = field(metadata=_PLANNED)
    images: int = field(metadata=_PLANNED)
    rows: Callable[[], Tensor] = field(metadata=_PLANNED)
    loss: Callable[[Step], Terms]
    train: Part
    training: Training = field(metadata={"key": Training.in_step})
    teacher: bool = False
    weights: Mapping[str, float] = field(default_factory=dict, metadata={"key": tuple})
    augment: bool = field(default=True, metadata=_PLANNED)
    frozen: bool = False
    start: Callable[[], None] | None = field(default=None, metadata=_PLANNED)
    extensions: tuple[Extension, ...] = field(
        default=(), metadata={"key": lambda extensions: tuple(each.recording_key() for each in extensions)}
    )

    def __post_init__(self) -> None:
        assert not (self.frozen and Part.BACKBONE in self.train), "a frozen network's backbone cannot train"
        for each in self.extensions:
            assert self.teacher or not each.needs_teacher, f"{type(each).__name__} needs a teacher"

    def recording_key(self) -> Hashable:
        """The key of a recorded step of this phase: every field except those marked as planned."""
        keys = ((each.metadata.get("key"), getattr(self, each.name)) for each in fields(self))
        return tuple(value if key is None else key(value) for key, value in keys)

    @property
    def streams(self) -> list[tuple[str, int]]:
        """Name and images per batch of every additional stream, in the order of the batch."""
        return [stream for each in self.extensions if (stream := each.stream()) is not None]

    @property
    def splits(self) -> bool:
        """Whether each of several processes computes the loss of its own images only; else, of the whole batch."""
        return is_mean_over_images(self.loss) and all(each.works_on_parts for each in self.extensions)

    def batches(self, images: int) -> tuple[int, int, int]:
        """Steps of an epoch over that many images, images in a batch and in the last batch; all streams counted."""
        steps, size = self.training.batches(images)
        extra = sum(count for _, count in self.streams)
        return steps, size + extra, min(size, images - (steps - 1) * size) + extra
