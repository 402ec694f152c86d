"""Forward passes of a step, from rows of the pool to the outputs of student and teacher: by torch or by our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engram.contract.batch_plan import BatchPlan
from engram.contract.learner import Learner
from engram.contract.settings import Training
from engram.data.augment import apply
from engram.engine.buffers import DevicePool
from engram.engine.capture import Branch
from engram.engine.sgd import FlatSGD
from engram.nn.network import Network, Output

if TYPE_CHECKING:
    from engram.engine.engine import Engine


class Forward(Protocol):
    """The passes of a step over one learner, and its update."""

    optimiser: FlatSGD
    batch_size: int
    height_dim: int  # dimension of a batch of images that is their height; the width is the next

    def refresh(self, frozen: bool = False) -> None:
        """Read weights that changed between phases. frozen: also those that `frozen` passes use."""
        ...

    def images(self, pool: DevicePool, plan: BatchPlan, counter: Tensor, size: int) -> Tensor:
        """The augmented batch of the step that the counter is at, in the layout that the passes need."""
        ...

    def student(self, images: Tensor, train_backbone: bool) -> Output:
        """Output of the network with batch statistics."""
        ...

    def frozen(self, images: Tensor) -> Output:
        """Output of the network with running statistics; only its head gets gradients."""
        ...

    def teacher(self, images: Tensor) -> Output:
        """Output of the teacher, without gradient."""
        ...

    def with_teacher(self, images: Tensor, student_pass: Callable[[], Output]) -> tuple[Output, Output]:
        """The result of `student_pass` and the output of the teacher, computed in parallel if possible."""
        ...

    def predict(self, images: Tensor) -> Output:
        """Output of the network in training with its running statistics, which stay unchanged; without gradient."""
        ...

    def update(self, lr: Tensor, training: Training) -> None:
        """Update the parameters from the current gradients."""
        ...

    def follow(self) -> None:
        """Read parameters that an extension changed after an update."""
        ...

    def state(self) -> list[Tensor]:
        """The tensors that a step changes, except those of the method."""
        ...


class PlainForward:
    """Passes by torch's modules."""

    height_dim = 2

    def __init__(self, engine: Engine, learner: Learner, batch_size: int) -> None:
        self._engine, self._learner = engine, learner
        self.optimiser = FlatSGD(learner.network, engine.layout)
        self.batch_size = batch_size

    def refresh(self, frozen: bool = False) -> None:
        pass

    def images(self, pool: DevicePool, plan: BatchPlan, counter: Tensor, size: int) -> Tensor:
        rows, draws = plan.row(counter, size)
        images = apply(self._engine.augmentation, pool.padded, rows, draws, self._engine.image_size)
        return images.contiguous(memory_format=self._engine.layout)

    def student(self, images: Tensor, train_backbone: bool) -> Output:
        with self._engine.autocast():
            return self._learner.network(images, train_backbone)

    def frozen(self, images: Tensor) -> Output:
        with self._engine.autocast():
            return self._learner.network(images, train_backbone=False)

    def teacher(self, images: Tensor) -> Output:
        with torch.no_grad(), self._engine.autocast():
            return self._learner.teacher(images)

    def with_teacher(self, images: Tensor, student_pass: Callable[[], Output]) -> tuple[Output, Output]:
        return student_pass(), self.teacher(images)

    def predict(self, images: Tensor) -> Output:
        network = self._learner.network
        network.backbone.eval()  # only the backbone: adjustments of predictions are not part of a loss
        with torch.no_grad(), self._engine.autocast():
            output = network(images)
        network.backbone.train()
        return output

    def update(self, lr: Tensor, training: Training) -> None:
        if training.clip_norm is not None:
            self.optimiser.limit(training.clip_norm)
        self.optimiser.step(lr, training.momentum, training.weight_decay, training.clip)

    def follow(self) -> None:
        pass

    def state(self) -> list[Tensor]:
        return [*self.optimiser.state(), *self._learner.network.buffers()]


class FusedForward:
    """Passes by engram's own kernels (engram.kernels)."""

    height_dim = 1

    def __init__(self, engine: Engine, learner: Learner, batch_size: int) -> None:
        from engram.engine.fused import FoldedBackbone, FoldedBranches, FusedBackbone
        from engram.kernels.launch import ARITHMETIC

        self._arithmetic = arithmetic = ARITHMETIC[engine.precision]
        self._learner, self._size = learner, engine.image_size
        self.optimiser = FlatSGD(learner.network, torch.channels_last)
        self.batch_size = batch_size
        optimiser, network = self.optimiser, learner.network
        self._backbone = FusedBackbone(
            network.backbone, engine.image_size, optimiser.values, optimiser.gradients, batch_size, arithmetic
        )
        self._folded = FoldedBackbone(learner.teacher.backbone, engine.image_size, arithmetic)
        self._own_folded = FoldedBackbone(network.backbone, engine.image_size, arithmetic)
        self._branches = FoldedBranches(network.backbone, engine.image_size, arithmetic)

    def refresh(self, frozen: bool = False) -> None:
        self._backbone.refresh()
        self._folded.load(self._learner.teacher.backbone)
        self._branches.load(self._learner.network.backbone)
        if frozen:
            self._own_folded.load(self._learner.network.backbone)

    def images(self, pool: DevicePool, plan: BatchPlan, counter: Tensor, size: int) -> Tensor:
        from engram.kernels.launch import augment

        network = self._learner.network
        drawn = plan.tensors()[:5]
        return augment(pool.padded, drawn, counter, size, self._size, network.mean, network.std, self._arithmetic)

    def student(self, images: Tensor, train_backbone: bool) -> Output:
        with torch.set_grad_enabled(train_backbone and torch.is_grad_enabled()):
            maps = self._backbone(images)
        return classify_maps(self._learner.network, maps, self._branches(images))

    def frozen(self, images: Tensor) -> Output:
        with torch.no_grad():
            maps = self._own_folded(images)
        return classify_maps(self._learner.network, maps, self._branches(images))

    def teacher(self, images: Tensor) -> Output:
        with torch.no_grad():
            return classify_maps(self._learner.teacher, self._folded(images))

    def with_teacher(self, images: Tensor, student_pass: Callable[[], Output]) -> tuple[Output, Output]:
        # Only our own kernels run on the second stream: those of a library may keep a workspace per stream.
        side = Branch()
        with torch.no_grad(), side.launching():
            maps = self._folded(images)
        student = student_pass()
        side.join()
        with torch.no_grad():
            return student, classify_maps(self._learner.teacher, maps)

    def predict(self, images: Tensor) -> Output:
        with torch.no_grad():
            self._own_folded.load(self._learner.network.backbone)  # the weights after the previous step
            return classify_maps(self._learner.network, self._own_folded(images))

    def update(self, lr: Tensor, training: Training) -> None:
        from engram.kernels.launch import update

        optimiser = self.optimiser
        if training.clip_norm is not None:
            optimiser.limit(training.clip_norm)
        update(
            optimiser.values,
            optimiser.gradients,
            optimiser.momentum,
            optimiser.mask,
            self._backbone.shadow,
            lr,
            training.momentum,
            training.weight_decay,
            training.clip,
        )

    def follow(self) -> None:
        self._backbone.refresh()

    def state(self) -> list[Tensor]:
        return [*self.optimiser.state(), self._backbone.shadow, *self._learner.network.buffers()]


def classify_maps(network: Network, maps: tuple[Tensor, ...], branches: Tensor | None = None) -> Output:
    """Output of the network's head for the backbone's maps; branches: as in `Network.classify`."""
    return network.classify(maps, maps[-1].mean(dim=(2, 3), dtype=torch.float32), branches)
