"""Whole runs, short ones, and what each of their stages took by the product's own clock."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from benchmarks.scale import FULL_EPOCHS, FULL_FINETUNE
from engram import run
from engram.core.checkpoint import load_checkpoint
from engram.core.events import EpochFinished, PhaseStarted, StageStarted
from engram.data.store import ImageStore
from engram.experiment import stage_work as stagework
from engram.experiment.run_config import RunConfig

AFTER = ("importance", "exemplars", "evaluate")


@dataclass
class StageTimes:
    """One stage of a run.

    images: in its pool, of which so many are exemplars. trained: the images that one epoch of the main phase trains
    on. seconds_by: by kind of work, as the run's clock has it. epochs: the seconds of each epoch, by phase; steps: how
    many it has.
    """

    stage: int
    classes: int
    images: int
    exemplars: int
    trained: int = 0
    seconds_by: dict[str, float] = field(default_factory=dict)
    epochs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[str, int] = field(default_factory=dict)

    def epoch_seconds(self, phase: str = "main") -> float:
        """The mean epoch of a phase without its first, which waits for what is captured and compiled; 0 if none.

        The mean, since a GPU may be some steps behind: where an epoch's end is noticed late, the next one is short.
        """
        seconds = self.epochs.get(phase, [])
        return statistics.mean(seconds[1:] or seconds) if seconds else 0.0

    def extrapolated(self) -> dict[str, float]:
        """seconds_by for a stage of full length: the epochs that were left out at the pace of those that were not."""
        full = {"main": FULL_EPOCHS, "balance": FULL_FINETUNE}
        missing = sum((full[phase] - len(taken)) * self.epoch_seconds(phase) for phase, taken in self.epochs.items())
        return {**self.seconds_by, "train": self.seconds_by["train"] + missing}


def run_stages(
    config: RunConfig, store: ImageStore, batch_size: int, stop_after_stage: int | None = None
) -> list[StageTimes]:
    """The stages of a run, which takes place in a folder that is removed afterwards; its base is not shared."""
    stages: list[StageTimes] = []
    # Nothing is shown: that waits for the device, and all epochs which ended meanwhile would be noticed at once.
    unseen = patch.object(stagework, "PROGRESS_SECONDS", math.inf)
    with tempfile.TemporaryDirectory() as folder, unseen:
        directory = Path(folder) / "run"
        for event in run(config, store, directory, stop_after_stage=stop_after_stage):
            if isinstance(event, StageStarted):
                stages.append(StageTimes(event.stage, event.num_seen, event.images, event.exemplars))
            elif isinstance(event, PhaseStarted):
                stages[-1].steps[event.phase] = event.steps
                if event.phase == "main":
                    stages[-1].trained = event.steps * min(batch_size, event.images)
            elif isinstance(event, EpochFinished):
                stages[-1].epochs[event.phase].append(event.seconds)
        checkpoint = load_checkpoint(directory / "checkpoint" / "state.safetensors")
    for stage, record in zip(stages, checkpoint.data["records"], strict=True):
        stage.seconds_by = dict(record["seconds_by"])
    return stages
