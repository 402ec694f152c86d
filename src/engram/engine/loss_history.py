"""The loss terms of a phase's steps: on the device during an epoch, then copied to the host, checked and averaged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.errors import EngramError


class NonFiniteLoss(EngramError):
    """A loss became infinite or NaN; the weights are worthless from then on."""


@dataclass(frozen=True)
class Epoch:
    """A finished epoch (from 0): the mean of each loss term over its steps, and its last learning rate."""

    number: int
    terms: dict[str, float]
    lr: float


@dataclass(frozen=True, eq=False)
class _EpochLosses:
    """The losses of an epoch, being copied to the host. first: the first step whose loss is known."""

    epoch: int
    first: int
    values: Tensor
    copied: torch.cuda.Event | None  # None on a CPU


class LossHistory:
    """Reads the terms that the steps of a phase write to a tensor, and raises NonFiniteLoss if one is not finite.

    written: (rows, terms), where a step writes its terms; a row for each planned step. steps: of an epoch. lr: of all
    steps of the phase. where: the stage and the phase, for messages. names: of the terms, known after the first step.
    """

    def __init__(self, written: Tensor, steps: int, lr: Tensor, where: str) -> None:
        self._written, self._steps, self._lr, self._where = written, steps, lr, where
        self.names: list[str] = []
        self._first = 0  # of the current epoch, the first step whose loss is known
        self._ended: deque[_EpochLosses] = deque()

    def continue_from(self, step: int, terms: Tensor | None) -> None:
        """Begin at this step of an epoch. terms: (S, K) of the last steps before it; None: unknown."""
        self._first = step
        if terms is not None:
            self._first = step - len(terms)
            self._written[self._first : step, : terms.shape[1]] = terms.to(self._written.device)

    def so_far(self, epoch: int, start: int, step: int) -> Tensor:
        """The terms (steps, terms) of the epoch's steps before `step`, on the CPU. start: row of its first step."""
        values = self._written[start + self._first : start + step, : len(self.names)].cpu()
        self._check(epoch, self._first, values)
        return values

    def end_epoch(self, epoch: int, start: int) -> None:
        """Start to copy the epoch's terms to the host. start: row of its first step."""
        values = self._written[start + self._first : start + self._steps, : len(self.names)]
        copied = None
        if values.is_cuda:
            on_host = torch.empty(values.shape, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            values = on_host
        else:
            values = values.clone()
        self._ended.append(_EpochLosses(epoch, self._first, values, copied))

    def check_ended(self) -> None:
        """Wait for the terms of all ended epochs and check them."""
        for losses in self._ended:
            if losses.copied is not None:
                losses.copied.synchronize()
            self._check(losses.epoch, losses.first, losses.values)

    def finished(self, wait: bool) -> Iterator[Epoch]:
        """The epochs that ended since the last call and whose terms have arrived; with `wait`, all of them."""
        while self._ended:
            losses = self._ended[0]
            if losses.copied is not None:
                if not wait and not losses.copied.query():
                    return
                losses.copied.synchronize()
            self._ended.popleft()
            self._check(losses.epoch, losses.first, losses.values)
            lr = float(self._lr[(losses.epoch + 1) * self._steps - 1])
            yield Epoch(losses.epoch, self.means(losses.values), lr)

    def means(self, values: Tensor) -> dict[str, float]:
        """The mean of each term over some steps, by name."""
        return dict(zip(self.names, values.mean(dim=0).tolist(), strict=True))

    def _check(self, epoch: int, first: int, values: Tensor) -> None:
        """Raise NonFiniteLoss if a term of an epoch's steps, from `first` on, is not finite."""
        bad = torch.nonzero(~values.isfinite().all(dim=1))
        if len(bad) == 0:
            return
        row = int(bad[0])
        named = dict(zip(self.names, values[row].tolist(), strict=True))
        terms = ", ".join(f"{name} = {value:g}" for name, value in named.items())
        is_first = (epoch, first + row) == (0, 0)
        raise NonFiniteLoss(
            f"the loss {'is not' if is_first else 'stopped being'} finite in {self._where}, epoch {epoch + 1}, step "
            f"{first + row + 1} of {self._steps} ({terms}); nothing was saved after it: "
            f"{_first_step_advice(named) if is_first else 'try a lower learning rate'}"
        )


def _first_step_advice(terms: Mapping[str, float]) -> str:
    """Advice for terms that are not finite before the phase has changed anything."""
    wrong = " and ".join(repr(name) for name, value in terms.items() if not math.isfinite(value))
    return (
        f"it is the first step of the phase, so look at how {wrong} is computed (the logits of classes not yet seen "
        "are minus infinity) before trying a lower learning rate"
    )
