"""Forward passes by torch or by our kernels: of a training step, from rows of the pool to outputs, and of inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.batch_plan import BatchPlan
from engram.contract.learner import Learner
from engram.contract.settings import Training
from engram.core.processes import ALONE, Processes
from engram.data.augment import Augmentation, apply, centre, to_unit
from engram.data.image_rows import Pixels, read_ahead
from engram.engine.buffers import DevicePool
from engram.engine.capture import Branch
from engram.engine.flat_optimiser import FlatOptimiser
from engram.engine.sharing import collected_pass
from engram.kernels.availability import reason_unavailable
from engram.nn.backbone import Backbone
from engram.nn.folding import fold_norms
from engram.nn.network import Network, Output, averaged
from engram.nn.views import View, seen_as

Precision = Literal["float32", "tf32", "bf16"]
Norms = Literal["synchronised", "replica"]
FUSED_OPTIMISER = "sgd"  # the one whose update is a kernel of ours
# Images of this many pixels are read channels-last on a CPU too: EfficientNet-Lite0 then reads 15.8 instead of 12.6
# images of 224x224 pixels in a second of one core (n = 1; no file was kept).
LARGE_PIXELS = 128 * 128
# In a batch. On a CPU: four images of 224x224 pixels. The largest map of EfficientNet-Lite0 then has 19 MB; the C
# library returns blocks of 32 MB and more to the system at once, and getting them again took a third of the CPU time.
INFERENCE_PIXELS = {"cpu": 4 * 224 * 224, "cuda": 4096 * 32 * 32}


@dataclass(eq=False)
class Compute:
    """How passes are computed: device, precision, augmentation. image_size: of images as the network sees them.

    processes: those that share the work. norms: whether batch norms see the whole batch or the part of their process.
    """

    device: torch.device
    precision: Precision
    augmentation: Augmentation
    image_size: tuple[int, int]
    processes: Processes = ALONE
    norms: Norms = "synchronised"

    def __post_init__(self) -> None:
        # On a CPU channels-last costs a fifth of the speed with resnet10, most of it in the distillation loss.
        self.layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format

    def autocast(self) -> torch.autocast:
        """The context for forward passes by torch's modules."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def why_not_fused(self, backbone: Backbone) -> str | None:
        """Why our kernels do not run this backbone; None if they do."""
        if self.augmentation.view is not None:
            return "they crop images, but do not resize them"
        if (why := reason_unavailable(self.device)) is not None:
            return why
        from engram.engine.fused import unsupported

        return unsupported(backbone, self.image_size)


class Forward:
    """The passes of a step over one learner, and its update, by torch's modules.

    height_dim: dimension of a batch of images that is their height; the width is the next. batch_size: the largest.
    full_batch: the images of a batch of the present phase or sweep that this process passes, except of the last one.
    """

    height_dim = 2

    def __init__(
        self, compute: Compute, learner: Learner, batch_size: int, layout: torch.memory_format | None = None
    ) -> None:
        self._compute, self._learner, self.batch_size = compute, learner, batch_size
        self.full_batch = batch_size
        self.optimiser = FlatOptimiser(learner.network, layout or compute.layout)

    def refresh(self, frozen: bool = False) -> None:
        """Read weights that changed between phases. frozen: also those that `frozen` passes use."""

    def images(self, pool: DevicePool, plan: BatchPlan, counter: Tensor, size: int, strong: bool = True) -> Tensor:
        """The augmented batch of the step that the counter is at, in the layout that the passes need.

        strong: with the augmentation's policy and cutout.
        """
        rows, draws = plan.row(counter, size)
        images = apply(self._compute.augmentation, pool.padded, rows, draws, self._compute.image_size, strong)
        return images.contiguous(memory_format=self._compute.layout)

    def student(self, images: Tensor, train_backbone: bool) -> Output:
        """Output of the network with batch statistics."""
        with self._compute.autocast():
            return self._learner.network(images, train_backbone)

    def frozen(self, images: Tensor) -> Output:
        """Output of the network with running statistics; only its head gets gradients."""
        with self._compute.autocast():
            return self._learner.network(images, train_backbone=False)

    def teacher(self, images: Tensor) -> Output:
        """Output of the teacher, without gradient."""
        with torch.no_grad(), self._compute.autocast():
            return self._learner.teacher(images)

    def with_teacher(self, images: Tensor, student_pass: Callable[[], Output]) -> tuple[Output, Output]:
        """The result of `student_pass` and the output of the teacher, computed in parallel if possible."""
        return student_pass(), self.teacher(images)

    def predict(self, images: Tensor) -> Output:
        """Output of the network in training with its running statistics, which stay unchanged; without gradient."""
        network = self._learner.network
        network.backbone.eval()  # only the backbone: adjustments of predictions are not part of a loss
        with torch.no_grad(), self._compute.autocast():
            output = network(images)
        network.backbone.train()
        return output

    def update(self, lr: Tensor, training: Training) -> None:
        """Update the parameters from the current gradients."""
        if training.clip_norm is not None:
            self.optimiser.limit(training.clip_norm)
        self.optimiser.step(lr, training)

    def follow(self) -> None:
        """Read parameters that an extension changed after an update."""

    def state(self) -> list[Tensor]:
        """The tensors that a step changes, except those of the method."""
        return [*self.optimiser.state(), *self._learner.network.buffers()]


class FusedForward(Forward):
    """Passes by engram's own kernels (engram.kernels)."""

    height_dim = 1

    def __init__(self, compute: Compute, learner: Learner, batch_size: int) -> None:
        from engram.engine.fused import FoldedBackbone, FoldedBranches, FusedBackbone
        from engram.kernels.launch import ARITHMETIC

        super().__init__(compute, learner, batch_size, torch.channels_last)
        self._arithmetic = arithmetic = ARITHMETIC[compute.precision]
        network, size = learner.network, compute.image_size
        values, gradients = self.optimiser.values, self.optimiser.gradients
        self._backbone = FusedBackbone(network.backbone, size, values, gradients, batch_size, arithmetic)
        self._folded = FoldedBackbone(learner.teacher.backbone, size, arithmetic)
        self._own_folded = FoldedBackbone(network.backbone, size, arithmetic)
        self._branches = FoldedBranches(network.backbone, size, arithmetic)
        self._teacher_branches = FoldedBranches(learner.teacher.backbone, size, arithmetic)

    def refresh(self, frozen: bool = False) -> None:
        self._backbone.refresh()
        self._folded.load(self._learner.teacher.backbone)
        self._branches.load(self._learner.network.backbone)
        self._teacher_branches.load(self._learner.teacher.backbone)
        if frozen:
            self._own_folded.load(self._learner.network.backbone)

    def images(self, pool: DevicePool, plan: BatchPlan, counter: Tensor, size: int, strong: bool = True) -> Tensor:
        from engram.kernels.launch import augment, crop, pack

        network, seen, draws = self._learner.network, self._compute.image_size, plan.draws
        drawn = (plan.image_places, draws.top, draws.left, draws.mirror, draws.factor)
        if draws.numbers is None or not strong:
            return augment(pool.padded, drawn, counter, size, seen, network.mean, network.std, self._arithmetic)
        numbers = draws.numbers.index_select(0, counter)[0, :size]
        images = self._compute.augmentation.strengthen(crop(pool.padded, drawn, counter, size, seen), numbers)
        return pack(images, network.mean, network.std, self._arithmetic)

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
            return classify_maps(self._learner.teacher, self._folded(images), self._teacher_branches(images))

    def with_teacher(self, images: Tensor, student_pass: Callable[[], Output]) -> tuple[Output, Output]:
        # Only our own kernels run on the second stream: those of a library may keep a workspace per stream.
        side = Branch()
        with torch.no_grad(), side.launching():
            maps = self._folded(images)
        student = student_pass()
        side.join()
        with torch.no_grad():
            return student, classify_maps(self._learner.teacher, maps, self._teacher_branches(images))

    def predict(self, images: Tensor) -> Output:
        with torch.no_grad():
            self._own_folded.load(self._learner.network.backbone)  # the weights after the previous step
            return classify_maps(self._learner.network, self._own_folded(images))

    def update(self, lr: Tensor, training: Training) -> None:
        from engram.kernels.launch import update

        if training.optimiser != FUSED_OPTIMISER:
            super().update(lr, training)
            self._backbone.refresh()
            return
        optimiser = self.optimiser
        if training.clip_norm is not None:
            optimiser.limit(training.clip_norm)
        update(
            optimiser.values,
            optimiser.gradients,
            optimiser.held["momentum"],
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


class Inference:
    """Outputs of a network for uint8 images (N, H, W, 3), on one device, batch by batch.

    The network must not change while this is used: our kernels have its norms folded into the weights. On a GPU the
    results may still be in progress when they are returned.
    """

    def __init__(self, compute: Compute, network: Network) -> None:
        self._compute, self._network = compute, network
        fused = compute.why_not_fused(network.backbone) is None
        self._forward = _fused_forward(network, compute) if fused else _plain_forward(network, compute)

    def __call__(self, images: Pixels, mirror: bool = False) -> tuple[Tensor, Tensor]:
        """Embeddings (N, D) and scores (N, K) of the images, or of their mirror images."""
        outputs = list(self.outputs(images, View(mirror=True) if mirror else None))
        return torch.cat([output.embedding for output in outputs]), torch.cat([output.scores for output in outputs])

    def outputs(self, images: Pixels, view: View | None = None) -> Iterator[Output]:
        """The network's outputs, one for each batch.

        view: the images are seen in this view. None: as they are, with scores averaged over the network's views.

        Several processes divide each batch, and each gets the outputs of all images, without maps.
        """
        compute = self._compute
        assert not self._network.training, "inference with a network in training would change its running statistics"
        height, width = images.shape[1:3]
        if compute.augmentation.view is not None:
            height, width = min(height, compute.image_size[0]), min(width, compute.image_size[1])
        batch = max(1, INFERENCE_PIXELS[compute.device.type] // (height * width))

        def read_part(images: Tensor) -> Output:
            unit = to_unit(centre(images, (height, width)).to(compute.device))
            if view is None:
                return averaged(self._network, self._forward, unit)
            return self._forward(seen_as(unit, view))

        read = collected_pass(compute.processes, read_part)
        for part in read_ahead(images, batch * compute.processes.count):
            with torch.no_grad():
                yield read(part)


def _plain_forward(network: Network, compute: Compute) -> Callable[[Tensor], Output]:
    """Passes by torch's modules; for large images on a CPU, the norms folded into the weights."""
    height, width = compute.image_size
    large = compute.device.type == "cpu" and height * width >= LARGE_PIXELS
    backbone = fold_norms(network.backbone, compute.image_size) if large else network.backbone

    def forward(unit: Tensor) -> Output:
        layout = torch.channels_last if unit.shape[2] * unit.shape[3] >= LARGE_PIXELS else compute.layout
        with compute.autocast():
            normalised = network.normalised(unit.contiguous(memory_format=layout))
            maps, embedding = backbone(normalised)
            return network.classify(maps, embedding, backbone.branch_embeddings(normalised))

    return forward


@torch.no_grad()
def _fused_forward(network: Network, compute: Compute) -> Callable[[Tensor], Output]:
    """Passes by our kernels, the norms folded into the weights."""
    from engram.engine.fused import FoldedBackbone, FoldedBranches
    from engram.kernels.launch import ARITHMETIC

    size, arithmetic = compute.image_size, ARITHMETIC[compute.precision]
    backbone = FoldedBackbone(network.backbone, size, arithmetic)
    branches = FoldedBranches(network.backbone, size, arithmetic)

    def forward(unit: Tensor) -> Output:
        normalised = ((unit - network.mean) / network.std).permute(0, 2, 3, 1)
        packed = F.pad(normalised, (0, 1)).to(arithmetic.stored).contiguous()
        return classify_maps(network, backbone(packed), branches(packed))

    return forward
