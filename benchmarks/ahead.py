"""Ahead: one run among others, with the same turns as they and with precedence."""

from __future__ import annotations

from typing import Any

from benchmarks.ground import Ground
from benchmarks.report import Table, with_spread
from benchmarks.step import SETTLE
from benchmarks.timing import EngineSteps, spread, time_each

PRECEDENCE = (0, 1)


def measure_ahead(ground: Ground) -> dict[str, Any]:
    """The steps of one run of the base stage among the most runs at once that are asked for, and of them all."""
    scale, runs = ground.scale, max(ground.scale.runs)
    needed = 1 + scale.warm_up + len(PRECEDENCE) * (SETTLE + scale.steps * scale.repetitions)
    others = [_taker(ground, 2 + number, needed, 0) for number in range(runs - 1)]
    result: dict[str, Any] = {"runs": runs, "steps": scale.steps, "with": {}}
    for ahead in PRECEDENCE:
        takers = [_taker(ground, 1, needed, ahead), *others]
        for taker in takers:
            taker.take(SETTLE)
        repeated = time_each(takers, scale.steps, scale.repetitions)
        one = [1000 * (spans[0][1] - spans[0][0]) / scale.steps for spans in repeated]
        whole = [max(end for _, end in spans) - min(start for start, _ in spans) for spans in repeated]
        every = [1000 * seconds / (runs * scale.steps) for seconds in whole]
        result["with"][str(ahead)] = {"one_ms": spread(one), "all_ms": spread(every)}
    return result


def _taker(ground: Ground, seed: int, steps: int, ahead: int) -> EngineSteps:
    taker = EngineSteps(ground.at("base", seed=seed), steps, ahead)
    taker.take(ground.scale.warm_up)
    taker.wait()
    return taker


def ahead_tables(result: dict[str, Any]) -> list[Table]:
    """The table of this part."""
    rows = [
        [ahead, with_spread(found["one_ms"], 3), with_spread(found["all_ms"], 3)]
        for ahead, found in result["with"].items()
    ]
    note = (
        f"{result['runs']} runs at once, base stage, {result['steps']} steps each. Median (least to most) of "
        f"{next(iter(result['with'].values()))['one_ms']['n']} repetitions."
    )
    return [
        Table("One run ahead of the others", ["its precedence", "ms for its step", "ms per run and step"], rows, note)
    ]
