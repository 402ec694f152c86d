"""Buffers: tensors on the device that keep their addresses from stage to stage, so that a recorded step stays valid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engram.contract.batch_plan import BatchPlan, copy_ahead
from engram.data.augment import pad_images
from engram.data.image_rows import ImageRows, read_pixels
from engram.data.photographs import Photographs, decoding_threads
from engram.data.planned_crops import CentralParts, PlannedCrops
from engram.data.stage import Stage
from engram.engine.flat_optimiser import TERMS
from engram.engine.image_feed import ImageFeed, ImageRing

PLANNED_STEPS = 512  # planned ahead, in whole epochs
GROWTH = 1.5
LARGE = 2**30  # bytes of images; from this size on a pool has no spare rows, and shrinks when half of it is unused
PART = 2**28  # bytes of images copied to the device at a time


@dataclass(frozen=True, eq=False)
class DevicePool:
    """A stage's pool on the device; its tensors may have more rows than the pool.

    padded: images with their border; if they are streamed, the ring. ids: a stable id of each image. state: the tensors
    kept per image, by name.
    """

    padded: Tensor
    labels: Tensor
    exemplar: Tensor
    ids: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)


class DeviceBuffers:
    """The pool, the plan, the step's counter, the history of the loss, and the loss weights.

    version changes whenever a tensor was replaced. streamed: the images of stages are not all on the device, but are
    brought there batch by batch (`feeding`). photographs: of which random crops are taken; needs `streamed`, and what
    is brought there has the size that the network sees. seen: this size.
    """

    def __init__(self, device: torch.device, pad: int, numbers: int = 0, seen: tuple[int, int] = (0, 0)) -> None:
        self.device = device
        self.version = 0
        self.streamed = False
        self.photographs: Photographs | None = None
        self._seen = seen
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_step = torch.zeros(1, dtype=torch.int64, device=device)  # the counter of a plan of one step
        self.history = torch.zeros(PLANNED_STEPS, TERMS, device=device)
        self.stage = torch.zeros((), dtype=torch.int64, device=device)
        self._arrival = torch.zeros(0, dtype=torch.int64, device=device)
        self._pad, self._numbers = pad, numbers  # numbers: `Augmentation.numbers`
        self._pool: DevicePool | None = None
        self._stage: Stage | None = None
        self._ring: ImageRing | None = None
        self._is_streamed = False  # whether the pool that is here is
        self._places: dict[int, Tensor] = {}  # by batch size
        self._plans: dict[int, BatchPlan] = {}
        self._weights: dict[str, Tensor] = {}
        self._named: dict[str, Tensor] = {}

    def persistent_buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that keeps its address under a name, with at least as many rows as `shape`; zeros when new."""
        present = self._named.get(name)
        if present is None or len(present) < shape[0] or present.shape[1:] != shape[1:]:
            present = self._named[name] = torch.zeros(shape, dtype=dtype, device=self.device)
            self.version += 1
        return present

    def state(self) -> list[Tensor]:
        """The tensors that a step may change; after a recording they are as before it."""
        per_image = {} if self._pool is None else self._pool.state
        return [self.counter, *self._named.values(), *per_image.values()]

    @property
    def image_bytes(self) -> int:
        """The bytes of the pool's images on the device, unused rows included."""
        return 0 if self._pool is None else self._pool.padded.numel()

    def pool(self, stage: Stage, batch_size: int = 0) -> DevicePool:
        """The stage's pool on the device; copied there once per stage.

        batch_size: the most images that a step will read of it. If they are streamed, their ring has places for them.
        """
        if self._pool is None or self._stage is not stage:
            self._load_pool(stage)
        assert self._pool is not None
        if self.streamed and batch_size:
            self._fit_ring(stage, batch_size)
        return self._pool

    def _fit_ring(self, stage: Stage, batch_size: int) -> None:
        """Make the ring large enough for batches of that size."""
        assert self._pool is not None
        if self._ring is None or self._ring.largest < batch_size:
            self._ring = None  # free the old one first; a slice of it would keep it
            self._pool = replace(self._pool, padded=self._pool.padded.new_empty(0, *self._pool.padded.shape[1:]))
            self._ring = ImageRing(self.device, batch_size, self._image_size(stage), self._pad)
            self.version += 1
        self._pool = replace(self._pool, padded=self._ring.images)

    @contextmanager
    def feeding(
        self, stage: Stage, plan: BatchPlan, planned: BatchPlan, parts: Sequence[slice], first: int = 0
    ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Bring the images of a plan's steps to the device; yield a function that gives a context for each step.

        Resident images are there already.

        plan: on the device. planned: the same on the CPU. parts: the columns of each step that this process reads.
        first: the first step that is taken.
        """
        if not self.streamed:
            yield nullcontext
            return
        ring = self._ring
        assert ring is not None
        assert plan.places is not None
        ring.divide(max(part.stop - part.start for part in parts))
        copy_ahead(plan.places, ring.places(ring.next - first, parts, planned.rows.shape[1]))
        images, threads, rows = ImageRows.of(stage.pool.images), None, planned.rows
        if self.photographs is not None and planned.crops is not None:
            files = stage.pool.sources[rows].flatten()
            images, threads = PlannedCrops(self.photographs, files, planned.crops.flatten(0, 1)), decoding_threads()
            rows = torch.arange(rows.numel()).view_as(rows)
        elif self.photographs is not None:
            images = CentralParts(images)
        feed = ImageFeed(ring, images, [rows[step, parts[step]] for step in range(first, len(parts))], threads)
        try:
            yield feed.next_batch
        finally:
            feed.close()

    def batch_images(self, stage: Stage, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Padded images on the device and the places in them of these rows of the pool, for a step on its own."""
        if not self.streamed:
            return self.pool(stage).padded, rows.to(self.device)
        padded = pad_images(read_pixels(stage.pool.images[rows]).to(self.device), self._pad)
        return padded, torch.arange(len(rows), device=self.device)

    def _image_size(self, stage: Stage) -> tuple[int, int]:
        """Height and width of the stage's images on the device, without their border."""
        height, width = stage.pool.images.shape[1:3]
        return (height, width) if self.photographs is None else self._seen

    def _capacity(self, count: int, image_bytes: int) -> int:
        """Rows for a pool of that many images: a small one has some to spare, a large one shrinks if half is unused."""
        held = 0 if self._pool is None else len(self._pool.labels)
        if count > held:
            return count if not held or count * image_bytes >= LARGE else max(count, int(GROWTH * held))
        return count if held * image_bytes >= LARGE and 2 * count <= held else held

    def _load_pool(self, stage: Stage) -> None:
        samples, pad, count = stage.pool, self._pad, len(stage.pool)
        height, width = (side + 2 * pad for side in self._image_size(stage))
        pool, capacity = self._pool, self._capacity(count, 0 if self.streamed else height * width * 3)
        resident = 0 if self.streamed else capacity
        like_before = None if pool is None else (*pool.padded.shape[1:3], len(pool.labels), self._is_streamed)
        if pool is None or like_before != (height, width, capacity, self.streamed):
            self._pool = self._ring = pool = None  # free the old one first
            self._pool = pool = DevicePool(
                torch.zeros(resident, height, width, 3, dtype=torch.uint8, device=self.device),
                torch.zeros(capacity, dtype=torch.int64, device=self.device),
                torch.zeros(capacity, dtype=torch.bool, device=self.device),
                torch.zeros(capacity, dtype=torch.int64, device=self.device),
            )
            self._is_streamed = self.streamed
            self.version += 1
        some = max(1, PART // (height * width * 3))
        for start in range(0, 0 if self.streamed else count, some):
            part = pad_images(read_pixels(samples.images[start : start + some]).to(self.device), pad)
            pool.padded[start : start + len(part)] = part
        pool.labels[:count] = samples.labels.to(self.device)
        pool.exemplar[:count] = samples.exemplar.to(self.device)
        pool.ids[:count] = samples.sources.to(self.device)
        self._stage = stage
        self.load_image_state(stage)

    def load_image_state(self, stage: Stage) -> None:
        """Copy the pool's tensors kept per image to the device."""
        pool = self.pool(stage)
        for name, value in stage.pool.state.items():
            present = pool.state.get(name)
            if present is None or present.shape[1:] != value.shape[1:]:
                present = pool.state[name] = torch.zeros(len(pool.labels), *value.shape[1:], device=self.device)
                self.version += 1
            present[: len(value)] = value.to(self.device)

    def save_image_state(self, stage: Stage) -> None:
        """Copy the tensors kept per image from the device back to the pool."""
        if self._pool is not None and self._stage is stage:
            for name, value in stage.pool.state.items():
                value.copy_(self._pool.state[name][: len(value)])

    def plan(self, steps: int, batch_size: int) -> BatchPlan:
        """A plan to load the batches of at least one epoch into; with places, if the images are streamed."""
        plan = self._plans.get(batch_size)
        if plan is None or len(plan) < steps:
            if plan is not None:
                self.version += 1
            planned = max(PLANNED_STEPS, steps)
            plan = self._plans[batch_size] = BatchPlan.allocate(planned, batch_size, self.device, self._numbers)
            if len(self.history) < planned:
                self.history = torch.zeros(planned, TERMS, device=self.device)
                self.version += 1
        if not self.streamed:
            return plan
        places = self._places.get(batch_size)
        if places is None or len(places) < len(plan):
            places = self._places[batch_size] = torch.zeros_like(plan.rows)
            self.version += 1
        return replace(plan, places=places)

    def arrival(self, stage: Stage, capacity: int) -> Tensor:
        """The stage that each class came with, (capacity,); also sets the current stage."""
        if len(self._arrival) != capacity:
            self._arrival = torch.zeros(capacity, dtype=torch.int64, device=self.device)
            self.version += 1
        self._arrival.copy_(stage.arrival(capacity))
        self.stage.fill_(stage.index)
        return self._arrival

    def weights(self, values: Mapping[str, float]) -> dict[str, Tensor]:
        """The loss weights of a phase, by name, ()."""
        for name, value in values.items():
            if name not in self._weights:
                self._weights[name] = torch.zeros((), device=self.device)
            self._weights[name].fill_(value)
        return {name: self._weights[name] for name in values}
