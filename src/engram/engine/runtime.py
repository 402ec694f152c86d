"""Runtime: what the work on a device shares: tensors that keep their addresses, passes bound to them, recordings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from engram.contract.learner import Learner
from engram.core.errors import EngramError
from engram.core.processes import Share
from engram.engine.buffers import DeviceBuffers
from engram.engine.capture import CapturedStep, GraphMemory, NotRecordable
from engram.engine.compiled import CompiledForward, why_not_compiled
from engram.engine.forward import Compute, Forward, FusedForward, Precision
from engram.engine.sharing import SynchronisedNorms
from engram.nn.backbone import Backbone
from engram.nn.network import Network

T = TypeVar("T")

RECORDINGS = 8  # the most that are kept


class Runtime(Compute):
    """The buffers, forward passes and recordings of one device, which phases, sweeps and other passes use.

    shares_memory: the recordings share one pool of memory. They never run at the same time, and a warm-up before each
    recording makes the tensors that outlive a step, outside of the pool.
    """

    shares_memory = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.capture = self.device.type == "cuda"
        self.buffers = DeviceBuffers(self.device, self.augmentation.pad, self.augmentation.numbers, self.image_size)
        self._forward: Forward | None = None
        self._recordings: dict[Hashable, tuple[object, CapturedStep | None]] = {}
        self._memory: GraphMemory | None = None  # that the recordings share
        if self.device.type == "cuda":
            _set_flags(self.precision)
            _load_linear_algebra(self.device)

    @property
    def is_cold(self) -> bool:
        """Whether the first step will take a while, because nothing is recorded yet."""
        return self.capture and not self._recordings

    def bind(self, learner: Learner, batch_size: int) -> Forward:
        """The passes over the learner; made once, and again only if the network has new tensors."""
        forward = self._forward
        if forward is None or forward.batch_size < batch_size or not forward.optimiser.holds(learner.network):
            # Our kernels compute the statistics of a norm inside a convolution, where they cannot be synchronised, and
            # what replaces a norm is not compiled.
            is_synchronised = self.processes.count > 1 and self.norms == "synchronised"
            forward = self._forward = self._kind(learner.network.backbone, is_synchronised)(self, learner, batch_size)
            self.buffers.version += 1
        forward.full_batch = self.processes.share(batch_size).count
        return forward

    def _kind(self, backbone: Backbone, is_synchronised: bool) -> type[Forward]:
        """The fastest passes that can run the backbone."""
        if is_synchronised:
            return Forward
        if self.why_not_fused(backbone) is None:
            return FusedForward
        return CompiledForward if why_not_compiled(self, backbone) is None else Forward

    def drops_last_image(self, network: Network, size: int, last: int) -> bool:
        """Whether a last batch of one image, after batches of `size`, must be dropped.

        It must if a batch norm of the backbone gets one value per channel from an image: in training it cannot
        normalise a single value. Refuses batches of one image then.
        """
        height, width = self.image_size
        if last > 1 or network.backbone.trains_on_one_image(self.image_size):
            return False
        if size == 1:
            raise EngramError(
                f"a batch of one image cannot be trained on here: the backbone reduces {width}x{height} pixels to one "
                "value per channel, which a batch norm cannot normalise; use larger batches, larger images or another "
                "backbone"
            )
        return True

    def synchronised(self, share: Share) -> AbstractContextManager[object]:
        """Inside this context, the batch norms of a pass over this part of a batch see all of it, if they should."""
        is_needed = share.is_split and self.norms == "synchronised"
        return SynchronisedNorms(self.processes, share) if is_needed else nullcontext()

    @torch.no_grad()
    def average_norms(self, network: Network) -> None:
        """Make running statistics that each process computed of its own images their mean over the processes."""
        if self.processes.count > 1 and self.norms == "replica":
            for buffer in network.buffers():
                if buffer.is_floating_point():
                    self.processes.sum(buffer.div_(self.processes.count))

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
        if self.shares_memory and self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            recorded = CapturedStep(step, [*self._forward.state(), *self.buffers.state()], self._memory)
        except NotRecordable as error:
            self._memory = None  # a failed recording may have left it unusable
            note = f"the steps of {what} are taken one kernel at a time, and slower, because they cannot be recorded: "
            learner.notes.append(f"{note}{error}")
            recorded = None  # not tried again
        self._recordings[slot] = (key, recorded)
        return recorded or step


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


_loading = threading.Lock()


def _load_linear_algebra(device: torch.device) -> None:
    """Load torch's linear algebra for a GPU.

    torch loads it at the first call, and fails if two threads make the first call at the same time.
    """
    with _loading:
        torch.linalg.cholesky(torch.ones(1, 1, device=device))
