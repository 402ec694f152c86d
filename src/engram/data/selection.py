"""Which images of a class to keep: herding, closest to the mean, at random, or the first.

Each takes the unit embeddings of one class (N, D) and returns the rows to keep, best first, so that a memory that
shrinks keeps the beginning of the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Selection = Literal["herding", "closest", "random", "first"]
Selector = Callable[[Tensor, int, torch.Generator], Tensor]

HERDING_ROUNDS = 1000


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


def closest_to_mean(embeddings: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """The rows nearest to the class mean, nearest first."""
    distance = (embeddings - embeddings.mean(dim=0)).square().sum(dim=1)
    return distance.argsort(stable=True)[:count].cpu()


def at_random(embeddings: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows drawn without replacement."""
    return torch.randperm(len(embeddings), generator=generator)[:count]


def the_first(embeddings: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """The first rows, in the order of the data set."""
    return torch.arange(min(count, len(embeddings)))


SELECTORS: dict[Selection, Selector] = {
    "herding": herd,
    "closest": closest_to_mean,
    "random": at_random,
    "first": the_first,
}
