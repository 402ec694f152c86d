"""Updates of one flat tensor: a few operations for the whole network, and a mask of the elements that are trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engram.contract.optimisers import Optimiser, find_optimiser, new_state
from engram.contract.settings import Training
from engram.core.processes import Processes
from engram.nn.network import Network

TERMS = 16  # the most terms that a loss may have


class FlatOptimiser:
    """An optimiser on all of a network's parameters at once.

    The parameters become views of one tensor, and so do their gradients. The mask is 1 for the elements that a phase
    trains. The convolutions' weights come first, in the memory order of `layout`, then the other parameters in the
    modules' order, and scalars last: before other parameters they would misalign them, and make loads slow.

    held: the tensors that the optimiser of the phase keeps, by name. Each optimiser has its own, so that a recorded
    step of another phase still finds its own.
    """

    def __init__(self, network: Network, layout: torch.memory_format = torch.contiguous_format) -> None:
        named = sorted(network.named_parameters(), key=lambda item: (item[1].ndim != 4, item[1].ndim == 0))
        sizes = [parameter.numel() for _, parameter in named]
        device = named[0][1].device
        self.layout = layout
        self.values = torch.empty(sum(sizes), device=device)
        # With room for the terms of a loss, so that processes sum both at once.
        self._summed = torch.zeros(sum(sizes) + TERMS, device=device)
        self.gradients = self._summed[: sum(sizes)]
        self.mask = torch.ones_like(self.values)
        self.held: dict[str, Tensor] = {}
        self._held: dict[str, dict[str, Tensor]] = {}  # by optimiser
        self._rule: Optimiser = find_optimiser("sgd")
        self._buffers: dict[str, Tensor] = {}
        self._places: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for (name, parameter), size in zip(named, sizes, strict=True):
            self._places[name] = (offset, parameter.shape)
            view = self._view(self.values, name)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self._view(self.gradients, name)
            offset += size

    def _view(self, flat: Tensor, name: str) -> Tensor:
        offset, shape = self._places[name]
        part = flat[offset : offset + shape.numel()]
        if len(shape) == 4 and self.layout is torch.channels_last:
            out, channels, height, width = shape
            return part.view(out, height, width, channels).permute(0, 3, 1, 2)
        return part.view(shape)

    def holds(self, network: Network) -> bool:
        """Whether the network's parameters are still the views made here; a larger head has new ones."""
        named = dict(network.named_parameters())
        return named.keys() == self._places.keys() and all(
            parameter.shape == self._places[name][1]
            and parameter.data_ptr() == self._view(self.values, name).data_ptr()
            and parameter.grad is not None
            and parameter.grad.data_ptr() == self._view(self.gradients, name).data_ptr()
            for name, parameter in named.items()
        )

    def begin(self, trainable: Mapping[str, Tensor], optimiser: str, saved: Mapping[str, Tensor] | None = None) -> None:
        """Start a phase: the elements to train, the optimiser's name, and what it continues with (None: zeros)."""
        for name, mask in trainable.items():
            self._view(self.mask, name).copy_(mask)
        self._rule = find_optimiser(optimiser)
        if optimiser not in self._held:
            self._held[optimiser] = new_state(self._rule, self.values)
        self.held = self._held[optimiser]
        for kind, held in self.held.items():
            if saved is None:
                held.zero_()
            elif kind in self._rule.scalars:
                held.copy_(saved[kind])
            else:
                self.fill(held, {name: saved[f"{kind}.{name}"] for name in self._places})

    def saved(self) -> dict[str, Tensor]:
        """Return the state that `begin` continues from: copies of the tensors, parameters as KIND.PARAMETER."""
        saved = {kind: self.held[kind].clone() for kind in self._rule.scalars}
        for kind in self._rule.state:
            saved |= {f"{kind}.{name}": value for name, value in self.by_name(self.held[kind]).items()}
        return saved

    @property
    def names(self) -> list[str]:
        """The parameters' names."""
        return list(self._places)

    def persistent_buffer(self, name: str) -> Tensor:
        """A further flat tensor like the parameters', zeros at first, whose address never changes."""
        if name not in self._buffers:
            self._buffers[name] = torch.zeros_like(self.values)
        return self._buffers[name]

    def fill(self, flat: Tensor, by_name: Mapping[str, Tensor]) -> None:
        """Copy values by parameter into a flat tensor."""
        for name, value in by_name.items():
            self._view(flat, name).copy_(value)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor split by parameter: copies, in the same memory order on every device."""
        return {name: self._view(flat, name).contiguous().clone() for name in self._places}

    def state(self) -> list[Tensor]:
        """The tensors that a step may change."""
        held = [tensor for tensors in self._held.values() for tensor in tensors.values()]
        return [self.values, *held, *self._buffers.values()]

    def zero_grad(self) -> None:
        """Set the gradients to zero; backward adds to them in place."""
        self.gradients.zero_()

    @torch.no_grad()
    def sum_over(self, processes: Processes, terms: Tensor) -> Tensor:
        """Sum the gradients, in place, and the terms of the loss (K,) over all processes; return the terms."""
        if processes.count == 1:
            return terms
        own = self._summed[len(self.values) :][: len(terms)]
        own.copy_(terms)
        processes.sum(self._summed)
        return own.clone()

    @torch.no_grad()
    def limit(self, length: float) -> None:
        """Limit the length of the gradient of all trained parameters together."""
        norm = torch.linalg.vector_norm(self.gradients * self.mask)
        self.gradients.mul_((length / (norm + 1e-6)).clamp(max=1))

    @torch.no_grad()
    def step(self, lr: Tensor, training: Training) -> None:
        """One update from the current gradients. lr: (1,), on the device."""
        if training.clip is not None:
            self.gradients.clamp_(-training.clip, training.clip)
        direction = self._rule.direction(self.values, self.gradients, self.held, training)
        self.values.addcmul_(direction * self.mask, lr, value=-1)
