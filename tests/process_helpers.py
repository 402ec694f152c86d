"""Groups of processes on one machine, as torchrun starts them, for tests; cheap, because a server imports torch once.

In these processes float32 is float64: the numbers of one process and of several then differ by 1e-10 and not by 1e-2,
so that a test can tell rounding from a mistake.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

PRELOADED = "float64_engram"
LIMIT = 600.0  # seconds


def fork_server(preload: str) -> ForkServerContext:
    """A context whose processes are forked from one that has imported this module, and no other test's."""
    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver
    if server._preload_modules != [preload]:
        server._stop()
        context.set_forkserver_preload([preload])
    return context


def _work(pipe: Connection, rank: int, count: int, port: int, function: Callable[..., Any], given: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("error")
    try:
        assert PRELOADED in sys.modules
        pipe.send((True, function(*given)))
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Group:
    """Processes that run one function."""

    def __init__(self, count: int, function: Callable[..., Any], *given: Any, each: Sequence[Any] = ()) -> None:
        """each: one more argument, another for each process."""
        context = fork_server(PRELOADED)
        with pytest.MonkeyPatch.context() as patch:
            paths = (str(Path(__file__).parent), *sys.path)
            patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
            forkserver.ensure_running()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pipes: list[Any] = []
        self.processes = []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            own = (*given, *each[rank : rank + 1])
            process = context.Process(target=_work, args=(theirs, rank, count, port, function, own), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def results(self) -> list[tuple[bool, Any]]:
        """Of every process, whether its function returned, and the value or the error; None if it was killed."""
        found: list[tuple[bool, Any]] = [(False, None)] * len(self._pipes)
        end, open_pipes = time.monotonic() + LIMIT, dict(enumerate(self._pipes))
        while open_pipes:
            ready = wait(list(open_pipes.values()), timeout=end - time.monotonic())
            if not ready:
                for process in self.processes:
                    process.kill()
                raise TimeoutError(f"processes {sorted(open_pipes)} did not end: {found}")
            for rank, pipe in list(open_pipes.items()):
                if pipe in ready:
                    with suppress(EOFError):
                        found[rank] = pipe.recv()
                    del open_pipes[rank]
        for process in self.processes:
            process.join()
        return found


def values(group: Group) -> list[Any]:
    """What every process returned; an error in one is an error here."""
    found = group.results()
    for rank, (is_fine, value) in enumerate(found):
        assert is_fine, f"process {rank}: {value}"
    return [value for _, value in found]
