"""Engine: runs phases, sweeps and inference on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal, TypeVar

import torch
from torch import Tensor

from engram.contract.learner import Learner
from engram.contract.phase import Phase
from engram.core.errors import EngramError
from engram.data.augment import Augmentation
from engram.data.stage import Stage
from engram.engine.buffers import DeviceBuffers
from engram.engine.capture import CapturedStep, NotRecordable
from engram.engine.forward import Forward, FusedForward, PlainForward
from engram.engine.inference import Inference
from engram.engine.loop import PhaseLoop, PhaseState
from engram.engine.sensitivity import sensitivity
from engram.engine.sweep import sweep
from engram.engine.tune import tune
from engram.kernels.availability import reason_unavailable
from engram.nn.backbones import ResNet
from engram.nn.network import Network

Precision = Literal["float32", "tf32", "bf16"]

T = TypeVar("T")

RECORDINGS = 8  # the most that are kept


class Engine:
    """Executes phases and passes on one device at one precision. image_size: of images as the network sees them."""

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
        self.buffers = DeviceBuffers(device, augmentation.pad)
        self._forward: Forward | None = None
        self._recordings: dict[Hashable, tuple[object, CapturedStep | None]] = {}
        if device.type == "cuda":
            _set_flags(precision)

    @property
    def is_cold(self) -> bool:
        """Whether the first step will take a while, because nothing is recorded yet."""
        return self.capture and not self._recordings

    def autocast(self) -> torch.autocast:
        """The context for forward passes by torch's modules."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def bind(self, learner: Learner, batch_size: int) -> Forward:
        """The passes over the learner; made once, and again only if the network has new tensors."""
        forward = self._forward
        if forward is None or forward.batch_size < batch_size or not forward.optimiser.holds(learner.network):
            kind = FusedForward if self.why_not_fused(learner.network.backbone) is None else PlainForward
            forward = self._forward = kind(self, learner, batch_size)
            self.buffers.version += 1
        return forward

    def why_not_fused(self, backbone: ResNet) -> str | None:
        """Why our kernels do not run this backbone; None if they do."""
        if self.augmentation.view is not None:
            return "they crop images, but do not resize them"
        if (why := reason_unavailable(self.device)) is not None:
            return why
        from engram.engine.fused import unsupported

        return unsupported(backbone, self.image_size)

    def drops_last_image(self, network: Network, size: int, last: int) -> bool:
        """Whether a last batch of one image, after batches of `size`, must be dropped.

        It must if the backbone reduces an image to one value per channel: a batch norm in training cannot normalise a
        single value. Refuses batches of one image then.
        """
        height, width = self.image_size
        if last > 1 or network.backbone.last_map(self.image_size) != (1, 1):
            return False
        if size == 1:
            raise EngramError(
                f"a batch of one image cannot be trained on here: the backbone reduces {width}x{height} pixels to one "
                "value per channel, which a batch norm cannot normalise; use larger batches, larger images or another "
                "backbone"
            )
        return True

    def record(
        self, slot: Hashable, key: object, step: Callable[[], T], learner: Learner, what: str
    ) -> Callable[[], T]:
        """The step as a recording: the one in this slot, if its key is equal and no tensor has moved.

        Parameters
        ----------
        key: what the step does.
        what: what it is a step of, for a note.

        Returns the step itself on a CPU, and if it cannot be recorded; the learner's notes say why then.
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
        key = (self.buffers.version, places, key)
        recording = self._recordings.get(slot)
        if recording is not None and _equal(recording[0], key):
            return recording[1] or step
        self._recordings.pop(slot, None)
        while len(self._recordings) >= RECORDINGS:
            self._recordings.pop(next(iter(self._recordings)))  # the oldest; each holds the memory of a step
        try:
            recorded = CapturedStep(step, [*self._forward.state(), *self.buffers.state()])
        except NotRecordable as error:
            note = f"the steps of {what} are taken one kernel at a time, and slower, because they cannot be recorded: "
            learner.notes.append(f"{note}{error}")
            recorded = None  # not tried again
        self._recordings[slot] = (key, recorded)
        return recorded or step

    def start(
        self, learner: Learner, stage: Stage, phase: Phase, index: int, resume: PhaseState | None = None
    ) -> PhaseLoop:
        """A loop over the steps of a phase (number `index` of the stage), from its start or from a saved state."""
        return PhaseLoop(self, learner, stage, phase, index, resume)

    def inference(self, network: Network) -> Inference:
        """Inference with the network's current weights."""
        return Inference(self, network)

    def infer(self, network: Network, images: Tensor, mirror: bool = False) -> tuple[Tensor, Tensor]:
        """Embeddings (N, D) and scores (N, K) of uint8 images (N, H, W, 3) in eval mode."""
        return self.inference(network)(images, mirror)

    def embed(self, network: Network, images: Tensor, mirror: bool = False) -> Tensor:
        """Embeddings (N, D) of uint8 images (N, H, W, 3) in eval mode, not normalised."""
        return self.infer(network, images, mirror)[0]

    def features(self, network: Network, images: Tensor, mirror: bool = False) -> Tensor:
        """The inputs of the head (N, D') for uint8 images (N, H, W, 3) in eval mode."""
        outputs = self.inference(network).outputs(images, mirror)
        return torch.cat([output.features for output in outputs if output.features is not None])

    # See `Passes`.
    sweep = sweep
    sensitivity = sensitivity
    tune = tune


def _equal(ours: object, theirs: object) -> bool:
    """Whether two keys are equal; keys that cannot be compared (a loss that holds tensors) are not."""
    try:
        return bool(ours == theirs)
    except (RuntimeError, ValueError):
        return False


def _set_flags(precision: Precision) -> None:
    """Set torch's flags for convolutions and matrix products on a GPU, for the whole process.

    An algorithm chosen by timing would depend on what else the GPU is doing. float32 means float32: no TF32.
    """
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
