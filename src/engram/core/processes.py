"""Processes: the processes of one run, as torchrun starts them, and what they tell each other.

Every process does the same run with the same random numbers, and takes its share of each batch. Process 0 owns the
files and the display. A process that is alone does none of this.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from engram.core.errors import EngramError, SharedError
from engram.core.torchrun import is_launched, launched_number, start_number

T = TypeVar("T")

# How long a process waits for the others in a step, and in work that only one of them does (decoding images).
STEP_LIMIT, WORK_LIMIT = timedelta(minutes=30), timedelta(days=2)


class ProcessLost(EngramError):
    """Another process of the run has ended or does not answer."""


@dataclass(frozen=True)
class Share:
    """The part of a batch of `size` images that a process takes, from `start` to `stop`.

    is_split: False: every process takes the whole batch, because it is alone or the batch is small. counts: the images
    of every process, if it is split.
    """

    size: int
    start: int
    stop: int
    is_split: bool
    counts: tuple[int, ...] = ()

    @property
    def own(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def count(self) -> int:
        return self.stop - self.start


class Processes:
    """The processes of a run. rank: the number of this one, from 0. count: how many there are.

    local_rank: the number of this one on its machine.
    """

    rank = 0
    count = 1
    local_rank = 0

    @property
    def is_first(self) -> bool:
        """Whether this process owns the files and the display."""
        return self.rank == 0

    def share(self, size: int) -> Share:
        """This process's part of a batch; the parts differ by one image at most.

        A batch with fewer than two images per process is not divided: every process takes all of it.
        """
        if self.count == 1 or size < 2 * self.count:
            return Share(size, 0, size, False)
        bounds = [size * rank // self.count for rank in range(self.count + 1)]
        counts = tuple(stop - start for start, stop in pairwise(bounds))
        return Share(size, bounds[self.rank], bounds[self.rank + 1], True, counts)

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by its sum over the processes, in place; on a GPU it can be part of a recording."""
        return tensor

    def collect(self, part: Tensor, share: Share) -> Tensor:
        """Return the whole batch in every process, from the part that each has; the same bits everywhere."""
        whole = part.new_zeros(share.size, *part.shape[1:])
        whole[share.own] = part
        return self.sum(whole)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set in any process."""
        return flags

    def all_values(self, value: T) -> list[T]:
        """The value of every process."""
        return [value]

    def from_first(self, work: Callable[[], T]) -> T:
        """Do the work in process 0 only, and return its result in every process."""
        return work()

    def tensors_from_first(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
        """The tensors that process 0 has, or None if it has None."""
        return tensors

    def one_before_the_others(self, work: Callable[[], T]) -> T:
        """Do the work in the first process of each machine, then in the others, which find what it left on disk."""
        return work()

    def check_equal(self, values: Mapping[str, str], what: str) -> None:
        """Refuse values (texts or digests, by name) that are not the same in every process. what: has these values."""
        found = self.all_values((socket.gethostname(), dict(values)))
        for number, (host, theirs) in enumerate(found):
            for name in {**found[0][1], **theirs}:
                value, other = found[0][1].get(name, "none"), theirs.get(name, "none")
                if other != value:
                    raise SharedError(
                        f"process {number} on {host} {what.format(name=name)} than process 0 on {found[0][0]} "
                        f"({other:.100} instead of {value:.100}); start all of them with the same command, images and "
                        "code, on the same kind of hardware"
                    )


class JoinedProcesses(Processes):
    """Processes joined by torch.distributed: NCCL for tensors on GPUs, gloo for others."""

    def __init__(self, rank: int, count: int, local_rank: int, device: str) -> None:
        self.rank, self.count, self.local_rank = rank, count, local_rank
        if device == "cuda":
            torch.cuda.set_device(local_rank)  # before the first use of "cuda"
        self._is_gloo = device != "cuda"
        with _lost():
            store, _, _ = next(iter(rendezvous("env://", timeout=STEP_LIMIT)))
            # torchrun's store may still have the addresses of the processes before a restart.
            store = PrefixStore(f"engram/{start_number()}", store)
            backend = "gloo" if self._is_gloo else "nccl"
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=STEP_LIMIT)
            self._group = dist.group.WORLD
            # Notices a process that ended at once, whatever the limit is.
            control = dist.new_group(backend="gloo", timeout=WORK_LIMIT)
        assert isinstance(control, dist.ProcessGroup)
        self._control = control

    def sum(self, tensor: Tensor) -> Tensor:
        if not self._is_gloo:  # NCCL's errors are those of the device, and arrive later
            dist.all_reduce(tensor, group=self._group)
            return tensor
        with _lost():
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def any(self, *flags: bool) -> tuple[bool, ...]:
        found = torch.tensor(flags, dtype=torch.int32)
        with _lost():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        return tuple(bool(flag) for flag in found)

    def all_values(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.count
        with _lost():
            dist.all_gather_object(values, value, group=self._control)
        return values

    def from_first(self, work: Callable[[], T]) -> T:
        found: list[Any] = [None, True]
        try:
            if self.is_first:
                found = [work(), False]
        finally:  # also after an error: the others must not wait
            with _lost():
                dist.broadcast_object_list(found, src=0, group=self._control)
        if found[1]:
            raise SharedError("process 0 has failed")
        return found[0]

    def tensors_from_first(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:

        def describe() -> dict[str, tuple[torch.Size, torch.dtype]] | None:
            return None if tensors is None else {name: (value.shape, value.dtype) for name, value in tensors.items()}

        shapes = self.from_first(describe)
        if shapes is None:
            return None
        received: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            if self.is_first:
                assert tensors is not None
                value = tensors[name].detach().cpu().contiguous()
            else:
                value = torch.empty(shape, dtype=dtype)
            if value.numel():
                with _lost():
                    dist.broadcast(value.view(-1).view(torch.uint8), src=0, group=self._control)
            received[name] = value
        return received

    def one_before_the_others(self, work: Callable[[], T]) -> T:
        result = work() if self.local_rank == 0 else None
        self.any(False)
        return work() if result is None else result


class _lost:
    """Turns an error of gloo inside this context into a ProcessLost."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError):
            reason = (str(error).strip() or "-").splitlines()[0]
            raise ProcessLost(
                "another process of this run has ended or does not answer, so this one ends too; the last checkpoint "
                f"is intact, and 'engram resume' continues from it ({reason:.160})"
            ) from error


ALONE = Processes()
_joined: JoinedProcesses | None = None


def join_processes(device: str) -> Processes:
    """The processes that were started together with this one; joined once. device: "cpu" or "cuda"."""
    global _joined  # noqa: PLW0603
    if not is_launched():
        return ALONE
    if _joined is None:
        local, here = launched_number("LOCAL_RANK"), torch.cuda.device_count() if device == "cuda" else 0
        if device == "cuda" and local >= here:
            raise EngramError(
                f"process {local + 1} of this machine has no GPU: it has {here}; start at most {here} processes per "
                "machine (--nproc-per-node)"
            )
        _joined = JoinedProcesses(launched_number("RANK"), launched_number("WORLD_SIZE"), local, device)
    return _joined


def leave_processes() -> None:
    """Leave the processes that were joined."""
    global _joined  # noqa: PLW0603
    if _joined is not None:
        _joined = None
        dist.destroy_process_group()
