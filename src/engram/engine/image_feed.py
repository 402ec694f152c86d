"""Streaming of images: a thread copies those of the next batches into a ring on the device, ahead of the steps.

The ring keeps its address, and a step finds its images through the plan (`BatchPlan.places`). So a recorded step is the
same whether the images of a stage are all on the device or streamed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from engram.data.image_rows import Readable

# Batches in the ring. On a GPU the host is up to 80 steps ahead of the device (see STRIDES in loop.py).
RING_BATCHES = {"cpu": 4, "cuda": 96}
STAGED_BATCHES = 8  # on the host in pinned memory, on their way to a GPU; more than DECODED_BATCHES
READERS = {"cpu": 1, "cuda": 4}  # threads that copy the images of a batch
DECODED_BATCHES = 4  # decoded at the same time, so that no thread waits for the last image of a batch


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

    def places(self, first: int, parts: Sequence[slice], width: int) -> Tensor:
        """int64 (batches, width): the places of the images of batches from a slot on.

        parts: the columns of each batch that are brought; the places of others mean nothing. width: of the batches.
        """
        slots = (first + torch.arange(len(parts))) % self.slots
        columns = torch.arange(width) - torch.tensor([part.start for part in parts])[:, None]
        return slots[:, None] * self.batch_size + columns.clamp(0, self.batch_size - 1)


class ImageFeed:
    """Brings the images of some batches to a ring, in order, in a thread of its own.

    batches: for each step the rows of its images. threads: that decode the images, each a part of every batch; None:
    the images are copied, by READERS. Close it when no further step is taken.
    """

    def __init__(
        self, ring: ImageRing, images: Readable, batches: Sequence[Tensor], threads: int | None = None
    ) -> None:
        self._ring, self._images, self._batches = ring, images, batches
        self._threads = READERS[ring.device.type] if threads is None else threads
        self._decodes = threads is not None
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
        ring, slot = self._ring, self._slot(self._taken)
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
        self._ring.next = self._slot(self._taken)

    def _bring_all(self) -> None:
        begun: deque[tuple[int, list[Future[None]]]] = deque()  # batches that are being read, the oldest first
        most = DECODED_BATCHES if self._decodes else 1
        try:
            with ThreadPoolExecutor(self._threads) as readers:
                try:
                    for number in range(len(self._batches)):
                        while begun and (len(begun) == most or not self._has_place(number)):
                            self._finish(*begun.popleft())
                        with self._changed:
                            self._changed.wait_for(lambda n=number: self._closed or self._has_place(n))
                            if self._closed:
                                return
                        begun.append((number, self._begin(number, readers)))
                    while begun:
                        self._finish(*begun.popleft())
                finally:
                    for _, reading in begun:
                        for each in reading:
                            each.cancel()
        except BaseException as error:  # raised by the step that waits for the images
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_place(self, number: int) -> bool:
        """Whether the slot of a batch is free: the step that used it last was taken."""
        return number - self._taken < self._ring.slots

    def _begin(self, number: int, readers: ThreadPoolExecutor) -> list[Future[None]]:
        """Begin to read the images of a batch."""
        ring, rows = self._ring, self._batches[number]
        if ring.is_cuda and number >= self._staged:  # the copy that used this part of the staging memory last
            ring.arrived[(self._first + number - self._staged) % ring.slots].synchronize()
        pieces = zip(self._read_to(number).chunk(self._threads), rows.chunk(self._threads), strict=True)
        return [readers.submit(self._read, *piece) for piece in pieces]

    def _finish(self, number: int, reading: Sequence[Future[None]]) -> None:
        """Wait until a batch is read, and bring it to its slot."""
        ring, slot = self._ring, self._slot(number)
        for done in reading:
            done.result()
        if ring.is_cuda:
            ring.read[slot].synchronize()  # an event that was never recorded does not wait
            with torch.cuda.stream(ring.copying):
                self._part_of(ring.images, slot, number).copy_(self._read_to(number), non_blocking=True)
                ring.arrived[slot].record()
        with self._changed:
            self._brought += 1
            self._changed.notify_all()

    @property
    def _staged(self) -> int:
        """The number of batches that the staging memory holds."""
        return len(self._ring.staging) // self._ring.batch_size

    def _slot(self, number: int) -> int:
        return (self._first + number) % self._ring.slots

    def _part_of(self, images: Tensor, slot: int, number: int) -> Tensor:
        """The images of a batch that is in a slot."""
        start = slot * self._ring.batch_size
        return images[start : start + len(self._batches[number])]

    def _read_to(self, number: int) -> Tensor:
        """Where a batch is read to: its slot, or on its way to a GPU the staging memory."""
        if self._ring.is_cuda:
            return self._part_of(self._ring.staging, number % self._staged, number)
        return self._part_of(self._ring.images, self._slot(number), number)

    def _read(self, padded: Tensor, rows: Tensor) -> None:
        """Read the images of these rows into padded ones; their border stays black."""
        pad, inner = self._ring.pad, padded.numpy()
        if pad:
            inner = inner[:, pad:-pad, pad:-pad]
        self._images[rows].read_into(inner)
