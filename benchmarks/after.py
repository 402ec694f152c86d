"""What follows a stage's training: the share of the stage's time that each part takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report import Table, number, percent
from benchmarks.runs import AFTER, StageTimes, run_stages
from benchmarks.scale import FULL_EPOCHS, FULL_FINETUNE, Scale, afc_config, store_of

TARGET = 0.05


def measure_after(scale: Scale) -> dict[str, Any]:
    """A short AFC run, its stages extrapolated to full length."""
    config = afc_config(scale, epochs=scale.run_epochs, finetune=scale.run_finetune)
    return summarise_after(run_stages(config, store_of(scale), scale.batch_size), scale)


def summarise_after(stages: Sequence[StageTimes], scale: Scale) -> dict[str, Any]:
    """Seconds and shares by stage and in all. within_target: every part, in the whole run, is."""
    entries = [{"stage": stage.stage, "classes": stage.classes, **_shares([stage])} for stage in stages]
    whole = _shares(stages)
    return {
        "epochs": {"measured": [scale.run_epochs, scale.run_finetune], "extrapolated": [FULL_EPOCHS, FULL_FINETUNE]},
        "target": TARGET,
        "stages": entries,
        "run": whole,
        "largest_share": {kind: max(entry["shares"][kind] for entry in entries) for kind in AFTER},
        "within_target": {kind: whole["shares"][kind] <= TARGET for kind in AFTER},
        "n": 1,
    }


def _shares(stages: Sequence[StageTimes]) -> dict[str, Any]:
    """Seconds by kind of these stages at full length, the seconds measured, and the share of each after-stage part."""
    full = [stage.extrapolated() for stage in stages]
    seconds = {kind: sum(one.get(kind, 0.0) for one in full) for kind in ("train", *AFTER)}
    total = sum(seconds.values())
    shares = {kind: seconds[kind] / total for kind in AFTER}
    measured = sum(sum(stage.seconds_by.values()) for stage in stages)
    return {"seconds": seconds, "measured_seconds": measured, "shares": shares, "together": sum(shares.values())}


def after_tables(result: dict[str, Any]) -> list[Table]:
    """The table of this part."""

    def cells(entry: dict[str, Any]) -> list[str]:
        shares = [f"{number(entry['seconds'][kind], 2)} ({percent(entry['shares'][kind])})" for kind in AFTER]
        return [number(entry["seconds"]["train"], 1), *shares, percent(entry["together"])]

    rows = [[str(entry["stage"]), str(entry["classes"]), *cells(entry)] for entry in result["stages"]]
    rows.append(["**run**", "", *cells(result["run"])])
    epochs = result["epochs"]
    over = [kind for kind in AFTER if not result["within_target"][kind]]
    verdict = "Each part is within it." if not over else f"Over it: {', '.join(over)}."
    note = (
        f"Seconds (share of the stage). Measured with {epochs['measured'][0]} epochs and {epochs['measured'][1]} of "
        f"fine-tuning, n = {result['n']}; training extrapolated to {epochs['extrapolated'][0]} and "
        f"{epochs['extrapolated'][1]}. The target is at most {percent(result['target'])} of the run for each part. "
        f"{verdict}"
    )
    header = ["stage", "classes", "training, s", *(f"{kind}, s" for kind in AFTER), "the three together"]
    return [Table("After training", header, rows, note)]
