"""Learner: everything that crosses from one stage to the next."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from engram.data.memory import Memory
from engram.nn.network import Network


class Learner:
    """A network, its teacher, the memory of exemplars, the class means and the method's own tensors.

    teacher is a second network that holds the weights of the stage before once
    there is one; it exists from the start so that its tensors keep their place in memory. taught: whether it is ever
    wanted; where not, it stays as it was made and is no part of the state. notes: what a method wants the user told;
    the run passes them on.
    """

    def __init__(self, network: Network, teacher: Network, memory: Memory, seed: int, taught: bool = True) -> None:
        self.network = network
        self.teacher = teacher.eval().requires_grad_(False)
        self.taught = taught
        self.memory = memory
        self.seed = seed
        self.class_means: Tensor | None = None
        self.buffers: dict[str, Tensor] = {}
        self.notes: list[str] = []

    @property
    def num_classes(self) -> int:
        """The classes seen so far."""
        return self.network.head.num_classes

    def store(self, name: str, value: Tensor) -> None:
        """Keeps a tensor of the method's under a name, in place where one of that shape is there already."""
        held = self.buffers.get(name)
        if held is not None and held.shape == value.shape:
            held.copy_(value)
        else:
            self.buffers[name] = value.detach().clone()

    def snapshot_teacher(self) -> None:
        """Makes the network as it is now the teacher of the next stage."""
        if not self.taught:
            return
        state = self.network.state_dict()
        self.teacher.make_room(state)
        self.teacher.load_state_dict(state)

    def drop(self, labels: Collection[int], class_buffers: Collection[str] = ()) -> None:
        """Forgets these classes in network, teacher, memory, class means and the method's tensors a class has a row in.

        The labels after them move up. What the backbone learned from their images stays in it.
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
        self.memory.drop(labels)

    def state_dict(self) -> dict[str, Tensor]:
        """All of it as named tensors (the seed is the configuration's)."""
        state = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        if self.taught:
            state |= {f"teacher.{name}": value for name, value in self.teacher.state_dict().items()}
        state |= {f"memory.{name}": value for name, value in self.memory.state_dict().items()}
        state |= {f"buffers.{name}": value for name, value in self.buffers.items()}
        if self.class_means is not None:
            state["class_means"] = self.class_means
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over a saved state, tensors in place where they exist."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

        device = self.network.mean.device
        for network, name in ((self.network, "network."), (self.teacher, "teacher.")):
            if network is self.network or self.taught:
                network.make_room(part(name))
                network.load_state_dict(part(name))
        self.memory.load_state_dict(part("memory."))
        for name, value in part("buffers.").items():
            self.store(name, value.to(device))
        means = state.get("class_means")
        self.class_means = None if means is None else means.to(device)
