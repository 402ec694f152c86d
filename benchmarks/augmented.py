"""What strong augmentation adds to a step: the same step with each policy, and without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.ground import KINDS, TITLES, Ground
from benchmarks.report import Table, number, with_spread
from benchmarks.step import measure_step

PLAIN = "plain"
POLICIES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "trivial": {"policy": "trivial"},
    "trivial, cutout": {"policy": "trivial", "cutout": 8},
    "rand": {"policy": "rand"},
    "auto": {"policy": "auto"},
}


def measure_augmented(ground: Ground) -> dict[str, Any]:
    """The step with each policy, in one process, so that their ratios can be compared."""
    found: dict[str, Any] = {}
    for name, changes in POLICIES.items():
        augmentation = replace(ground.config.augmentation, **changes)
        found[name] = measure_step(
            Ground(ground.scale, ground.store, replace(ground.config, augmentation=augmentation))
        )
    return found


def augmented_tables(result: dict[str, Any]) -> list[Table]:
    """The tables of this part."""
    rows: list[list[str]] = []
    for name in POLICIES:
        for kind in KINDS:
            for plain, entry in zip(result[PLAIN][kind]["at_once"], result[name][kind]["at_once"], strict=True):
                ratio = entry["ms"]["median"] / plain["ms"]["median"]
                rows.append([name, TITLES[kind], str(entry["runs"]), with_spread(entry["ms"], 3), number(ratio, 3)])
    header = ["augmentation", "step", "runs at once", "ms per run and step", "times plain"]
    return [Table("A step with augmentation", header, rows)]
