"""Where a step's time goes on the device: kernels by kind, and the gaps between them."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.ground import KINDS, TITLES, Ground, Kind
from benchmarks.report import Table, number, percent
from benchmarks.timing import EngineSteps, synchronise
from engram.core.errors import EngramError

OTHER = "other"
TOP = 15

# The first pattern found in a kernel's name, in any case, gives its kind. engram's own kernels are named for what they
# do; inductor's (triton_*) name the operations fused into them; then cuDNN and CUTLASS, cuBLAS, and torch's own. The
# last words on operations (aten::) are for a CPU, where there are no kernels.
TABLE: tuple[tuple[str, str], ...] = (
    ("distillation loss", r"engram_\w*(distance|distil|discrepancy)"),
    ("head and classification", r"engram_\w*(head|nca|classif|prox|logit|score)"),
    ("optimiser", r"engram_\w*(sgd|optimis|momentum|update)"),
    ("augmentation and gather", r"engram_\w*(augment|gather|crop)"),
    (
        "convolution, weight gradient",
        r"engram_conv\w*weight_grad|engram_sum_splits|wgrad|conv\w*_(bwd|backward)_?(filter|weight)",
    ),
    ("convolution, data gradient", r"engram_conv\w*(data|input)_grad|dgrad|conv\w*_(bwd|backward)_?(data|input)"),
    ("convolution, both gradients", r"engram_conv\w*(backward|gradient)|convolution_backward"),
    ("copies and casts", r"engram_\w*(cast|copy|pack)"),
    ("batch norm", r"engram_\w*(norm|statist|relu|shortcut|add|scale|pool|mean)"),
    (
        "convolution, forward",
        r"engram_conv|fprop|implicit_?(convolve|gemm|sgemm)|winograd|conv(olution)?_?(fwd|forward)",
    ),
    ("convolution, forward", r"mkldnn_convolution|thnn_conv|slow_conv|cudnn_convolution|depthwise_fwd"),
    ("distillation loss", r"triton_\w*vector_norm|NormTwoOps|linalg_vector_norm"),
    ("optimiser", r"multi_tensor_apply|triton_\w*clamp\w*(addcmul|mul)|addcmul|foreach"),
    (
        "augmentation and gather",
        r"index_select|indexSelect|index_kernel|index_elementwise|gather|index_copy|aten::index",
    ),
    ("batch norm", r"batch_?norm|\bbn_(fw|bw)|bnorm|triton_\w*(relu|constant_pad)|threshold"),
    (
        "head and classification",
        r"softmax|gemm|gemv|nvjet|cublas|splitK|triton_\w*(logsumexp|exp|log)|aten::(add)?b?mm",
    ),
    ("copies and casts", r"memcpy|memset|copy_kernel|aten::copy|nchwTonhwc|nhwcTonchw|convert|triton_\w*_to_copy|fill"),
    ("elementwise and reductions", r"elementwise|reduce|aten::(add|mul|sub|div|relu|clamp_min|constant_pad)|triton_"),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in TABLE)
ORDER = (
    "convolution, forward",
    "convolution, data gradient",
    "convolution, weight gradient",
    "convolution, both gradients",
    "batch norm",
    "distillation loss",
    "head and classification",
    "elementwise and reductions",
    "optimiser",
    "augmentation and gather",
    "copies and casts",
    OTHER,
)


def kind_of(name: str) -> str:
    """The kind of work that a kernel does, by its name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)


@dataclass(frozen=True)
class Kernel:
    """One kernel as the profiler saw it, in microseconds; `busy` is its own time, that of what it calls left out."""

    name: str
    start: float
    end: float
    busy: float


def breakdown(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Microseconds and kernels a step, by kind and by name.

    wall_us: from the first kernel's start to the last one's end. gaps_us: that less the time in which some kernel ran,
    so that kernels side by side are not counted twice.
    """
    by_kind: dict[str, list[float]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_kind[kind_of(kernel.name)].append(kernel.busy)
        by_name[kernel.name].append(kernel.busy)
    total = sum(kernel.busy for kernel in kernels)
    wall = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)

    def entry(busy: list[float]) -> dict[str, float]:
        return {"count": len(busy) / steps, "us": sum(busy) / steps, "share": sum(busy) / total if total else 0.0}

    top = sorted(by_name, key=lambda name: -sum(by_name[name]))[:TOP]
    return {
        "steps": steps,
        "kernels": len(kernels) / steps,
        "wall_us": wall / steps,
        "kernels_us": total / steps,
        "gaps_us": (wall - _covered(kernels)) / steps,
        "kinds": {kind: entry(by_kind[kind]) for kind in ORDER if kind in by_kind},
        "top": [{"name": name, "kind": kind_of(name), **entry(by_name[name])} for name in top],
    }


def _covered(kernels: Iterable[Kernel]) -> float:
    """The length of the union of the kernels' spans."""
    covered, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        covered += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return covered


def profiled(taker: EngineSteps, steps: int) -> list[Kernel]:
    """The kernels of so many steps; on a CPU, where there are none, the operations."""
    on_gpu = taker.device.type == "cuda"
    taker.wait()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as record:
        taker.take(steps)
        synchronise(taker.device)
    wanted = "CUDA" if on_gpu else "CPU"
    kernels: list[Kernel] = []
    for event in record.events() or []:
        if event.device_type.name != wanted or getattr(event, "is_user_annotation", False):
            continue
        span = event.time_range
        busy = span.elapsed_us() if on_gpu else event.self_cpu_time_total
        kernels.append(Kernel(event.name, span.start, span.end, busy))
    return kernels


def measure_kernels(ground: Ground) -> dict[str, Any]:
    """The breakdown of both kinds of step for one run."""
    return {kind: _measure_kind(ground, kind) for kind in KINDS}


def _measure_kind(ground: Ground, kind: Kind) -> dict[str, Any]:
    scale = ground.scale
    prepared = ground.at(kind)
    per_epoch, _ = prepared.phase.training.batches(prepared.phase.images)
    taker = EngineSteps(prepared, 2 + max(scale.warm_up, per_epoch + 1) + 2 * scale.profiled_steps)
    taker.take(max(scale.warm_up, per_epoch + 1))
    taker.wait()
    started = time.perf_counter()
    taker.take(scale.profiled_steps)
    taker.wait()
    unprofiled = 1e6 * (time.perf_counter() - started) / scale.profiled_steps
    profiled(taker, 1)  # the profiler's own start is not to be seen
    kernels = profiled(taker, scale.profiled_steps)
    if not kernels:
        raise EngramError(
            "the profiler saw no kernel of the steps; end other profilers, or leave the part 'kernels' out"
        )
    return {**breakdown(kernels, scale.profiled_steps), "unprofiled_us": unprofiled}


def kernels_tables(result: dict[str, Any]) -> list[Table]:
    """A table by kind and one of the largest kernels, for each kind of step."""
    tables: list[Table] = []
    for step in KINDS:
        part = result[step]
        rows = [
            [kind, number(entry["count"], 1), number(entry["us"], 1), percent(entry["share"])]
            for kind, entry in part["kinds"].items()
        ]
        rows.append(["**all**", number(part["kernels"], 1), number(part["kernels_us"], 1), ""])
        rows.append(["gaps", "", number(part["gaps_us"], 1), ""])
        note = (
            f"{number(part['wall_us'], 0)} µs a step while profiled, {number(part['unprofiled_us'], 0)} without; "
            f"{part['steps']} steps of one run."
        )
        header = ["kind", "kernels a step", "µs a step", "share of the kernels' time"]
        tables.append(Table(f"Kernels of a step, {TITLES[step]}", header, rows, note))
        top = [
            [f"`{entry['name'][:100]}`", entry["kind"], number(entry["count"], 1), number(entry["us"], 1)]
            for entry in part["top"]
        ]
        header = ["kernel", "kind", "a step", "µs a step"]
        tables.append(Table(f"The {len(top)} largest, {TITLES[step]}", header, top))
    return tables
