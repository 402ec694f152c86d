"""Engine: runs phases, sweeps and inference on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal, TypeVar

import torch
from torch import Tensor

from engram.contract.learner import Learner
from engram.core.errors import EngramError
from engram.data.augment import Augmentation
from engram.data.stage import Stage
from engram.engine.buffers import Space
from engram.engine.capture import CapturedStep, NotRecordable
from engram.engine.forward import Forward, FusedForward, PlainForward
from engram.engine.inference import Reader
from engram.engine.loop import PhaseLoop, PhaseState
from engram.engine.sensitivity import sensitivity
from engram.engine.sweep import sweep
from engram.engine.tune import tune
from engram.kernels import availability as kernels
from engram.methods import Phase
from engram.nn.backbones import ResNet
from engram.nn.network import Network

Precision = Literal["float32", "tf32", "bf16"]

T = TypeVar("T")

RECORDINGS = 8  # kept at most


class Engine:
    """Executes phases and passes on one device at one precision. image_size: what a network sees of an image."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        augmentation: Augmentation,
        image_size: tuple[int, int],
    ) -> None:
        self.device = device
        self.precision: Precision = precision
        self.augmentation = augmentation
        self.image_size = image_size
        self.capture = device.type == "cuda"
        # On a CPU channels-last costs a fifth of the speed with resnet10, most of it in the distillation loss.
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.space = Space(device, augmentation.pad)
        self._forward: Forward | None = None
        self._recordings: dict[Hashable, tuple[object, CapturedStep | None]] = {}
        if device.type == "cuda":
            _set_flags(precision)

    @property
    def is_cold(self) -> bool:
        """Whether the first step will take a while, because nothing is recorded yet."""
        return self.capture and not self._recordings

    def autocast(self) -> torch.autocast:
        """The context that forward passes by torch's modules run in."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def bind(self, learner: Learner, batch_size: int) -> Forward:
        """The passes over the learner; made once, and again only where the network has new tensors."""
        held = self._forward
        if held is None or held.batch_size < batch_size or not held.optimiser.holds(learner.network):
            kind = FusedForward if self.why_not_fused(learner.network.backbone) is None else PlainForward
            held = self._forward = kind(self, learner, batch_size)
            self.space.version += 1
        return held

    def why_not_fused(self, backbone: ResNet) -> str | None:
        """Why our own kernels do not run this backbone; None where they do."""
        if self.augmentation.view is not None:
            return "they crop images, but do not resize them"
        if (why := kernels.reason_unavailable(self.device)) is not None:
            return why
        from engram.engine.fused import unsupported

        return unsupported(backbone, self.image_size)

    def leaves_out(self, network: Network, size: int, last: int) -> bool:
        """Whether a last batch of one image, after batches of `size`, has to be left out.

        So it is where one number a channel is all that the backbone leaves of an image: a norm in training has nothing
        to compare it with. Refuses batches that are all of one image then.
        """
        height, width = self.image_size
        if last > 1 or network.backbone.last_map(self.image_size) != (1, 1):
            return False
        if size == 1:
            raise EngramError(
                f"a batch of one image cannot be trained on here: of {width}x{height} pixels the backbone leaves one "
                "number a channel, and a norm has nothing to compare it with; take larger batches, larger images or "
                "another backbone"
            )
        return True

    def record(
        self, slot: Hashable, key: object, step: Callable[[], T], learner: Learner, what: str
    ) -> Callable[[], T]:
        """The step as a recording, the slot's own one where that was made under the same key and no tensor has moved.

        The key says what the step does. The step itself is returned elsewhere than on a GPU, and where it cannot be
        recorded; the learner's notes say why then. what: what it is a step of, for that.
        """
        if not self.capture:
            return step
        assert self._forward is not None
        tensors = (learner.network.state_dict(), learner.teacher.state_dict(), learner.buffers)
        places = tuple(
            (name, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            for group in tensors
            for name, tensor in group.items()
        )
        key = (self.space.version, places, key)
        held = self._recordings.get(slot)
        if held is not None and _equal(held[0], key):
            return held[1] or step
        self._recordings.pop(slot, None)
        while len(self._recordings) >= RECORDINGS:
            self._recordings.pop(next(iter(self._recordings)))  # the oldest; each holds the memory of a step
        try:
            recorded = CapturedStep(step, [*self._forward.state(), self.space.counter])
        except NotRecordable as error:
            note = f"the steps of {what} are taken one kernel at a time, and slower, because they cannot be recorded: "
            learner.notes.append(f"{note}{error}")
            recorded = None  # not tried again
        self._recordings[slot] = (key, recorded)
        return recorded or step

    def start(
        self, learner: Learner, stage: Stage, phase: Phase, index: int, resume: PhaseState | None = None
    ) -> PhaseLoop:
        """A loop over the steps of a phase (the stage's number `index`), from its beginning or from where it stood."""
        return PhaseLoop(self, learner, stage, phase, index, resume)

    def reader(self, network: Network) -> Reader:
        """Reads images with the network as it is now, a batch after the other."""
        return Reader(self, network)

    def infer(self, network: Network, images: Tensor, mirror: bool = False) -> tuple[Tensor, Tensor]:
        """Embeddings (N, D) and scores (N, K) of uint8 images (N, H, W, 3) in eval mode, of what is seen of them."""
        return self.reader(network)(images, mirror)

    def embed(self, network: Network, images: Tensor, mirror: bool = False) -> Tensor:
        """Embeddings (N, D) of uint8 images (N, H, W, 3) in eval mode, not normalised."""
        return self.infer(network, images, mirror)[0]

    # `Passes` says what they are.
    sweep = sweep
    sensitivity = sensitivity
    tune = tune


def _equal(ours: object, theirs: object) -> bool:
    """Whether two keys are equal; those that cannot be compared (a loss that holds tensors) are not."""
    try:
        return bool(ours == theirs)
    except (RuntimeError, ValueError):
        return False


def _set_flags(precision: Precision) -> None:
    """Torch's own convolutions and products on a GPU, for the whole process.

    An algorithm chosen by timing would depend on what else the GPU is doing; float32 means float32, with no rounding
    to TF32 behind the user's back.
    """
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
