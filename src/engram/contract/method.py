"""Method: what a method declares. The engine executes it.

A method never owns an optimiser of the network, a loader, a device, a file or a progress bar.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic

from torch import Tensor

from engram.contract.exemplars import choose_exemplars
from engram.contract.image_state import ImageTensor
from engram.contract.learner import Learner
from engram.contract.passes import Passes
from engram.contract.phase import Phase
from engram.contract.settings import SettingsT, base_settings
from engram.core.errors import EngramError, described
from engram.core.rng import generator
from engram.data.stage import Samples, Stage
from engram.nn.backbone import Backbone
from engram.nn.heads import Head
from engram.nn.network import Network
from engram.nn.views import View


class Method(ABC, Generic[SettingsT]):
    """A method of class-incremental learning. Subclasses are final.

    predictors: how it predicts: "cnn", "nme" (needs exemplars), or names given to `register_predictor`. Its recipes
        report the first.
    uses_teacher: whether any phase has a teacher; if not, none is kept.
    class_buffers: names of its tensors in the learner that have one row per row of the head. They grow with the head
        (new rows are zero) and lose the rows of removed classes.
    logged_buffers: prefixes of the names of its tensors that are saved with each stage's results.
    image_state: tensors that are kept for each image, by name.
    returning_classes: whether later stages may bring new images of old classes: rows of the pool that are no exemplars.
    keeps_statistics: whether it keeps statistics of each class from which the head can be computed exactly (`solve`).
        Then new images of a known class are added to its statistics, and `remove` takes classes out of the head.
    unbalanced_memory: whether the memory may hold more exemplars of some classes than of others, or none of a class.
    needs_maps: whether it reads feature maps, so that it needs a backbone that has some.
    needs_pooled_map: whether it needs a backbone whose embedding is the mean of its last map.
    changes_images: whether its `exemplars` may return changed images; then they are not those of the files any longer.
    needs_image_gradients: whether it uses `Passes.sensitivity`, which not every layer supports.
    confidence_margin: how far calibration leaves the mean confidence on held-out images below their accuracy, as a
        share: they are often easier than the images to come.
    family: names the head, growth and training of the base stage, for `base_key`; None: the base stage is not shared.

    A method is immutable. What a stage leaves for the next goes into the learner (`Learner.store`), which is what a
    checkpoint holds.
    """

    predictors: tuple[str, ...] = ("cnn", "nme")
    uses_teacher: bool = True
    class_buffers: tuple[str, ...] = ()
    logged_buffers: tuple[str, ...] = ()
    image_state: Mapping[str, ImageTensor] = MappingProxyType({})
    returning_classes: bool = False
    keeps_statistics: bool = False
    unbalanced_memory: bool = False
    needs_maps: bool = False
    needs_pooled_map: bool = False
    changes_images: bool = False
    needs_image_gradients: bool = False
    confidence_margin: float = 0.0
    family: str | None = None

    _is_made = False

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made:
            raise EngramError(
                f"{type(self).__name__} changes its attribute {name!r} after it was made, but a resumed run would "
                "not know of it; keep a tensor with learner.store(name, tensor), and the loss finds it in step.buffers"
            )
        super().__setattr__(name, value)

    def seal(self) -> None:
        """Refuse changes of attributes from now on."""
        object.__setattr__(self, "_is_made", True)

    def backbone(self, backbone: Backbone) -> Backbone:
        """The backbone for this method, made from the one of the configuration; unchanged by default.

        Refuse a backbone that the method cannot use here, before anything is trained.
        """
        return backbone

    @abstractmethod
    def head(self, dim: int, capacity: int) -> Head:
        """A new head over embeddings of that size, for up to that many classes."""

    def network(self, backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]) -> Network:
        """The network; a subclass of Network for a method that changes how parameters are trained."""
        return Network(backbone, head, mean, std)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Open the head's rows for the stage's new classes; by default with random values."""
        learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    @abstractmethod
    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """The training loops of the stage, in order; an empty list if nothing is trained.

        Also called to plan a run, several times before anything is learned: then the learner holds nothing of the
        method, and the stage's images are empty. So it may use labels and sizes only. A phase's `rows` and `start` are
        called when the phase begins, and the loss finds the learner's tensors in `step.buffers`.
        """

    def base_key(self) -> dict[str, Any] | None:
        """The settings that determine the base stage: runs that agree in them can share one. None: it is not shared."""
        return None if self.family is None else {"family": self.family, **base_settings(self.settings)}

    def feature_views(self) -> tuple[View, ...]:
        """The views of the new images that the features for `fit` are averaged over; none: `fit` is not called."""
        return ()

    def fit(self, learner: Learner, stage: Stage, features: Tensor, labels: Tensor) -> None:
        """Called after the training of a stage, with the features of all its images except exemplars.

        The engine computes them once, batch by batch, with progress and checkpoints.

        features: (N, D'), the mean of `Head.input_features` over the views. labels: (N,).
        """

    def solve(self, learner: Learner, features: Tensor | None = None, labels: Tensor | None = None) -> None:
        """Set the head to the solution of the statistics that the method keeps, if it keeps some.

        features, labels: of further images, as for `fit`; they count in this solution and are not kept.
        """

    def class_centres(
        self, learner: Learner, features: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor | None:
        """Return the means (K, D') of the classes' features, if the method keeps them; they help to tell strangers.

        features, labels: of further images, as for `solve`.
        """
        return None

    def remove(self, learner: Learner, labels: Sequence[int]) -> None:
        """Called after classes were removed from the learner (`Learner.drop`), if the method keeps statistics.

        labels: their labels before the removal. Now the head has only the rows of the other classes.
        """

    def merge(self, learner: Learner, label: int, into: int) -> None:
        """Count the images of a class as images of another, if the method keeps statistics; then `remove` is called."""

    def relabel(self, learner: Learner, features: Tensor, before: Tensor, after: Tensor | None) -> None:
        """Count images that were learned as images of other classes, exactly; None takes them out of the statistics.

        Called for methods that keep statistics, which may refuse it: then nothing changed. The head is set by `solve`.

        features: (N, D'), as for `fit`. before, after: (N,), labels.
        """
        raise EngramError(
            "its method keeps statistics from which single images cannot be taken out; remove the class, and learn it "
            "again from the other images"
        )

    def check_buffers(self, learner: Learner, buffers: Mapping[str, Tensor]) -> None:
        """Refuse tensors of a saved model that the method cannot have kept, if it keeps statistics.

        They may be damaged, or come from somebody who means harm. learner: as it was saved. buffers: those to check.
        """

    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Called after the training of a stage, to compute what the next stage needs; nothing by default."""

    def exemplars(self, learner: Learner, stage: Stage, passes: Passes) -> Mapping[int, Tensor | Samples]:
        """The exemplars of each new class, best first, as rows of the pool; by default by the memory's selection.

        Changed images can be returned instead of rows, also for old classes.
        """
        return choose_exemplars(learner, stage, passes)


def stage_phases(method: Method[Any], learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
    """Return the phases that a method declares for a stage; refuse those that cannot be trained."""
    phases: Any = method.phases(learner, stage, passes)
    name = type(method).__name__
    if not isinstance(phases, (list, tuple)) or not all(isinstance(phase, Phase) for phase in phases):
        raise EngramError(
            f"{name}.phases() must return a list of Phase objects, such as [phase], but it returned {described(phases)}"
        )
    for phase in phases:
        if phase.teacher and not method.uses_teacher:
            raise EngramError(
                f"{name} has uses_teacher = False, but its phase {phase.name!r} has teacher=True, so its loss would "
                "see the random network that a teacher begins as; leave uses_teacher out, or define phases() with "
                "teacher=False"
            )
    return list(phases)
