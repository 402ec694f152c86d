"""The stream of classes: the class order, and which classes arrive at which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np

from engram.core.errors import EngramError, option, suggest
from engram.data.sources.cifar import published_orders
from engram.data.store import stable_permutation


@dataclass(frozen=True)
class Stream:
    """The classes of a data set in their order, divided into stages. Stage 0 is the base.

    order: class ids by label; label i is class order[i]. sizes: number of new classes of each stage.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def build(cls, order: Sequence[int], base: int, increment: int | Sequence[int]) -> Stream:
        """Divide the classes into a base and later stages.

        increment: number of classes of each later stage, of which the last may be smaller; or one number for each,
            which must add up to the classes after the base.
        """
        count = len(order)
        if sorted(order) != list(range(count)):
            raise EngramError(f"a class order must name each of the {count} classes once")
        if not 1 <= base <= count:
            raise EngramError(f"the base must have 1 to {count} classes (all of the data set), got {base}")
        if min([increment] if isinstance(increment, int) else increment, default=0) < 1:
            raise EngramError(f"the increment must be at least 1 class per stage, got {increment}")
        if not isinstance(increment, int):
            if sum(increment) != count - base:
                raise EngramError(
                    f"the increments {', '.join(map(str, increment))} add up to {sum(increment)} classes, but "
                    f"{count - base} of the {count} classes come after the base of {base}; change one of them"
                )
            return cls(tuple(order), (base, *increment))
        full, rest = divmod(count - base, increment)
        return cls(tuple(order), (base, *[increment] * full, *([rest] if rest else [])))

    def __len__(self) -> int:
        return len(self.sizes)

    def num_seen(self, stage: int) -> int:
        """Return the number of classes seen after this stage."""
        return sum(self.sizes[: stage + 1])

    def new_labels(self, stage: int) -> range:
        """Return the labels of the new classes of this stage."""
        return range(self.num_seen(stage) - self.sizes[stage], self.num_seen(stage))

    def labels_of(self, class_ids: np.ndarray) -> np.ndarray:
        """Return the labels (positions in the order) of class ids."""
        label_of = np.empty(len(self.order), dtype=np.int64)
        label_of[list(self.order)] = np.arange(len(self.order))
        return label_of[class_ids]


def class_order(spec: str, dataset: str, class_names: Sequence[str]) -> tuple[int, ...]:
    """Return the class ids in the order given by `spec`.

    spec: "1", "2", ...: the published order with this number, or a shuffle with this seed if the data set has no
        published orders. "natural": by class id. "seed:N": a shuffle with seed N. "numpy:N": the order that
        `numpy.random.seed(N); numpy.random.permutation(classes)` gives, which other software uses (PyCIL: numpy:1993).
        Otherwise, all classes separated by commas, either by name or by id; numbers that are class names are names.
    """
    kind, number = check_order(spec, dataset)
    if kind == "listed":
        return _listed([item.strip() for item in spec.split(",")], class_names)
    if kind == "natural":
        return tuple(range(len(class_names)))
    if kind == "numpy":
        return tuple(np.random.RandomState(number).permutation(len(class_names)).tolist())
    published = published_orders(dataset) if kind == "number" else ()
    if published:
        return published[number - 1]
    return tuple(stable_permutation(len(class_names), f"class order {number}").tolist())


def order_text(value: Any) -> Any:
    """Return a class order given as a number or a list of classes as text for `class_order`; other values unchanged."""
    if _is_id(value):
        return str(int(value))
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        return value
    items = [str(int(item)) if _is_id(item) else item for item in value]
    wrong = [item for item in items if not isinstance(item, str) or not item.strip() or "," in item]
    if wrong or len(items) < 2:
        got = f"{wrong[0]!r} in it" if wrong else f"{len(items)} in all"
        raise EngramError(f"a class order that is a list has every class by id, or by a name without commas, got {got}")
    return ",".join(items)


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_order(spec: str, dataset: str) -> tuple[Literal["natural", "seed", "numpy", "number", "listed"], int]:
    """Return the kind of a class order and its number; refuse what is none. The names of classes are not checked."""
    spec = spec.strip()
    seeded, by_numpy = spec.startswith("seed:"), spec.startswith("numpy:")
    number = spec.removeprefix("numpy:") if by_numpy else spec.removeprefix("seed:")
    if spec == "natural" or ("," in spec and not number.isdecimal()):
        return ("natural" if spec == "natural" else "listed"), 0
    if not number.isdecimal():
        raise EngramError(
            f"the class order {spec!r} is none of: a number, 'natural', 'seed:N', 'numpy:N', all classes separated by "
            "commas, or (on the command line) a file with them, @FILE"
        )
    if by_numpy:
        if int(number) >= 2**32:
            raise EngramError(
                f"a seed of NumPy is less than 2**32, got the class order {spec!r}; 'seed:N' has no limit"
            )
        return "numpy", int(number)
    published = published_orders(dataset)
    if not seeded and published and not 1 <= int(number) <= len(published):
        raise EngramError(
            f"{dataset} has published class orders 1 to {len(published)}, got {int(number)}; "
            f"'seed:{int(number)}' gives a shuffle with that seed"
        )
    return ("seed" if seeded else "number"), int(number)


def describe_order(spec: str, dataset: str) -> str:
    """Describe a class order for the user."""
    if spec == "natural":
        return "by class id"
    if spec.startswith("seed:"):
        return f"shuffled with seed {spec[5:]}"
    if spec.startswith("numpy:"):
        return f"NumPy's permutation with seed {spec[6:]}"
    if spec.isdecimal():
        return f"{spec} (published)" if published_orders(dataset) else f"{spec} (shuffled with seed {spec})"
    return "given class by class"


def _listed(items: list[str], class_names: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of a list of all classes."""
    order = _ids(items, class_names)
    repeated = sorted({class_names[i] for i in order if order.count(i) > 1})
    if repeated:
        raise EngramError(f"the class order names {', '.join(repeated)} more than once; name each class once")
    missing = [name for i, name in enumerate(class_names) if i not in set(order)]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        several = all(map(str.isdecimal, items))
        hint = f"; for one run per class order, use {option('orders')}" if several else ""
        raise EngramError(f"the class order lacks {len(missing)} of the {len(class_names)} classes: {shown}{hint}")
    return tuple(order)


def _ids(items: list[str], class_names: Sequence[str]) -> list[int]:
    """Return the ids of classes that are all given by name, or all by id; a number that is a name counts as a name."""
    ids_by_name = {name: i for i, name in enumerate(class_names)}
    others = [item for item in items if item not in ids_by_name]
    for item in others:
        if not item.isdecimal() or int(item) >= len(class_names):
            raise EngramError(
                f"the class order names {item!r}, but there is no such class: {suggest(item, class_names)}"
            )
    if not others:
        return [ids_by_name[item] for item in items]
    named = [item for item in items if item in ids_by_name]
    if named:
        raise EngramError(
            f"the class order has both names, such as {named[0]!r}, and ids, such as {others[0]!r}; "
            "give every class by its name, or every class by its id"
        )
    return [int(item) for item in items]
