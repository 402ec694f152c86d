"""Mixed images: in which steps, which box, and whose; drawn beforehand, as tensors, like the rest of the plan.

A step that is not mixed has an empty box, so that every step is the same sequence of operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.methods.batches import CutMix
from engram.random import generator


@dataclass(frozen=True, eq=False)
class Cut:
    """One step's: partner (B,), the place in the batch of each image's other one; box (4,); share (), see Mixing."""

    partner: Tensor
    box: Tensor
    share: Tensor

    def paste(self, images: Tensor, height_at: int) -> Tensor:
        """The batch with the box of each image taken from its partner, in the same order of memory.

        height_at: the dimension of the images that is their height; their width is the next.
        """
        top, bottom, left, right = self.box.unbind()
        height, width = images.shape[height_at : height_at + 2]
        ys, xs = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        inside = ((ys >= top) & (ys < bottom))[:, None] & ((xs >= left) & (xs < right))
        inside = inside.view(*inside.shape, *[1] * (images.ndim - height_at - 2))
        return torch.where(inside, images[self.partner], images, out=torch.empty_like(images))


@dataclass(frozen=True, eq=False)
class Mixing:
    """What is mixed in each of S steps.

    partner: int64 (S, B), each image's other one in its batch. box: int64 (S, 4), its first row and the one after its
    last, its first column and the one after its last. share: float32 (S,), of the image that is not in the box.
    """

    partner: Tensor
    box: Tensor
    share: Tensor

    def __len__(self) -> int:
        return len(self.share)

    @classmethod
    def room(cls, steps: int, batch_size: int, device: torch.device) -> Mixing:
        """Room to load others into, up to so many steps."""
        partner = torch.zeros(steps, batch_size, dtype=torch.int64, device=device)
        return cls(partner, torch.zeros(steps, 4, dtype=torch.int64, device=device), torch.ones(steps, device=device))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return self.partner, self.box, self.share

    def load(self, other: Mixing) -> None:
        """Takes over another of no more steps, in place; on a GPU nothing waits for it."""
        for held, new in zip(self.tensors(), other.tensors(), strict=True):
            new = new.pin_memory() if held.is_cuda else new
            held[: len(new)].copy_(new, non_blocking=True)

    def row(self, at: Tensor, size: int) -> Cut:
        """What is mixed in the step that the counter (1,) is at, in a batch of that size."""
        partner, box, share = (plan.index_select(0, at)[0] for plan in self.tensors())
        return Cut(partner[:size], box, share)


def plan_mixing(
    mix: CutMix,
    sizes: tuple[int, int, int],
    image_size: tuple[int, int],
    epochs: range,
    purpose: tuple[str | int, ...],
    seed: int,
) -> Mixing:
    """What is mixed in the steps of some epochs, on the CPU; the same arguments give the same.

    sizes: the steps of an epoch, the images in a batch and in an epoch's last.
    """
    steps, batch_size, last = sizes
    height, width = image_size
    planned: list[Mixing] = []
    for epoch in epochs:
        draws = generator(seed, "mix", *purpose, epoch)
        mixed = torch.rand(steps, generator=draws) < mix.probability
        side = (1 - torch.rand(steps, generator=draws)).sqrt()  # of the box, in sides of the image
        centres = (torch.randint(extent, (steps,), generator=draws) for extent in image_size)
        spans: list[Tensor] = []
        for centre, extent in zip(centres, image_size, strict=True):
            half = (side * extent).long() // 2 * mixed
            spans += [(centre - half).clamp(min=0), (centre + half).clamp(max=extent)]
        top, bottom, left, right = spans
        order = torch.rand(steps, batch_size, generator=draws)
        order[-1, last:] = torch.inf  # there is no image in those places
        share = 1 - (bottom - top) * (right - left) / (height * width)
        planned.append(Mixing(order.argsort(dim=1), torch.stack(spans, dim=1), share))
    partner, box, share = (torch.cat(parts) for parts in zip(*(each.tensors() for each in planned), strict=True))
    return Mixing(partner, box, share)
