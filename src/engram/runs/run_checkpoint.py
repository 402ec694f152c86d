"""Read the checkpoint of a run, with its data checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from engram.core.checkpoint import Checkpoint, load_checkpoint
from engram.core.errors import EngramError
from engram.runs.checked import Seconds, Source, checked
from engram.runs.directory import CHECKPOINT
from engram.runs.reader import check_stages, read_stage
from engram.runs.result import StageRecord
from engram.runs.stored_run import RunManifest, StagePosition, StageRow


@dataclass(frozen=True, kw_only=True)
class _StageRecord(StageRow):
    seconds_by: Mapping[str, Seconds]


@dataclass(frozen=True, kw_only=True)
class _RunState:
    config_hash: str
    records: tuple[_StageRecord, ...]
    clock: Mapping[str, Seconds]
    phase: StagePosition | None
    notes: tuple[str, ...] = ()


def read_run_checkpoint(directory: Path, manifest: RunManifest) -> Checkpoint:
    """Read the checkpoint of the run in a directory; refuse one that is damaged or of another run."""
    path = directory / CHECKPOINT
    checkpoint, source = load_checkpoint(path, directory), Source(path, "start the run again")
    state = checked(_RunState, checkpoint.data, source)
    if state.config_hash != manifest.config_hash:
        raise EngramError(f"the checkpoint in {directory} belongs to another configuration than that in its run.json")
    check_stages(state.records, manifest, source)
    if state.phase is not None and len(state.records) == len(manifest.stage_sizes):
        source.fail("it is inside a stage after the last one")
    if not checkpoint.is_verified:  # its checksum does not cover these numbers
        for row in state.records:
            read_stage(directory, row, manifest.stage_sizes)
    names = [field.name for field in fields(StageRecord)]
    records = [{name: record[name] for name in names if name in record} for record in checkpoint.data["records"]]
    return Checkpoint(checkpoint.tensors, {**checkpoint.data, "records": records})
