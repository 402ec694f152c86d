"""Optimisers: a registry of rules that turn gradients into steps, on all parameters of a network as one flat tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from engram.contract.settings import OPTIMISERS, Training
from engram.core.errors import EngramError

EPSILON = 1e-8  # of adamw, as in torch


class Optimiser(ABC):
    """Base class of optimisers: which tensors it keeps, and the direction of a step.

    state: names of flat tensors that it keeps, with one value per parameter value: zeros when a phase begins.
    scalars: names of tensors (1,), float64, that it keeps: zero when a phase begins.

    All of them are part of a checkpoint. A step is recorded on a GPU, so what changes from step to step must be in them
    and not in attributes, and the code must not branch on a value.
    """

    state: ClassVar[tuple[str, ...]] = ()
    scalars: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def direction(self, values: Tensor, gradients: Tensor, state: Mapping[str, Tensor], training: Training) -> Tensor:
        """The direction (P,) of a step: the engine subtracts the learning rate times it, where the phase trains.

        Parameters
        ----------
        values: (P,), the parameters; do not change them.
        gradients: (P,), clipped as the phase says; may be changed.
        state: the tensors that it keeps, by name; change them in place.
        """


OptimiserT = TypeVar("OptimiserT", bound=Optimiser)


def register_optimiser(name: str) -> Callable[[type[OptimiserT]], type[OptimiserT]]:
    """A class decorator that registers an optimiser, to be named in `Training.optimiser`."""

    def decorate(cls: type[OptimiserT]) -> type[OptimiserT]:
        if not isinstance(cls, type) or not issubclass(cls, Optimiser):
            raise EngramError(
                f"the optimiser {name!r} is registered with {cls!r:.80}; register_optimiser takes a subclass of "
                "engram.contract.Optimiser"
            )
        for kind in ("state", "scalars"):
            named = getattr(cls, kind)
            if not isinstance(named, tuple) or not all(isinstance(each, str) and each.isidentifier() for each in named):
                raise EngramError(
                    f"{cls.__name__}.{kind} of the optimiser {name!r} must be a tuple of names, got {named!r:.80}; "
                    f'write {kind} = ("momentum",), for instance'
                )
        if len({*cls.state, *cls.scalars}) < len(cls.state) + len(cls.scalars):
            raise EngramError(f"two tensors of the optimiser {name!r} have one name; give each its own")
        if cls.__abstractmethods__:
            raise EngramError(f"the optimiser {name!r} has no direction; define direction(...) in {cls.__name__}")
        OPTIMISERS.add(name, cls(), code=[cls])
        return cls

    return decorate


def find_optimiser(name: str) -> Optimiser:
    """The registered optimiser of that name."""
    return OPTIMISERS.find(name)


def new_state(optimiser: Optimiser, like: Tensor) -> dict[str, Tensor]:
    """The tensors that the optimiser keeps, as when a phase begins. like: the flat parameters."""
    scalars = {name: torch.zeros(1, dtype=torch.float64, device=like.device) for name in optimiser.scalars}
    return {name: torch.zeros_like(like) for name in optimiser.state} | scalars


def try_optimiser(training: Training) -> None:
    """Take two trial steps on a few numbers, so that an optimiser that cannot work is refused before training."""
    optimiser, name = find_optimiser(training.optimiser), training.optimiser
    values = torch.linspace(-1, 1, 5)
    state, before = new_state(optimiser, values), values.clone()
    places = {key: (value.data_ptr(), value.shape) for key, value in state.items()}
    found = values
    try:
        with torch.no_grad():
            for _ in range(2):
                found = optimiser.direction(values, torch.linspace(0.1, -0.1, 5), state, training)
    except Exception as error:
        raise EngramError(
            f"the optimiser {name!r} fails in a trial step ({type(error).__name__}: {error!s:.120}); its direction "
            "gets flat tensors of values and gradients, the tensors it keeps, and the phase's Training"
        ) from error
    if not isinstance(found, Tensor) or found.shape != values.shape or found.dtype != values.dtype:
        what = f"a {found.dtype} tensor {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.60}"
        raise EngramError(
            f"the direction of the optimiser {name!r} is {what} for five parameters; it should be a float32 tensor "
            "with one value for each"
        )
    if not bool(found.isfinite().all()):
        raise EngramError(f"the direction of the optimiser {name!r} is not finite in a trial step with small gradients")
    if not torch.equal(values, before) or places != {k: (v.data_ptr(), v.shape) for k, v in state.items()}:
        raise EngramError(
            f"the optimiser {name!r} changes the values, or replaces the tensors that it keeps; it should return the "
            "direction, and change what it keeps in place"
        )


@register_optimiser("sgd")
class SGD(Optimiser):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    state = ("momentum",)

    def direction(self, values: Tensor, gradients: Tensor, state: Mapping[str, Tensor], training: Training) -> Tensor:
        gradients.add_(values, alpha=training.weight_decay)
        return state["momentum"].mul_(training.momentum).add_(gradients)


@register_optimiser("adamw")
class AdamW(Optimiser):
    """Adam with weight decay apart from the gradient, as torch.optim.AdamW."""

    state = ("first", "second")
    scalars = ("steps",)

    def direction(self, values: Tensor, gradients: Tensor, state: Mapping[str, Tensor], training: Training) -> Tensor:
        first_beta, second_beta = training.betas
        steps = state["steps"].add_(1)
        first = state["first"].lerp_(gradients, 1 - first_beta)
        second = state["second"].mul_(second_beta).addcmul_(gradients, gradients, value=1 - second_beta)
        # In float64: 1 - beta ** steps of the first steps has few digits otherwise.
        first_share, second_share = (1 - first_beta**steps).float(), (1 - second_beta**steps).sqrt().float()
        adapted = first / (first_share * ((second.sqrt() / second_share) + EPSILON))
        return adapted.add_(values, alpha=training.weight_decay)
