"""Capture: on a GPU a step is a thousand small kernels; recorded once as a CUDA graph, it is replayed as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 3


class CapturedStep:
    """A step recorded as a CUDA graph. Calling it replays the recording on whatever its tensors hold then.

    The step must read and write only tensors that keep their place. `state` lists what it changes: warming up takes
    real steps, and their effect is taken back.
    """

    def __init__(self, step: Callable[[], None], state: Sequence[Tensor]) -> None:
        saved = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
                restore()  # each time: a phase may have fewer steps than the warm-up takes
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()
        restore()

    def __call__(self) -> None:
        self._graph.replay()
