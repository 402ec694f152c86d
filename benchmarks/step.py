"""The step: milliseconds and images a second, for one run and for several at once."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ground import KINDS, TITLES, Ground, Kind
from benchmarks.report import Table, mebibytes, number, with_spread
from benchmarks.timing import EngineSteps, forget_memory, peak_memory, per_step, spread, time_together

SETTLE = 5  # steps of every run before each measurement, so that none begins cold


def measure_step(ground: Ground) -> dict[str, Any]:
    """Both kinds of step, for every number of runs at once."""
    return {kind: _measure_kind(ground, kind) for kind in KINDS}


def _measure_kind(ground: Ground, kind: Kind) -> dict[str, Any]:
    """Runs are added one by one, so that memory is that of the runs measured; each warms up past an epoch's end."""
    scale, device = ground.scale, ground.device
    counts = sorted(set(scale.runs))
    needed = 1 + scale.warm_up + len(counts) * (SETTLE + scale.steps * scale.repetitions)
    if kind == "teacher":
        _ = ground.after_base  # made before the memory is counted
    takers: list[EngineSteps] = []
    at_once: list[dict[str, Any]] = []
    for count in counts:
        forget_memory(device)
        while len(takers) < count:
            prepared = ground.at(kind, seed=1 + len(takers))
            per_epoch, _ = prepared.phase.training.batches(prepared.phase.images)
            takers.append(EngineSteps(prepared, needed + per_epoch))
            takers[-1].take(max(scale.warm_up, per_epoch + 1))
            takers[-1].wait()
        for taker in takers:
            taker.take(SETTLE)
        seconds = time_together(takers, scale.steps, scale.repetitions)
        timed = per_step(seconds, count, scale.steps, takers[0].loop.batch_size)
        at_once.append({"runs": count, **timed, "memory": peak_memory(device)})
    later = [taker.seconds_before for taker in takers[1:]]
    return {
        "batch_size": takers[0].loop.batch_size,
        "steps_per_epoch": takers[0].loop.steps,
        "steps": scale.steps,
        "precision": takers[0].prepared.session.engine.precision,
        "weights_finite": all(_finite(taker) for taker in takers),
        "seconds_before_first_step": {"first_run": takers[0].seconds_before, "later": spread(later) if later else None},
        "at_once": at_once,
    }


def _finite(taker: EngineSteps) -> bool:
    """Whether the weights are numbers still; if not, the step is at fault, or random images are too much for it."""
    return all(bool(torch.isfinite(value).all()) for value in taker.prepared.session.learner.network.parameters())


def step_tables(result: dict[str, Any]) -> list[Table]:
    """The tables of this part."""
    rows: list[list[str]] = []
    before: list[list[str]] = []
    for kind in KINDS:
        part = result[kind]
        for entry in part["at_once"]:
            memory = entry["memory"] or {}
            rows.append(
                [
                    TITLES[kind],
                    str(entry["runs"]),
                    with_spread(entry["ms"], 3),
                    number(entry["images_per_second"]["median"], 0),
                    mebibytes(memory.get("allocated")),
                    mebibytes(memory.get("reserved")),
                ]
            )
        start = part["seconds_before_first_step"]
        later = "-" if start["later"] is None else with_spread(start["later"], 2)
        before.append([TITLES[kind], number(start["first_run"], 2), later])
    first = result[KINDS[0]]
    header = ["step", "runs at once", "ms per run and step", "images/s, all runs", "peak MiB in use", "peak MiB held"]
    repetitions = first["at_once"][0]["ms"]["n"]
    note = (
        f"Batch {first['batch_size']}, {first['precision']}. "
        f"Median (least to most) of {repetitions} repetitions of {first['steps']} steps."
    )
    spoilt = [TITLES[kind] for kind in KINDS if not result[kind]["weights_finite"]]
    if spoilt:
        note += f" The weights did not stay finite ({'; '.join(spoilt)}): look for the fault before using these times."
    return [
        Table("A step", header, rows, note),
        Table("Seconds before the first step", ["step", "first run in the process", "later runs"], before),
    ]
