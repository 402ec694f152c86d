"""The contract between a method and the engine, and the registry of methods.

A method describes; the engine executes. A method never owns an optimiser of the network, a loader, a device, a file or
a progress bar.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from engram.contract.batches import Beside, CutMix, Mixed
from engram.contract.exemplars import choose_exemplars
from engram.contract.learner import Learner
from engram.contract.look import Look
from engram.contract.registering import check_choices, check_class, check_name, check_predictors, check_settings
from engram.contract.settings import Settings, Training
from engram.core.errors import EngramError, suggest
from engram.core.provenance import user_code_versions
from engram.data.memory import Selection
from engram.data.stage import Samples, Stage
from engram.nn.backbones import ResNet
from engram.nn.heads import Head
from engram.nn.network import Network, Output, Part

Terms = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """What a loss sees of one training step: tensors only, at fixed shapes.

    labels: (B,). exemplar: (B,) bool, true for images out of the memory. teacher: None in phases without one.
    weights: the phase's loss weights by name, (). buffers: the method's tensors by name, as kept in the learner.
    arrival: (K,), the stage that each class came with, NEVER where it has not come. stage: (), the stage at hand.
    mixed: in phases that mix images, what else is in each.
    neighbours: (B, N, K), in phases that ask for them the logits of each image's neighbours, without gradient. shares:
    (B, N), what each of them counts: 1 / N, or 0 where there is no such neighbour and the others the more.
    """

    labels: Tensor
    exemplar: Tensor
    student: Output
    teacher: Output | None
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    arrival: Tensor | None = None
    stage: Tensor | None = None
    mixed: Mixed | None = None
    neighbours: Tensor | None = None
    shares: Tensor | None = None

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


# The learner's buffers of a Tether, each with the parameter's name after it.
OMEGA, ANCHOR, PATH = "omega.", "anchor.", "path."


@dataclass(frozen=True)
class Tether:
    """Ties the parameters to where they stood: factor * sum omega (theta - anchor)^2 on top of the loss.

    omega and anchor are the learner's buffers OMEGA and ANCHOR, one of each a parameter, in its shape; an omega above
    the ceiling counts as the ceiling. The penalty is part of the loss: its gradient is added before gradients are
    clamped, and its value is the term "penalty". traced: what each parameter's way takes off the loss is summed over
    the steps of the phase, -gradient * movement with the gradient of the loss without the penalty; when the phase has
    ended the sums are the buffers PATH.
    """

    factor: float
    ceiling: float = math.inf
    traced: bool = False


@dataclass(frozen=True)
class Neighbours:
    """The images that are near an image to the teacher's eye, among those of the new classes in the same epoch.

    count: of each image. first: looked for among the first so many images of new classes, None for all.
    """

    count: int
    first: int | None = None


@dataclass(frozen=True)
class Phase:
    """One training loop inside a stage.

    rows gives the rows of the stage's pool to train on; it is asked when the phase starts, after the phases before.
    images is how many they will be, for plans made beforehand. loss returns named terms, whose sum is minimised.
    train says which parts of the network move. augment: whether images are cropped, mirrored and brightened at random,
    or taken as they are. frozen: the network runs as in evaluation, with its running statistics; the backbone cannot
    train then. after_step: changes the network's parameters in place after each update, as in a clamp. start: an act on
    the learner when the phase starts, before rows is asked, and not again when it is resumed. beside: a second stream
    of images in each batch. mix: images with boxes of others in them; the loss finds their labels in Step.mixed.
    tether: holds parameters near where they stood. older_backbones: how many frozen ones run beside the network's
    newest, for estimates of the time. before_update: changes the gradients in place before each update.
    neighbours: before each epoch every image's neighbours are found, and the loss sees their logits. observe: keeps
    track, in the network's own buffers, of what the student said of each batch.
    """

    name: str
    images: int
    rows: Callable[[], Tensor]
    loss: Callable[[Step], Terms]
    train: Part
    training: Training
    teacher: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    augment: bool = True
    frozen: bool = False
    after_step: Callable[[Network], None] | None = None
    start: Callable[[], None] | None = None
    beside: Beside | None = None
    mix: CutMix | None = None
    tether: Tether | None = None
    older_backbones: int = 0
    before_update: Callable[[Network], None] | None = None
    neighbours: Neighbours | None = None
    observe: Callable[[Network, Output], None] | None = None

    def __post_init__(self) -> None:
        assert not (self.frozen and Part.BACKBONE in self.train), "a frozen network's backbone cannot train"
        assert not (self.frozen and self.after_step), "a frozen network's backbone cannot change"
        assert not (self.frozen and self.neighbours), "a frozen network has no neighbours to look at"
        assert self.teacher or not self.neighbours, "neighbours are found by the teacher"

    def batches(self, images: int) -> tuple[int, int, int]:
        """The steps of an epoch over so many images, and the images in a batch and in the last; both streams' count."""
        steps, size = self.training.batches(images)
        beside = 0 if self.beside is None else self.beside.batch_size
        return steps, size + beside, min(size, images - (steps - 1) * size) + beside


class Passes(Protocol):
    """What a method may ask of the engine outside a training loop."""

    def embed(self, network: Network, images: Tensor, mirror: bool = False) -> Tensor:
        """Embeddings (N, D) of uint8 images (N, H, W, 3), in eval mode, not normalised."""
        ...

    def sweep(
        self,
        learner: Learner,
        stage: Stage,
        rows: Tensor,
        visit: Callable[[Step], Sequence[Tensor]],
        batch_size: int,
    ) -> list[Tensor]:
        """The sums of what `visit` returns over one augmented pass in train mode; no parameter moves."""
        ...

    def sensitivity(
        self,
        learner: Learner,
        stage: Stage,
        rows: Tensor,
        objective: Callable[[Step, Tensor], Tensor],
        power: Literal[1, 2],
    ) -> dict[str, Tensor]:
        """For each parameter the mean over the images of |gradient|^power, each image's gradient taken by itself.

        The network is in eval mode, the images are as they are in evaluation. objective: from a Step and a uniform
        random number an image (B,), the same whatever the batches, to a value an image (B,). The head is a LinearHead,
        CosineHead or LSCHead as it is there, without a correction or an effect; others are refused.
        """
        ...

    def tune(
        self,
        learner: Learner,
        stage: Stage,
        images: Tensor,
        rows: Tensor,
        objective: Callable[[Look], Tensor],
        training: Training,
        purpose: str,
    ) -> Tensor:
        """The uint8 images (N, H, W, 3) after SGD on their pixels, as floats; the network stands still, in eval mode.

        A step sees a batch of the pool's rows, augmented; rate, momentum and decay are of pixels as the network sees
        them, normalised. purpose names what is random about it.
        """
        ...


SettingsT = TypeVar("SettingsT", bound=Settings)
_MADE = "_made"  # the attribute of a method that says that it has all the others


class Method(ABC, Generic[SettingsT]):
    """What a method says of itself. Subclasses are final.

    predictors: how it predicts, by "nme" only with exemplars; the first is the one its recipes report. taught: whether
    any of its phases has a teacher; where not, none is kept. class_buffers: those of its tensors in the learner whose
    first dimension is the class, for a class that is removed. told_buffers: how the names of those begin that go into
    the file of a stage.

    Once made it does not change: what a stage leaves for the next goes into the learner (`Learner.store`), which is
    what a checkpoint has.
    """

    predictors: tuple[str, ...] = ("cnn", "nme")
    taught: bool = True
    class_buffers: tuple[str, ...] = ()
    told_buffers: tuple[str, ...] = ()

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, _MADE, False):
            raise EngramError(
                f"{type(self).__name__} changes its attribute {name!r} after it was made, which a resumed run would "
                "not know of; keep a tensor with learner.store(name, tensor), and the loss finds it in step.buffers"
            )
        super().__setattr__(name, value)

    def backbone(self, backbone: ResNet) -> ResNet:
        """The backbone as the method wants it, made of the one that the run is set to; that very one by default."""
        return backbone

    @abstractmethod
    def head(self, dim: int, capacity: int) -> Head:
        """A new head over embeddings of that size with room for so many classes."""

    @abstractmethod
    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Opens the head's rows for the stage's new classes."""

    @abstractmethod
    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """The training loops of the stage, in order.

        It is also asked for a plan, several times before anything is learned: then the learner has nothing of the
        method's, and the stage's images are empty. So it counts nothing and looks at no image; a phase's `rows` and
        `start` are for that, and the loss has the learner's tensors in `step.buffers`.
        """

    def base_key(self) -> dict[str, Any] | None:
        """What of the settings determines how the base stage trains, so that runs that agree in it can share one.

        None: the base stage is not shared. Among methods it is by those alone that `register` is told `shares_base` of.
        """
        return None

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """What the method computes for the next stage once this one is trained; nothing by default."""

    def exemplars(self, learner: Learner, stage: Stage, passes: Passes) -> Mapping[int, Tensor | Samples]:
        """What to keep of each new class, best first: rows of the pool, by default as the memory's selection says.

        Images of the method's own making may be given instead, of old classes too.
        """
        return choose_exemplars(learner, stage, passes)


@dataclass(frozen=True)
class MethodInfo:
    """A registered method: how to make it and what to tell of it.

    versions: for run.json, of a method from outside the package: its file's name, and a digest of its code.
    """

    name: str
    title: str
    paper: str
    memory: Literal["needed", "none", "all", "optional"]
    predictors: tuple[str, ...]
    settings: type[Settings]
    kind: type[Method]
    selection: Selection = "herding"
    brightened: bool = True
    shares_base: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    def make(self, settings: Settings) -> Method:
        """The method with these settings, which does not change from here on."""
        method = self.kind(settings)
        object.__setattr__(method, _MADE, True)
        return method

    def base_key(self, method: Method) -> dict[str, Any] | None:
        """The method's base_key, with this name in it unless methods share it; None: the base stage is not shared."""
        key = method.base_key()
        return key if key is None or self.shares_base else {**key, "method": self.name}


METHODS: dict[str, MethodInfo] = {}
# What an error says of a name that is not among them.
OWN_METHODS = "(one of your own: import its module first, for a command by ENGRAM_METHODS=FILE.py)"

MethodT = TypeVar("MethodT", bound=Method)


def register(
    name: str,
    *,
    settings: type[Settings],
    title: str,
    paper: str = "",
    memory: Literal["needed", "none", "all", "optional"] = "needed",
    selection: Selection = "herding",
    brightened: bool = True,
    shares_base: bool = False,
) -> Callable[[type[MethodT]], type[MethodT]]:
    """A class decorator that makes a method known by name: lower-case letters, digits and single dashes.

    memory says what the method is defined with: a budget of exemplars, none, every image, or ("optional") a budget or
    none, with none in its recipes; selection, how its recipes choose them; brightened, whether they change the
    brightness of images, as AFC's do; shares_base, that head, growth and training are its host's in the base stage,
    which may then be one that another such method trained.
    """

    def decorate(cls: type[MethodT]) -> type[MethodT]:
        check_name(name)
        if name in METHODS:
            raise EngramError(f"a method named {name!r} is registered already ({METHODS[name].kind.__qualname__})")
        check_class(name, cls, Method)
        check_settings(name, settings)
        check_choices(name, memory, selection)
        check_predictors(name, cls, cls.predictors, memory)
        # The versions now: what is edited later is not what runs.
        told = (selection, brightened, shares_base, user_code_versions(cls))
        METHODS[name] = MethodInfo(name, title, paper, memory, cls.predictors, settings, cls, *told)
        return cls

    return decorate


def find_method(name: str) -> MethodInfo:
    """The registered method of that name."""
    if name not in METHODS:
        raise EngramError(f"no method {name!r}: {suggest(name, METHODS)} {OWN_METHODS}")
    return METHODS[name]
