"""The plain loop against engram's step, on the same device in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.ground import KINDS, TITLES, Ground, Kind
from benchmarks.plain import PlainSteps, usable_workers
from benchmarks.report import Table, number, with_spread
from benchmarks.timing import forget_memory, peak_memory, per_step, time_together
from engram.kernels import availability as kernels


def measure_plain(ground: Ground, step: dict[str, Any] | None) -> dict[str, Any]:
    """The plain loop with and without workers, for both kinds of step, and its ratio to what the step part found."""
    entries: list[dict[str, Any]] = []
    counts = sorted({usable_workers(ground.scale.workers), 0}, reverse=True)
    with _as_torch_is():
        for kind in KINDS:
            for workers in counts:
                entry = _measure(ground, kind, workers)
                ours = None if step is None else _one_run(step, kind)
                entry["ratio_to_engram"] = None if ours is None else entry["ms"]["median"] / ours
                entries.append(entry)
    return {"precision": "float32", "tf32_convolutions": True, "steps": ground.scale.steps, "loops": entries}


def _measure(ground: Ground, kind: Kind, workers: int) -> dict[str, Any]:
    scale, device = ground.scale, ground.device
    prepared = ground.at(kind)
    forget_memory(device)
    plain = PlainSteps(prepared, workers, scale.warm_up + scale.steps * scale.repetitions)
    plain.take(scale.warm_up)
    seconds = time_together([plain], scale.steps, scale.repetitions)
    batch_size = plain.loader.batch_size
    assert batch_size is not None
    timed = per_step(seconds, 1, scale.steps, batch_size)
    return {"kind": kind, "workers": workers, "batch_size": batch_size, **timed, "memory": peak_memory(device)}


def _one_run(step: dict[str, Any], kind: Kind) -> float | None:
    """engram's milliseconds per step for one run, if one run was measured."""
    entries = step.get(kind, {}).get("at_once", [])
    return next((entry["ms"]["median"] for entry in entries if entry["runs"] == 1), None)


@contextmanager
def _as_torch_is() -> Iterator[None]:
    """torch's own setting of TF32, which engram's engine turns off, cuDNN's search, and heads and losses by torch."""
    backend = torch.backends.cudnn
    before = backend.allow_tf32, backend.benchmark, kernels.is_available_for
    backend.allow_tf32, backend.benchmark, kernels.is_available_for = True, True, lambda tensor: False
    try:
        yield
    finally:
        backend.allow_tf32, backend.benchmark, kernels.is_available_for = before


def plain_tables(result: dict[str, Any]) -> list[Table]:
    """The table of this part."""
    rows = [
        [
            TITLES[entry["kind"]],
            str(entry["workers"]),
            with_spread(entry["ms"], 2),
            number(entry["images_per_second"]["median"], 0),
            "-" if entry["ratio_to_engram"] is None else f"{entry['ratio_to_engram']:.1f}",
        ]
        for entry in result["loops"]
    ]
    header = ["step", "workers", "ms per step", "images/s", "times engram's step (one run)"]
    repetitions = result["loops"][0]["ms"]["n"]
    note = (
        "The same training as a plain PyTorch loop: float32 (convolutions in TF32, torch's default), eager, the loss "
        f"read every step. Median (least to most) of {repetitions} repetitions of {result['steps']} steps."
    )
    return [Table("A plain PyTorch loop", header, rows, note)]
