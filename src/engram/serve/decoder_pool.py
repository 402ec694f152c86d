"""Images of requests are decoded in processes that may die of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engram.data.decode.image import Images
from engram.data.decode.prefetch import Decoders, File
from engram.serve.limits import Limits

TOGETHER = 16  # most small files that a process is given at once


@dataclass(eq=False)
class _Job:
    """Some files of one request."""

    files: Sequence[File]
    size: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Images | str]] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()

    @property
    def is_small(self) -> bool:
        """Whether it may be given to a process together with others: only small files are held in memory."""
        return len(self.files) == 1 and not isinstance(self.files[0], str)


class DecoderPool:
    """Decodes files of requests in processes that may die of them.

    A thread for each process gives it what waits. Small files of several requests are given to it together: most of the
    work on one of them would be asking for it. A process gets at most its share of what waits, so no other is idle.
    """

    def __init__(self, limits: Limits, workers: int | None = None) -> None:
        self._count = workers or min(16, max(2, os.cpu_count() or 1))
        self._decoders = Decoders(self._count, 32, limits.decode_seconds)
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"decode-{number}", daemon=True) for number in range(self._count)
        ]
        for thread in self._threads:
            thread.start()

    async def decode(self, files: Sequence[File], size: int) -> list[Images | str]:
        """Return the central square of each image, or the reason why it cannot be read."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(files[at : at + 4], size, loop) for at in range(0, len(files), 4)]
        with self._wake:
            self._jobs += jobs
            self._wake.notify(len(jobs))
        if len(jobs) == 1:
            return await jobs[0].future
        return [each for found in await asyncio.gather(*(job.future for job in jobs)) for each in found]

    def close(self) -> None:
        """End the processes."""
        with self._wake:
            self._closed = True
            self._jobs.clear()
            self._wake.notify_all()
        self._decoders.close()
        for thread in self._threads:
            thread.join()

    def _take(self) -> list[_Job]:
        """Wait for jobs; return one, or several small ones of the same size. Nothing: closed."""
        with self._wake:
            while not self._jobs and not self._closed:
                self._wake.wait()
            if self._closed:
                return []
            most = min(TOGETHER, -(-len(self._jobs) // self._count))
            taken = [self._jobs.popleft()]
            while len(taken) < most and taken[0].is_small and self._jobs[0].is_small:
                if self._jobs[0].size != taken[0].size:
                    break
                taken.append(self._jobs.popleft())
            return taken

    def _run(self) -> None:
        while jobs := self._take():
            found: list[Images | str] | Exception
            try:
                images, reasons = self._decoders.decode([file for job in jobs for file in job.files], jobs[0].size)
                read = iter(images)
                found = [next(read) if reason is None else reason for reason in reasons]
            except Exception as error:  # every waiting request gets the error, and the thread continues
                found = error
            at, pairs = 0, list[tuple[_Job, list[Images | str] | Exception]]()
            for job in jobs:
                pairs.append((job, found if isinstance(found, Exception) else found[at : at + len(job.files)]))
                at += len(job.files)
            by_loop = {job.loop: [pair for pair in pairs if pair[0].loop is job.loop] for job in jobs}
            for loop, own in by_loop.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_deliver, own)


def _deliver(pairs: Sequence[tuple[_Job, list[Images | str] | Exception]]) -> None:
    """Set the results, in the thread of the event loop."""
    for job, found in pairs:
        if job.future.done():  # the client has gone
            continue
        if isinstance(found, Exception):
            job.future.set_exception(found)
        else:
            job.future.set_result(found)
