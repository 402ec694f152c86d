"""The tether of a phase at work: its pull on the flat gradients, and what the parameters' way takes off the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engram.contract.learner import Learner
from engram.contract.method import ANCHOR, OMEGA, PATH, Tether
from engram.engine.sgd import FlatSGD

PENALTY = "penalty"


class Pull:
    """A tether on the optimiser's flat buffers; all it reads and writes keeps its place from stage to stage.

    path: by parameter, the sums of a traced phase to go on from; none: from zero.
    """

    def __init__(self, tether: Tether, optimiser: FlatSGD, learner: Learner, path: Mapping[str, Tensor]) -> None:
        self._tether, self._optimiser = tether, optimiser
        self._omega, self._anchor = optimiser.room("omega"), optimiser.room("anchor")
        for flat, kind in ((self._omega, OMEGA), (self._anchor, ANCHOR)):
            optimiser.fill(flat, {name: learner.buffers[kind + name] for name in optimiser.names})
        self._omega.clamp_(max=tether.ceiling)
        if tether.traced:
            self._path, self._before = optimiser.room("path"), optimiser.room("before")
            self._gradients = optimiser.room("gradients")
            self._path.zero_()
            optimiser.fill(self._path, path)

    @torch.no_grad()
    def pull(self) -> Tensor:
        """Adds the penalty's gradient to the loss's, which must be there already; the penalty, (1,)."""
        optimiser, factor = self._optimiser, self._tether.factor
        if self._tether.traced:
            self._before.copy_(optimiser.values)
            self._gradients.copy_(optimiser.gradients)
        away = optimiser.values - self._anchor
        weighted = self._omega * away
        optimiser.gradients.add_(weighted, alpha=2 * factor)
        return factor * (weighted * away).sum(dim=0, keepdim=True)

    @torch.no_grad()
    def trace(self) -> None:
        """After the update: adds -gradient * movement to the path."""
        if self._tether.traced:
            self._path.addcmul_(self._gradients, self._optimiser.values - self._before, value=-1)

    def path(self) -> dict[str, Tensor]:
        """What is summed up so far, by parameter; nothing where the tether is not traced."""
        return self._optimiser.by_name(self._path) if self._tether.traced else {}

    def end(self, learner: Learner) -> None:
        """Hands the sums of the whole phase to the learner."""
        for name, value in self.path().items():
            learner.store(PATH + name, value)
