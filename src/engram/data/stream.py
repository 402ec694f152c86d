"""The stream: which classes arrive at which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from engram.core.errors import EngramError, option, suggest
from engram.data.sources.cifar import published_orders
from engram.data.store import stable_permutation


@dataclass(frozen=True)
class Stream:
    """The classes of a data set in order of arrival, cut into stages; stage 0 is the base.

    order: class ids by label, so that label i is class order[i]. sizes: new classes per stage.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def build(cls, order: Sequence[int], base: int, increment: int) -> Stream:
        """Stages of `increment` classes after a base of `base`; the last one takes what is left."""
        count = len(order)
        if sorted(order) != list(range(count)):
            raise EngramError(f"a class order must name each of the {count} classes once")
        if not 1 <= base <= count:
            raise EngramError(f"the base must have 1 to {count} classes (the data set's number), got {base}")
        if increment < 1:
            raise EngramError(f"the increment must be at least 1 class a stage, got {increment}")
        full, rest = divmod(count - base, increment)
        return cls(tuple(order), (base, *[increment] * full, *([rest] if rest else [])))

    def __len__(self) -> int:
        return len(self.sizes)

    def num_seen(self, stage: int) -> int:
        """The classes seen once this stage is learned."""
        return sum(self.sizes[: stage + 1])

    def new_labels(self, stage: int) -> range:
        """The labels that arrive at this stage."""
        return range(self.num_seen(stage) - self.sizes[stage], self.num_seen(stage))

    def labels_of(self, class_ids: np.ndarray) -> np.ndarray:
        """The label (position in the order) of each class id."""
        label_of = np.empty(len(self.order), dtype=np.int64)
        label_of[list(self.order)] = np.arange(len(self.order))
        return label_of[class_ids]


def class_order(spec: str, dataset: str, class_names: Sequence[str]) -> tuple[int, ...]:
    """The class ids in the order that `spec` asks for.

    `"1"`, `"2"`, ...: the data set's published order of that number, or, where none is published, a shuffle with
    that number as its seed. `"natural"`: by class id. `"seed:N"`: a shuffle with seed N. Else the classes
    themselves, separated by commas, all by name or all by id; where names are numbers, by name.
    """
    check_order(spec, dataset)
    count = len(class_names)
    spec = spec.strip()
    if spec == "natural":
        return tuple(range(count))
    if spec.startswith("seed:") and spec[5:].isdecimal():
        return _shuffled(int(spec[5:]), count)
    if spec.isdecimal():
        published = published_orders(dataset)
        return published[int(spec) - 1] if published else _shuffled(int(spec), count)
    return _listed([item.strip() for item in spec.split(",")], class_names)


def order_text(value: Any) -> Any:
    """A class order as `class_order` takes it: a number, or a list of classes, as text; anything else as it is."""
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


def check_order(spec: str, dataset: str) -> None:
    """Refuses what is no class order of the data set, as far as that can be told without its classes."""
    spec = spec.strip()
    seeded = spec.startswith("seed:") and spec[5:].isdecimal()
    if not (spec == "natural" or seeded or spec.isdecimal() or "," in spec):
        raise EngramError(
            f"the class order {spec!r} is none of: a number, 'natural', 'seed:N', or all classes separated by commas, "
            "which a command also reads from a file, as @FILE"
        )
    published = published_orders(dataset)
    if spec.isdecimal() and published and not 1 <= int(spec) <= len(published):
        raise EngramError(
            f"{dataset} has published class orders 1 to {len(published)}, got {int(spec)}; "
            f"'seed:{int(spec)}' gives a shuffle with that seed"
        )


def describe_order(spec: str, dataset: str) -> str:
    """What a class order is, for people."""
    if spec == "natural":
        return "by class id"
    if spec.startswith("seed:"):
        return f"shuffled with seed {spec[5:]}"
    if spec.isdecimal():
        return f"{spec} (published)" if published_orders(dataset) else f"{spec} (shuffled with seed {spec})"
    return "given class by class"


def _shuffled(seed: int, count: int) -> tuple[int, ...]:
    return tuple(stable_permutation(count, f"class order {seed}").tolist())


def _listed(items: list[str], class_names: Sequence[str]) -> tuple[int, ...]:
    count = len(class_names)
    order = _ids(items, class_names)
    repeated = sorted({class_names[i] for i in order if order.count(i) > 1})
    if repeated:
        raise EngramError(f"the class order names {', '.join(repeated)} more than once; each class comes once")
    if len(order) < count:
        absent = [name for i, name in enumerate(class_names) if i not in set(order)]
        shown = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
        several = (
            f"; several class orders, a run for each, are given with {option('orders')}"
            if all(map(str.isdecimal, items))
            else ""
        )
        raise EngramError(f"the class order lacks {len(absent)} of the {count} classes: {shown}{several}")
    return tuple(order)


def _ids(items: list[str], class_names: Sequence[str]) -> list[int]:
    """The ids of classes that are all given by name, or all by id; what may be either is a name."""
    ids_by_name = {name: i for i, name in enumerate(class_names)}
    others = [item for item in items if item not in ids_by_name]
    for item in others:
        if not item.isdecimal() or int(item) >= len(class_names):
            raise EngramError(f"the class order names {item!r}, which is no class here: {suggest(item, class_names)}")
    if not others:
        return [ids_by_name[item] for item in items]
    named = [item for item in items if item in ids_by_name]
    if named:
        raise EngramError(
            f"the class order has both names, such as {named[0]!r}, and ids, such as {others[0]!r}; "
            "give every class by its name, or every class by its id"
        )
    return [int(item) for item in items]
