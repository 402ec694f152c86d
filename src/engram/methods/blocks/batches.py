"""Extensions that change a batch: SecondStream adds images of other rows, CutMix and Mixup mix its images."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram.contract import BatchPlan, Extension, PhaseContext, StepHooks, copy_ahead, setting
from engram.contract.settings import check_fields
from engram.core.rng import generator


@dataclass(frozen=True, eq=False)
class SecondStream(Extension):
    """`batch_size` more images in each batch, from their own rows. They are first in the batch (`Step.streams[name]`).

    The phase's own rows determine how long an epoch is. This stream goes through its rows in one random order after
    another, across the ends of batches and epochs, so that each row is used as often as any other, or once more. With
    fewer rows than batch_size, a batch has some of them twice.

    rows: of the stage's pool. They must not depend on what training changes: a resumed phase asks for them again.
    """

    works_on_parts = True

    rows: Tensor
    batch_size: int
    name: str = "beside"

    def recording_key(self) -> Hashable:
        """The rows are read from the plan."""
        return (type(self), self.batch_size, self.name)

    def stream(self) -> tuple[str, int]:
        return self.name, self.batch_size

    def stream_rows(self, epochs: range, steps: int, purpose: tuple[str | int, ...], seed: int) -> Tensor:
        count, size = len(self.rows), self.batch_size
        start, stop = epochs.start * steps * size, epochs.stop * steps * size
        rounds = range(start // count, -(-stop // count))
        named = ("shuffle", *purpose, self.name)
        orders = [torch.randperm(count, generator=generator(seed, *named, each)) for each in rounds]
        places = torch.cat(orders)[start - rounds.start * count : stop - rounds.start * count]
        return self.rows[places].view(-1, size)


class Mixed(NamedTuple):
    """Mixed images, for the loss. labels: (B,), of the other images. share: (), of each image that is its own.

    The share is 1 in a step without mixing; the other labels have no meaning then.
    """

    labels: Tensor
    share: Tensor


@dataclass(frozen=True)
class CutMix(Extension):
    """In a fraction of the steps, a box of each image is replaced by that of another image (Yun et al., ICCV 2019).

    Boxes and partners are drawn in advance. A step that is not mixed has an empty box, so that every step is the same
    sequence of operations. The box is at the same place in all images of a step. The share of an image that stays its
    own is uniform in [0, 1], except for the part of the box that falls outside the image. The loss finds the other
    labels by `step.extra(Mixed)`.
    """

    probability: float = setting(0.5, at_least=0, at_most=1)

    def __post_init__(self) -> None:
        check_fields(self)

    def attach(self, context: PhaseContext, state: Mapping[str, Tensor]) -> StepHooks:
        return _CutMixHooks(self, context)


class _CutMixHooks(StepHooks):
    def __init__(self, mix: CutMix, context: PhaseContext) -> None:
        self._mix, self._context = mix, context
        steps, size, buffer = len(context.plan), context.batch_size, context.persistent_buffer
        self._partner = buffer(f"cutmix.partner.{size}", (steps, size), torch.int64)
        self._box = buffer(f"cutmix.box.{size}", (steps, 4), torch.int64)
        self._share = buffer(f"cutmix.share.{size}", (steps,))
        self._now: tuple[Tensor, Tensor] | None = None

    def load_plan(self, plan: BatchPlan, epochs: range) -> None:
        context = self._context
        sizes = (context.steps, context.batch_size, context.last_batch)
        purpose = (context.stage.index, context.index)
        planned = plan_boxes(self._mix, sizes, context.image_size, epochs, purpose, context.learner.seed)
        for own, new in zip((self._partner, self._box, self._share), planned, strict=True):
            copy_ahead(own, new)

    def change_images(self, images: Tensor) -> Tensor:
        at = self._context.counter
        partner = self._partner.index_select(0, at)[0, : len(images)]
        self._now = partner, self._share.index_select(0, at)[0]
        return paste_box(images, partner, self._box.index_select(0, at)[0], self._context.height_dim)

    def step_extras(self, labels: Tensor) -> Mixed:
        assert self._now is not None
        partner, share = self._now
        return Mixed(labels[partner], share)


@dataclass(frozen=True)
class Mixup(Extension):
    """Each image is blended with another image of its batch (Zhang, Cisse, Dauphin, Lopez-Paz, ICLR 2018).

    The share of its own is the same for all images of a step, from a Beta(alpha, alpha) distribution. Shares and
    partners are drawn in advance. The loss finds the other labels by `step.extra(Mixed)`.
    """

    alpha: float = setting(0.2, above=0)

    def __post_init__(self) -> None:
        check_fields(self)

    def attach(self, context: PhaseContext, state: Mapping[str, Tensor]) -> StepHooks:
        return _MixupHooks(self, context)


class _MixupHooks(StepHooks):
    def __init__(self, mix: Mixup, context: PhaseContext) -> None:
        self._mix, self._context = mix, context
        steps, size, buffer = len(context.plan), context.batch_size, context.persistent_buffer
        self._partner = buffer(f"mixup.partner.{size}", (steps, size), torch.int64)
        self._share = buffer(f"mixup.share.{size}", (steps,))
        self._now: tuple[Tensor, Tensor] | None = None

    def load_plan(self, plan: BatchPlan, epochs: range) -> None:
        context = self._context
        sizes, named = (context.steps, context.batch_size, context.last_batch), (context.stage.index, context.index)
        drawn = [
            _plan_blends(self._mix, sizes, generator(context.learner.seed, "mix", *named, epoch)) for epoch in epochs
        ]
        for own, new in zip((self._partner, self._share), zip(*drawn, strict=True), strict=True):
            copy_ahead(own, torch.cat(new))

    def change_images(self, images: Tensor) -> Tensor:
        at = self._context.counter
        partner = self._partner.index_select(0, at)[0, : len(images)]
        share = self._share.index_select(0, at)[0]
        self._now = partner, share
        return torch.lerp(images[partner].float(), images.float(), share).to(images.dtype)

    def step_extras(self, labels: Tensor) -> Mixed:
        assert self._now is not None
        partner, share = self._now
        return Mixed(labels[partner], share)


def _plan_blends(mix: Mixup, sizes: tuple[int, int, int], draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Partner int64 (S, B) and share float32 (S,) of the steps of an epoch. sizes: as for `plan_boxes`."""
    steps, batch_size, last = sizes
    numbers = np.random.default_rng(int(torch.randint(2**31, (), generator=draws)))
    share = torch.from_numpy(numbers.beta(mix.alpha, mix.alpha, steps)).float()
    return _partners(steps, batch_size, last, draws), share


def _partners(steps: int, batch_size: int, last: int, draws: torch.Generator) -> Tensor:
    """Each image's partner in its batch, int64 (S, B); the last batch has only `last` images."""
    order = torch.rand(steps, batch_size, generator=draws)
    order[-1, last:] = torch.inf
    return order.argsort(dim=1)


def paste_box(images: Tensor, partner: Tensor, box: Tensor, height_dim: int) -> Tensor:
    """The batch with the box (4,) of each image taken from its partner (B,), in the same memory layout.

    height_dim: the dimension of the images that is their height; the width is the next.
    """
    top, bottom, left, right = box.unbind()
    height, width = images.shape[height_dim : height_dim + 2]
    ys, xs = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    inside = ((ys >= top) & (ys < bottom))[:, None] & ((xs >= left) & (xs < right))
    inside = inside.view(*inside.shape, *[1] * (images.ndim - height_dim - 2))
    return torch.where(inside, images[partner], images, out=torch.empty_like(images))


def plan_boxes(
    mix: CutMix,
    sizes: tuple[int, int, int],
    image_size: tuple[int, int],
    epochs: range,
    purpose: tuple[str | int, ...],
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The boxes of the steps of some epochs, on the CPU; the same arguments give the same boxes.

    sizes: steps of an epoch, images in a batch and in an epoch's last batch. Returns partner int64 (S, B), each image's
    partner in its batch; box int64 (S, 4), first row and the one after the last, first column and the one after the
    last; share float32 (S,), of the image outside the box.
    """
    steps, batch_size, last = sizes
    height, width = image_size
    partners: list[Tensor] = []
    boxes: list[Tensor] = []
    shares: list[Tensor] = []
    for epoch in epochs:
        draws = generator(seed, "mix", *purpose, epoch)
        mixed = torch.rand(steps, generator=draws) < mix.probability
        side = (1 - torch.rand(steps, generator=draws)).sqrt()  # of the box, relative to the image's
        centres = (torch.randint(extent, (steps,), generator=draws) for extent in image_size)
        spans: list[Tensor] = []
        for centre, extent in zip(centres, image_size, strict=True):
            half = (side * extent).long() // 2 * mixed
            spans += [(centre - half).clamp(min=0), (centre + half).clamp(max=extent)]
        top, bottom, left, right = spans
        partners.append(_partners(steps, batch_size, last, draws))
        boxes.append(torch.stack(spans, dim=1))
        shares.append(1 - (bottom - top) * (right - left) / (height * width))
    return torch.cat(partners), torch.cat(boxes), torch.cat(shares)
