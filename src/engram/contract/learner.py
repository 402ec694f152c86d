"""Learner: everything that is carried from one stage to the next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from engram.core.errors import EngramError, described
from engram.data.memory import Memory
from engram.nn.network import Network


class Learner:
    """A network, its teacher, the memory of exemplars, the class means and the method's own tensors.

    Parameters
    ----------
    teacher: a second network, which holds the weights of the previous stage from the second stage on. It exists from
        the start so that its tensors keep their addresses.
    uses_teacher: whether the teacher is ever used; if not, it is not part of the state.

    `buffers` are the method's tensors by name. `scratch` is what the method computed from them and can compute again;
    it is not saved. `notes` are warnings of the method, which the run passes on.
    """

    def __init__(
        self, network: Network, teacher: Network, memory: Memory, seed: int, uses_teacher: bool = True
    ) -> None:
        self.network = network
        self.teacher = teacher.eval().requires_grad_(False)
        self.uses_teacher = uses_teacher
        self.memory = memory
        self.seed = seed
        self.class_means: Tensor | None = None
        self.buffers: dict[str, Tensor] = {}
        self.scratch: dict[str, Any] = {}
        self.notes: list[str] = []

    @property
    def num_classes(self) -> int:
        """The number of classes seen so far."""
        return self.network.head.num_classes

    def store(self, name: str, value: Tensor) -> None:
        """Keep a tensor of the method under a name, in place if one of that shape is there."""
        if not isinstance(value, Tensor):
            raise EngramError(
                f"learner.store keeps a tensor, but {name!r} is {described(value)}; store each tensor under a name "
                "of its own, a number as torch.tensor(number)"
            )
        present = self.buffers.get(name)
        if present is not None and present.shape == value.shape:
            present.copy_(value)
        else:
            # Laid out as if read from a file: products of another layout may be summed in another order.
            self.buffers[name] = value.detach().clone(memory_format=torch.contiguous_format)

    def snapshot_teacher(self) -> None:
        """Make the current network the teacher of the next stage."""
        if not self.uses_teacher:
            return
        state = self.network.state_dict()
        self.teacher.resize_for_state(state)
        self.teacher.load_state_dict(state)

    def reserve(self, capacity: int, class_buffers: Collection[str] = ()) -> None:
        """Make room for that many classes in both heads, whose scores losses compare column by column.

        class_buffers: names of the method's tensors that have one row per row of the head; their new rows are zero.
        """
        before = self.network.head.capacity
        for network in (self.network, self.teacher):
            network.head.reserve(capacity)
        for name in self.buffers.keys() & set(class_buffers):
            held = self.buffers[name]
            if len(held) == before < capacity:
                self.buffers[name] = torch.cat([held, held.new_zeros(capacity - before, *held.shape[1:])])

    def drop(
        self, labels: Collection[int], class_buffers: Collection[str] = (), class_state: Iterable[str] = ()
    ) -> None:
        """Remove these classes; the labels after them move up. What the backbone learned from their images remains.

        Parameters
        ----------
        class_buffers: names of the method's tensors that have one row per class.
        class_state: names of the tensors kept per image that have one value per class.
        """
        kept = [label for label in range(self.num_classes) if label not in set(labels)]
        if self.class_means is not None:
            self.class_means = self.class_means[kept].clone()
        for name in self.buffers.keys() & set(class_buffers):
            rows = self.buffers[name]
            moved = rows[[row for row in range(len(rows)) if row not in set(labels)]]
            rows.zero_()[: len(moved)] = moved
        self.network.head.drop(labels)
        if self.teacher.head.num_classes:
            self.teacher.head.drop(labels)
        self.memory.drop(labels, class_state)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole state as named tensors (except the seed, which is in the configuration)."""
        state = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        if self.uses_teacher:
            state |= {f"teacher.{name}": value for name, value in self.teacher.state_dict().items()}
        state |= {f"memory.{name}": value for name, value in self.memory.state_dict().items()}
        state |= {f"buffers.{name}": value for name, value in self.buffers.items()}
        if self.class_means is not None:
            state["class_means"] = self.class_means
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state, in place where tensors exist."""
        self.scratch.clear()
        device = self.network.mean.device
        load_network(self.network, state)
        if self.uses_teacher:
            load_network(self.teacher, state, "teacher.")
        self.memory.load_state_dict(_below("memory.", state))
        for name, value in _below("buffers.", state).items():
            self.store(name, value.to(device))
        means = state.get("class_means")
        self.class_means = None if means is None else means.to(device)


def load_network(network: Network, state: Mapping[str, Tensor], prefix: str = "network.") -> None:
    """Load a learner's network out of its state, whatever its size there."""
    own = _below(prefix, state)
    network.resize_for_state(own)
    network.load_state_dict(own)


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
