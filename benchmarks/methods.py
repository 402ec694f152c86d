"""Methods: what a step of each costs, and what a run of its CIFAR-100 recipe would take at full length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from benchmarks.report import Table, number
from benchmarks.runs import StageTimes, run_stages
from benchmarks.scale import Scale, store_of
from engram.contract import Training
from engram.data.augment import Augmentation
from engram.data.sources.load import DataConfig
from engram.data.store import ImageStore
from engram.experiment.recipes import recipe
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session
from engram.methods import METHODS

LAST = 2  # the stage after which a run is stopped: the base, one that captures, one that finds all captured


def measure_methods(scale: Scale) -> dict[str, Any]:
    """One short run of each method, on images as large and as many as CIFAR-100's."""
    names = scale.methods or tuple(METHODS)
    store = store_of(scale)
    return {
        "epochs": scale.run_epochs,
        "methods": {name: measure_method(name, store, scale) for name in names},
        "n": 1,
    }


def measure_method(name: str, store: ImageStore, scale: Scale) -> dict[str, Any]:
    """Milliseconds for a step of the main phase, and the seconds of a whole run."""
    full = config_of(name, scale, None)
    short = config_of(name, scale, scale.run_epochs)
    stages = run_stages(short, store, scale.batch_size, stop_after_stage=LAST)
    base, last = stages[0], stages[-1]
    return {
        "base_ms": 1000 * base.epoch_seconds() / base.steps["main"],
        "stage_ms": 1000 * last.epoch_seconds() / last.steps["main"] if "main" in last.steps else None,
        "phases": {phase: 1000 * last.epoch_seconds(phase) / steps for phase, steps in last.steps.items()},
        "seconds": whole_run(stages, Session(short, store), Session(full, store)),
    }


def config_of(name: str, scale: Scale, epochs: int | None) -> RunConfig:
    """The method's recipe on the benchmark's images; epochs: the most of any phase."""
    config = recipe(f"{name}-cifar100-b50-s10")
    settings = config.settings
    for field in fields(settings):
        training = getattr(settings, field.name)
        if isinstance(training, Training):
            kept = training.epochs if epochs is None else min(epochs, training.epochs)
            shorter = replace(training, epochs=kept, batch_size=min(training.batch_size, scale.batch_size))
            settings = replace(settings, **{field.name: shorter})
    memory = config.memory
    if memory.budget == "per_class":
        memory = replace(memory, size=min(memory.size, scale.exemplars))
    return replace(
        config,
        settings=settings,
        data=DataConfig("arrays"),
        base=scale.base,
        increment=scale.increment,
        order="natural",
        memory=memory,
        backbone=scale.backbone,
        augmentation=Augmentation(pad=scale.pad),
        device=scale.device,
        precision=scale.precision,
    )


def whole_run(stages: Sequence[StageTimes], short: Session, full: Session) -> dict[str, float]:
    """Training, and what follows it, in a run of full length.

    A phase takes as long for its work (images, teachers, older backbones) as in the last stage measured, the base as
    in the base; one that so few epochs have no room for, or for one epoch alone, which waits for what is recorded, as
    long as the main one.
    """
    measured, training, after = short.plan(), 0.0, 0.0
    for planned in full.plan():
        stage = stages[min(planned.stage, LAST)]
        rates = {
            phase.name: stage.epoch_seconds(phase.name) * phase.epochs / phase.work
            for phase in measured[stage.stage].phases
            if phase.epochs > 1
        }
        training += sum(phase.work * rates.get(phase.name, rates["main"]) for phase in planned.phases if phase.epochs)
        after += sum(seconds for kind, seconds in stage.seconds_by.items() if kind != "train")
    return {"training": training, "after": after, "all": training + after}


def methods_tables(result: dict[str, Any]) -> list[Table]:
    """The table of this part, the quickest first."""
    ordered = sorted(result["methods"].items(), key=lambda item: item[1]["seconds"]["all"])
    rows = [
        [
            name,
            number(found["base_ms"], 2),
            number(found["stage_ms"], 2),
            *(number(found["seconds"][part], 1) for part in ("training", "after", "all")),
        ]
        for name, found in ordered
    ]
    note = (
        f"One run each, alone, stopped after stage {LAST}, {result['epochs']} epochs of each phase, n = {result['n']}; "
        "seconds extrapolated to the epochs and the stages of the recipe."
    )
    header = [
        "method",
        "base, ms a step",
        "later stages, ms a step",
        "training, s",
        "after training, s",
        "whole run, s",
    ]
    return [Table("Methods", header, rows, note)]
