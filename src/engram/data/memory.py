"""The exemplar memory: how exemplars are selected, and which are kept within the budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from engram.core.errors import EngramError, UnknownNameError
from engram.core.registry import OWN, Registry
from engram.core.rng import generator
from engram.data.image_rows import ImageRows, Source
from engram.data.stage import Samples

Budget = Literal["per_class", "total", "all", "none"]
Selector = Callable[[Tensor, int, torch.Generator], Tensor]
SelectorT = TypeVar("SelectorT", bound=Selector)

HERDING_ROUNDS = 1000
RESERVOIR = "reservoir"  # not one of the selections: it chooses among the images of all classes together
SELECTIONS: Registry[Selector] = Registry("exemplar selection", OWN)


def register_selection(name: str) -> Callable[[SelectorT], SelectorT]:
    """A decorator that registers a selection of exemplars, to be named in `MemoryConfig.selection`.

    The function takes the embeddings (N, D) of the images of one class, each of length 1, how many to choose, and a
    random generator on the CPU. It returns that many different rows (all N if there are fewer), best first: when the
    budget per class falls, the first ones are kept.
    """

    def decorate(selector: SelectorT) -> SelectorT:
        if not callable(selector):
            raise EngramError(f"the selection {name!r} is registered with {selector!r:.80}; it should be a function")
        if name == RESERVOIR:
            raise EngramError(f"{RESERVOIR!r} is a selection of another kind, among all classes; choose another name")
        SELECTIONS.add(name, selector)
        return selector

    return decorate


def select_rows(selection: str, embeddings: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The rows (int64, on the CPU) that a registered selection chooses; refuses what are not such rows."""
    wanted = min(count, len(embeddings))
    rows = SELECTIONS.find(selection)(embeddings, count, generator)
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.shape != (wanted,):
        what = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else f"{rows!r:.60}"
        raise EngramError(
            f"the exemplar selection {selection!r} returned {what} for {count} of {len(embeddings)} images; it should "
            f"return a tensor of {wanted} rows, torch.int64 ({wanted},)"
        )
    rows = rows.cpu()
    if wanted and (len(rows.unique()) < wanted or not 0 <= int(rows.min()) <= int(rows.max()) < len(embeddings)):
        raise EngramError(
            f"the exemplar selection {selection!r} returned a row twice, or one that is not between 0 and "
            f"{len(embeddings) - 1}; it should return {wanted} different rows"
        )
    return rows


def try_selection(selection: str) -> None:
    """Refuse, before training, a selection that fails to choose from a few random embeddings."""
    random = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.rand(24, 8, generator=random), dim=1)
    for count, available in ((5, 24), (8, 6)):
        try:
            select_rows(selection, embeddings[:available], count, random)
        except EngramError:
            raise
        except Exception as error:
            raise EngramError(
                f"the exemplar selection {selection!r} fails to choose {count} of {available} images "
                f"({type(error).__name__}: {error!s:.120}); it gets their embeddings (N, D), how many to choose, and a "
                "random generator"
            ) from error


@register_selection("herding")
def herd(embeddings: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows whose running mean follows the class mean (iCaRL's herding, in the form the AFC tables used).

    A row that comes up again is not added a second time but still moves the target. After HERDING_ROUNDS rounds,
    or ten for each row wanted (duplicates can make it circle), the rows closest to the mean fill what is missing.
    """
    embeddings = embeddings.cpu()  # many small steps, each of which has to wait for the one before
    count = min(count, len(embeddings))
    mean = embeddings.mean(dim=0)
    similarity = embeddings @ embeddings.T if len(embeddings) <= 4 * count else None
    # <w, f> for every row f, kept up to date instead of w: w += mean - f_picked adds <mean, f> - <f_picked, f>.
    to_mean = embeddings @ mean
    target = to_mean.clone()
    picked: dict[int, None] = {}
    for _ in range(max(HERDING_ROUNDS, 10 * count)):
        if len(picked) == count:
            break
        best = int(target.argmax())
        picked.setdefault(best)
        to_best = embeddings @ embeddings[best] if similarity is None else similarity[best]
        target += to_mean - to_best
    if len(picked) < count:
        for row in closest_to_mean(embeddings, len(embeddings)).tolist():
            if len(picked) == count:
                break
            picked.setdefault(row)
    return torch.tensor(list(picked), dtype=torch.int64)


@register_selection("closest")
def closest_to_mean(embeddings: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """The rows nearest to the class mean, nearest first."""
    distance = (embeddings - embeddings.mean(dim=0)).square().sum(dim=1)
    return distance.argsort(stable=True)[:count].cpu()


@register_selection("random")
def at_random(embeddings: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows drawn without replacement."""
    return torch.randperm(len(embeddings), generator=generator)[:count]


@register_selection("first")
def the_first(embeddings: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """The first rows, in the order of the data set."""
    return torch.arange(min(count, len(embeddings)))


def reservoir_order(ids: Tensor, seed: int) -> Tensor:
    """The rows of images with these ids (N,), ordered by a random number that depends on id and seed only.

    The first `size` of all images seen so far are a uniform random sample of them, and the first `size` of that sample
    and of later images are one again. So this is reservoir sampling, whose state is the sample itself.
    """
    salt = torch.randint(2**62, (1,), generator=generator(seed, RESERVOIR))
    keys = ids.numpy().astype(np.uint64) ^ salt.numpy().astype(np.uint64)
    # The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection: different ids never tie.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable"))


STATE = "state."  # prefix of the tensors kept per image, in a saved memory


@dataclass(frozen=True)
class MemoryConfig:
    """How many exemplars to keep, and how they are selected.

    budget: "per_class" keeps `size` of every class; "total" shares `size` among the classes seen; "all" keeps every
    image; "none" keeps nothing. selection "reservoir": `size` in total, a uniform random sample of all images seen;
    classes have different numbers of them, perhaps none.
    """

    budget: Budget = "per_class"
    size: int = 20
    selection: str = "herding"

    def __post_init__(self) -> None:
        if self.budget not in get_args(Budget):
            raise UnknownNameError("memory budget", self.budget, get_args(Budget))
        if self.selection != RESERVOIR and self.selection not in SELECTIONS:
            raise UnknownNameError(SELECTIONS.kind, self.selection, [*SELECTIONS.names(), RESERVOIR], hint=OWN)
        if self.selection == RESERVOIR and self.budget != "total":
            raise EngramError(f"a reservoir holds a number of exemplars in total, got {self.budget}; use total=N")
        if self.budget in ("all", "none"):
            object.__setattr__(self, "size", 0)  # so that two of them are equal
        elif self.size < 1:
            raise EngramError(
                f"the memory must hold at least one exemplar per class, got {self.budget}={self.size}; "
                "use 'none' to keep nothing"
            )

    @property
    def is_selected(self) -> bool:
        """Whether a registered selection chooses the exemplars."""
        return self.budget not in ("all", "none") and self.selection != RESERVOIR

    @classmethod
    def parse(cls, text: str, selection: str = "herding") -> MemoryConfig:
        """The configuration written as `per_class=20`, `total=2000`, `all` or `none`."""
        if text in ("all", "none"):
            return cls(budget=text, size=0, selection=selection)
        match = re.fullmatch(r"(per_class|total)=(-?\d+)", text)
        if not match:
            raise EngramError(f"the memory {text!r} is none of: per_class=K, total=N, all, none")
        budget: Literal["per_class", "total"] = "per_class" if match[1] == "per_class" else "total"
        return cls(budget=budget, size=int(match[2]), selection=selection)

    def __str__(self) -> str:
        return self.budget if self.budget in ("all", "none") else f"{self.budget}={self.size}"

    def per_class(self, num_classes: int) -> int | None:
        """The number of exemplars each class may have when `num_classes` are seen; None: no limit.

        Of a reservoir it is the mean number, at least 1.
        """
        if self.budget == "all":
            return None
        if self.budget == "none":
            return 0
        if self.selection == RESERVOIR:
            return max(1, self.size // num_classes)
        return self.size if self.budget == "per_class" else self.size // num_classes

    def check(self, num_classes: int) -> None:
        """Refuse a budget that leaves some of `num_classes` classes without an exemplar."""
        if self.budget == "total" and self.size < num_classes and self.selection != RESERVOIR:
            raise EngramError(
                f"a memory of {self.size} exemplars in total is less than one for each of {num_classes} classes; "
                f"give at least total={num_classes}"
            )


class Memory:
    """The exemplars of each class seen, best first.

    A model keeps copies of their images, so that it can continue to learn when the first data is gone. In a run they
    may be rows of the data set.

    source: the training images of a run, if they are still there when it is resumed: exemplars that are rows of them
    are saved without their pixels.
    """

    def __init__(self, config: MemoryConfig, source: Source | None = None) -> None:
        self.config = config
        self.source = source
        self._by_label: dict[int, Samples] = {}

    def __len__(self) -> int:
        return sum(len(samples) for samples in self._by_label.values())

    @property
    def labels(self) -> list[int]:
        """The labels that have exemplars, in the order they were learned."""
        return list(self._by_label)

    def of(self, label: int) -> Samples:
        """The exemplars of one class, best first."""
        return self._by_label[label]

    def samples(self) -> Samples | None:
        """All exemplars, class by class, or None."""
        return Samples.concatenate(list(self._by_label.values())) if self._by_label else None

    def update(self, pool: Samples, chosen: Mapping[int, Tensor | Samples], num_classes: int) -> None:
        """Add the chosen exemplars of each label (rows of the pool, or changed images); shrink all to the budget.

        The exemplars that are here already get the tensors per image that they have in the pool, where a stage may have
        widened or changed them.
        """
        quota = self.config.per_class(num_classes)
        if quota == 0:
            return
        for label, samples in self._by_label.items():
            rows = torch.nonzero(pool.exemplar & (pool.labels == label)).squeeze(1)
            if pool.state and len(rows) == len(samples):
                self._by_label[label] = replace(samples, state=pool[rows].state)
        if self.config.selection == RESERVOIR:  # what is chosen is the whole memory
            self._by_label, quota = {}, None
        for label, what in chosen.items():
            kept = what if isinstance(what, Samples) else pool[what]
            self._by_label[label] = replace(kept, exemplar=torch.ones(len(kept), dtype=torch.bool))
        if quota is not None:
            self._by_label = {
                label: samples[torch.arange(min(quota, len(samples)))] for label, samples in self._by_label.items()
            }

    def drop(self, labels: Collection[int], class_state: Iterable[str] = ()) -> None:
        """Remove these classes; the labels after them move up, as in the head.

        class_state: names of the tensors kept per image that have one value per class.
        """
        gone = set(labels)
        kept = {label: samples for label, samples in self._by_label.items() if label not in gone}
        self._by_label = {}
        for label, samples in kept.items():
            moved = label - sum(each < label for each in gone)
            state = dict(samples.state)
            for name in state.keys() & set(class_state):
                state[name] = state[name][:, [c for c in range(state[name].shape[1]) if c not in gone]]
            self._by_label[moved] = replace(samples, labels=torch.full_like(samples.labels, moved), state=state)

    def keep(self, label: int, rows: Tensor) -> None:
        """Keep only these rows of a class's exemplars; a class without rows is as if it never had any."""
        left = self._by_label.pop(label)[rows]
        if len(left):
            self._by_label = dict(sorted({**self._by_label, label: left}.items()))

    def move(self, label: int, rows: Tensor, to: int) -> None:
        """Make these rows of a class's exemplars the last ones of another class."""
        samples = self._by_label[label]
        moved = samples[rows]
        moved = replace(moved, labels=torch.full_like(moved.labels, to))
        stays = torch.ones(len(samples), dtype=torch.bool)
        stays[rows] = False
        there = [self._by_label[to]] if to in self._by_label else []
        self.keep(label, stays.nonzero().flatten())
        self._by_label = dict(sorted({**self._by_label, to: Samples.concatenate([*there, moved])}.items()))

    def set_state(self, name: str, values: Tensor) -> None:
        """Keep a tensor per image. values: (N, ...), in the order of `samples`."""
        parts = values.split([len(samples) for samples in self._by_label.values()])
        for samples, part in zip(self._by_label.values(), parts, strict=True):
            samples.state[name] = part

    def state_dict(self) -> dict[str, Tensor]:
        """The exemplars as tensors."""
        samples = self.samples()
        if samples is None:
            return {}
        state = {f"{STATE}{name}": value for name, value in samples.state.items()}
        kept = {"labels": samples.labels, "sources": samples.sources, **state}
        images = samples.images
        is_referred = isinstance(images, ImageRows) and len(images.sources) == 1 and images.sources[0] is self.source
        return kept if is_referred else {"images": samples.pixels, **kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load saved exemplars."""
        self._by_label = {}
        if not state:
            return
        exemplar = torch.ones(len(state["labels"]), dtype=torch.bool)
        kept = {name.removeprefix(STATE): value for name, value in state.items() if name.startswith(STATE)}
        images = state.get("images")
        if images is None:
            images = self._referred(state["sources"])
        samples = Samples(images, state["labels"], state["sources"], exemplar, kept)
        for label in dict.fromkeys(samples.labels.tolist()):
            self._by_label[label] = samples[samples.rows_of(label)]

    def _referred(self, sources: Tensor) -> ImageRows:
        """The exemplars with these sources, as rows of the training images."""
        if self.source is None:
            raise EngramError("it refers to the images of its exemplars in the data set; give the same data set")
        if len(sources) and not 0 <= int(sources.min()) <= int(sources.max()) < len(self.source):
            raise EngramError("its exemplars are not images of the data set; it is damaged")
        return ImageRows([self.source], sources)
