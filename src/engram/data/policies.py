"""Augmentation policies: which operation each image gets, and how strongly. The registry of them.

A policy is drawn in advance, like crops: a few numbers per image, which the training step reads. So the same numbers
give the same images in an eager, a recorded and a resumed step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engram.core.errors import EngramError
from engram.core.registry import OWN, Registry
from engram.data.operations import CODES, operate

Size = tuple[int, int]
Apply = Callable[[Tensor, Tensor], Tensor]
Draw = Callable[[tuple[int, ...], torch.Generator, Size], Tensor]


@dataclass(frozen=True)
class Policy:
    """A registered augmentation.

    numbers: how many numbers it needs per image. apply: takes uint8 images (B, H, W, 3) and their numbers (B, numbers),
    and returns images of the same shape and type. draw: takes the shape of a batch, a generator on the CPU and the
    images' height and width, and returns the numbers, (*shape, numbers) in float32.
    """

    numbers: int
    apply: Apply
    draw: Draw


POLICIES: Registry[Policy] = Registry("augmentation policy", OWN)
NO_POLICY = "none"
TRIED = (4, 9, 7)  # images, height and width that a new augmentation is tried on


def register_augmentation(name: str, *, numbers: int, draw: Draw | None = None) -> Callable[[Apply], Apply]:
    """A decorator that registers a function as an augmentation, for `--augment NAME` and `Augmentation(policy=NAME)`.

    The function takes uint8 images (B, H, W, 3) and their random numbers, float32 (B, numbers), and returns images of
    the same shape and type. It runs on the device, inside the training step: tensor operations of fixed shapes, with no
    branch on a value and no random numbers of its own.

    Parameters
    ----------
    numbers: random numbers per image.
    draw: returns them for a shape, a generator and an image size; by default uniform in [0, 1).
    """

    def decorate(apply: Apply) -> Apply:
        if not isinstance(numbers, int) or numbers < 0:
            raise EngramError(f"the augmentation {name} needs 0 or more random numbers per image, got {numbers!r}")
        if name == NO_POLICY:
            raise EngramError(f"an augmentation cannot be called {NO_POLICY!r}, which means no policy; choose another")
        policy = Policy(numbers, apply, draw or partial(_uniform, numbers))
        _try(name, policy)
        POLICIES.add(name, policy, code=[apply] if draw is None else [apply, draw])
        return apply

    return decorate


def _uniform(numbers: int, shape: tuple[int, ...], generator: torch.Generator, size: Size) -> Tensor:
    return torch.rand(*shape, numbers, generator=generator)


def _try(name: str, policy: Policy) -> None:
    """Refuse an augmentation that does not give back images like those it gets."""
    batch, *size = TRIED
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (*TRIED, 3), generator=generator).to(torch.uint8)
    with torch.random.fork_rng(devices=[]):
        drawn, again = (policy.draw((batch,), torch.Generator().manual_seed(0), (size[0], size[1])) for _ in range(2))
    if not isinstance(drawn, Tensor) or drawn.shape != (batch, policy.numbers) or drawn.dtype != torch.float32:
        raise EngramError(
            f"the augmentation {name} draws {_described(drawn)} for {batch} images; "
            f"it should be float32 of the shape {(batch, policy.numbers)}"
        )
    if not torch.equal(drawn, again):
        raise EngramError(
            f"the augmentation {name} draws other numbers from the same generator, so a resumed run would see other "
            "images; draw all of them from the generator"
        )
    with torch.random.fork_rng(devices=[]):
        made, other = (policy.apply(images.clone(), drawn.clone()) for _ in range(2))
    if not isinstance(made, Tensor) or made.shape != images.shape or made.dtype != torch.uint8:
        raise EngramError(
            f"the augmentation {name} makes {_described(made)} of uint8 images of the shape {tuple(images.shape)}; "
            "it must keep their shape and type"
        )
    if not torch.equal(made, other):
        raise EngramError(
            f"the augmentation {name} makes other images of the same images and numbers, so a resumed run would see "
            "other images; take its random numbers from those that it is given"
        )


def _described(value: object) -> str:
    return f"{value.dtype} of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


# The built-in policies: two numbers for each round, the code of the operation and its amount.

SIGNED = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "colour", "contrast", "sharpness")
CHOSEN = (*SIGNED, "identity", "posterize", "solarize", "autocontrast", "equalize")  # by TrivialAugment and RandAugment
LEVELS = 31  # strengths of both
WIDEST_SHIFT = 32  # pixels, in TrivialAugment


def one_round(images: Tensor, numbers: Tensor) -> Tensor:
    """Apply one operation to each image. numbers: (B, 2)."""
    return operate(images, numbers[:, 0].long(), numbers[:, 1])


def two_rounds(images: Tensor, numbers: Tensor) -> Tensor:
    """Apply two operations to each image. numbers: (B, 4)."""
    return one_round(one_round(images, numbers[:, :2]), numbers[:, 2:])


def _amounts(names: tuple[str, ...], strongest: dict[str, float], levels: int, bits: float) -> Tensor:
    """The amount of each operation (len(names), levels), from the weakest to the strongest level.

    strongest: by operation, of those whose amount is in proportion to the level. bits: the most that posterizing
        removes.
    """
    share = torch.linspace(0, 1, levels, dtype=torch.float64)
    table = torch.zeros(len(names), levels, dtype=torch.float64)
    for row, name in enumerate(names):
        if name in strongest:
            table[row] = strongest[name] * share
        elif name == "posterize":
            table[row] = 8 - (share * bits).round()
        elif name == "solarize":
            table[row] = 255 * (1 - share)
    return table


def _signed(names: tuple[str, ...]) -> Tensor:
    return torch.tensor([name in SIGNED for name in names])


def _finished(operations: Tensor, amounts: Tensor, names: tuple[str, ...], negative: Tensor) -> Tensor:
    """The two numbers of a round (..., 2): code and amount. operations: positions in `names`. negative: bool."""
    sign = torch.where(negative & _signed(names)[operations], -1.0, 1.0)
    is_shift = torch.tensor([name.startswith("translate") for name in names])[operations]
    amounts = torch.where(is_shift, amounts.trunc(), amounts)  # whole pixels
    codes = torch.tensor([CODES[name] for name in names])[operations]
    return torch.stack([codes.float(), (sign * amounts).float()], dim=-1)


def draw_trivial(shape: tuple[int, ...], generator: torch.Generator, size: Size) -> Tensor:
    """TrivialAugment: one operation at random, at a random strength."""
    colours = dict.fromkeys(("brightness", "colour", "contrast", "sharpness"), 0.99)
    shifts = {"translate_x": min(WIDEST_SHIFT, size[1]), "translate_y": min(WIDEST_SHIFT, size[0])}
    table = _amounts(CHOSEN, {"shear_x": 0.99, "shear_y": 0.99, "rotate": 135.0, **shifts, **colours}, LEVELS, bits=6)
    operations = torch.randint(len(CHOSEN), shape, generator=generator)
    levels = torch.randint(LEVELS, shape, generator=generator)
    negative = torch.rand(shape, generator=generator) < 0.5
    return _finished(operations, table[operations, levels], CHOSEN, negative)


def _moderate(size: Size) -> dict[str, float]:
    """The strongest amounts in AutoAugment and RandAugment."""
    colours = dict.fromkeys(("brightness", "colour", "contrast", "sharpness"), 0.9)
    shifts = {"translate_x": 150 / 331 * size[1], "translate_y": 150 / 331 * size[0]}
    return {"shear_x": 0.3, "shear_y": 0.3, "rotate": 30.0, **shifts, **colours}


RAND_ROUNDS, RAND_LEVEL = 2, 9


def draw_rand(shape: tuple[int, ...], generator: torch.Generator, size: Size) -> Tensor:
    """RandAugment: two operations at random, at level 9 of 30."""
    table = _amounts(CHOSEN, _moderate(size), LEVELS, bits=4)
    rounds: list[Tensor] = []
    for _ in range(RAND_ROUNDS):
        operations = torch.randint(len(CHOSEN), shape, generator=generator)
        negative = torch.rand(shape, generator=generator) < 0.5
        rounds.append(_finished(operations, table[operations, RAND_LEVEL], CHOSEN, negative))
    return torch.cat(rounds, dim=-1)


# AutoAugment's policy for CIFAR-10 (Cubuk et al., CVPR 2019): operation, probability and level (of 0 to 9), twice.
AUTO = (
    (("invert", 0.1, 0), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("colour", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("colour", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("colour", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 0)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
    (("colour", 0.9, 9), ("equalize", 0.6, 0)),
    (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("colour", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 0), ("invert", 0.1, 0)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 0)),
)
AUTO_LEVELS = 10


def draw_auto(shape: tuple[int, ...], generator: torch.Generator, size: Size) -> Tensor:
    """AutoAugment with its policy for CIFAR-10: one of 25 pairs of operations, each with its probability."""
    names = tuple(CODES)
    table = _amounts(names, _moderate(size), AUTO_LEVELS, bits=4)
    pair = torch.randint(len(AUTO), shape, generator=generator)
    rounds: list[Tensor] = []
    for i in range(2):
        operations = torch.tensor([CODES[each[i][0]] for each in AUTO])[pair]
        probability = torch.tensor([each[i][1] for each in AUTO])[pair]
        amounts = table[operations, torch.tensor([each[i][2] for each in AUTO])[pair]]
        is_used = torch.rand(shape, generator=generator) < probability
        negative = torch.rand(shape, generator=generator) < 0.5
        used = torch.where(is_used, operations, CODES["identity"])
        rounds.append(_finished(used, amounts, names, negative))
    return torch.cat(rounds, dim=-1)


@register_augmentation("trivial", numbers=2, draw=draw_trivial)
def trivial_augment(images: Tensor, numbers: Tensor) -> Tensor:
    """TrivialAugment, wide (Mueller and Hutter, ICCV 2021)."""
    return one_round(images, numbers)


@register_augmentation("rand", numbers=4, draw=draw_rand)
def rand_augment(images: Tensor, numbers: Tensor) -> Tensor:
    """RandAugment (Cubuk et al., NeurIPS 2020), two operations at level 9 of 30."""
    return two_rounds(images, numbers)


@register_augmentation("auto", numbers=4, draw=draw_auto)
def auto_augment(images: Tensor, numbers: Tensor) -> Tensor:
    """AutoAugment (Cubuk et al., CVPR 2019), its policy for CIFAR-10."""
    return two_rounds(images, numbers)
