"""Streaming of images: a thread copies those of the next batches into a ring on the device, ahead of the steps.

The ring keeps its address, and a step finds its images through the plan (`BatchPlan.places`). So a recorded step is the
same whether the images of a stage are all on the device or streamed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from engram.data.image_rows import ImageRows, Pixels

# Batches in the ring. On a GPU the host is up to 80 steps ahead of the device (see STRIDES in loop.py).
RING_BATCHES = {"cpu": 4, "cuda": 96}
STAGED_BATCHES = 8  # on the host in pinned memory, on their way to a GPU
READERS = 4  # threads that read the images of a batch for a GPU


class ImageRing:
    """Places for the images of the next batches, with their border.

    images: uint8 (places, H + 2 pad, W + 2 pad, 3) on the device, divided into slots, one for each batch. largest: the
    batch size that it was made for.
    """

    def __init__(self, device: torch.device, batch_size: int, size: tuple[int, int], pad: int) -> None:
        height, width = size
        self.device, self.pad, self.largest = device, pad, batch_size
        shape = (height + 2 * pad, width + 2 * pad, 3)
        places = RING_BATCHES[device.type] * batch_size
        self.images = torch.zeros(places, *shape, dtype=torch.uint8, device=device)
        self.batch_size = self.slots = 0
        self.next = 0  # the slot of the next batch
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self.staging = torch.zeros(STAGED_BATCHES * batch_size, *shape, dtype=torch.uint8).pin_memory()
            self.copying = torch.cuda.Stream(device)  # of the lowest priority: no run or recording uses such a stream
        # By slot: its images have arrived; the last step that read it has ended.
        self.arrived: list[torch.cuda.Event] = []
        self.read: list[torch.cuda.Event] = []

    def divide(self, batch_size: int) -> None:
        """Divide the ring into slots for batches of that size."""
        if batch_size == self.batch_size:
            return
        self.batch_size, self.slots, self.next = batch_size, len(self.images) // batch_size, 0
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()  # no step reads the old slots any longer
            self.arrived = [torch.cuda.Event() for _ in range(self.slots)]
            self.read = [torch.cuda.Event(blocking=True) for _ in range(self.slots)]

    def places(self, first: int, count: int) -> Tensor:
        """int64 (count, batch_size): the places of that many batches from a slot on."""
        slots = (first + torch.arange(count)) % self.slots
        return slots[:, None] * self.batch_size + torch.arange(self.batch_size)


class ImageFeed:
    """Brings the images of some batches to a ring, in order, in a thread of its own.

    batches: for each step the rows of its images. Close it when no further step is taken.
    """

    def __init__(self, ring: ImageRing, images: Pixels, batches: Sequence[Tensor]) -> None:
        self._ring, self._images, self._batches = ring, ImageRows.of(images), batches
        self._first, ring.next = ring.next, (ring.next + len(batches)) % ring.slots
        self._changed = threading.Condition()
        self._brought = self._taken = 0  # batches
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._bring_all, name="images", daemon=True)
        self._thread.start()

    @contextmanager
    def next_batch(self) -> Iterator[None]:
        """Take the next step inside this context: its images are there, and are not replaced before it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._brought > self._taken or self._error is not None)
            if self._brought == self._taken:
                assert self._error is not None
                raise self._error
        ring, slot = self._ring, (self._first + self._taken) % self._ring.slots
        if ring.is_cuda:
            torch.cuda.current_stream(ring.device).wait_event(ring.arrived[slot])
        yield
        if ring.is_cuda:
            ring.read[slot].record(torch.cuda.current_stream(ring.device))
        with self._changed:
            self._taken += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; batches that were not taken are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._ring.is_cuda:
            self._ring.copying.synchronize()  # the next feed uses the staging memory, and the ring may be freed
        self._ring.next = (self._first + self._taken) % self._ring.slots

    def _bring_all(self) -> None:
        try:
            with ThreadPoolExecutor(READERS if self._ring.is_cuda else 1) as readers:
                for number, rows in enumerate(self._batches):
                    with self._changed:
                        self._changed.wait_for(lambda n=number: self._closed or n - self._taken < self._ring.slots)
                        if self._closed:
                            return
                    self._bring((self._first + number) % self._ring.slots, number, rows, readers)
                    with self._changed:
                        self._brought += 1
                        self._changed.notify_all()
        except BaseException as error:  # raised by the step that waits for the images
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _bring(self, slot: int, number: int, rows: Tensor, readers: ThreadPoolExecutor) -> None:
        """Copy the images of batch `number` into a slot."""
        ring, size = self._ring, self._ring.batch_size
        target = ring.images[slot * size : slot * size + len(rows)]
        if not ring.is_cuda:
            self._read(target, rows)
            return
        staged = len(ring.staging) // size
        if number >= staged:  # the copy that used this part of the staging memory last
            ring.arrived[(self._first + number - staged) % ring.slots].synchronize()
        place = number % staged * size
        part = ring.staging[place : place + len(rows)]
        pieces = zip(part.chunk(READERS), rows.chunk(READERS), strict=True)
        for done in [readers.submit(self._read, *piece) for piece in pieces]:
            done.result()
        ring.read[slot].synchronize()  # an event that was never recorded does not wait
        with torch.cuda.stream(ring.copying):
            target.copy_(part, non_blocking=True)
            ring.arrived[slot].record()

    def _read(self, padded: Tensor, rows: Tensor) -> None:
        """Read the images of these rows into padded ones; their border stays black."""
        pad, inner = self._ring.pad, padded.numpy()
        if pad:
            inner = inner[:, pad:-pad, pad:-pad]
        self._images[rows].read_into(inner)
