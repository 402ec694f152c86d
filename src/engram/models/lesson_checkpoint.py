"""Checkpoints of a lesson: after a step, or inside the feature pass."""

from __future__ import annotations

from typing import Any

from engram.contract import Method
from engram.contract.learner import Learner
from engram.core.checkpoint import Checkpoint
from engram.core.errors import EngramError, option
from engram.data.stage import Stage
from engram.experiment.feature_pass import DONE, FEATURES
from engram.experiment.stage_work import StepTaken, pack_phase, unpack_phase


def step_checkpoint(learner: Learner, taken: StepTaken, clock: dict[str, float]) -> Checkpoint:
    """A checkpoint after a step."""
    packed, phase = pack_phase(*taken.state())
    data = {"phase": phase, "clock": clock, "notes": learner.notes}
    return Checkpoint(learner.state_dict() | packed, data)


def feature_checkpoint(learner: Learner, phases: int, clock: dict[str, float]) -> Checkpoint:
    """A checkpoint inside the feature pass, after that many phases."""
    return Checkpoint(learner.state_dict(), {"phases": phases, "clock": clock, "notes": learner.notes})


def restore_lesson(
    checkpoint: Checkpoint, method: Method, learner: Learner, stage: Stage, clock: dict[str, float]
) -> Any:
    """Load a checkpoint; refuse one that does not fit the lesson."""
    tensors, data = dict(checkpoint.tensors), checkpoint.data
    try:
        at = (int(data["phases"]), None) if "phases" in data else unpack_phase(tensors, data["phase"])
        statistics = set(learner.buffers)
        learner.load_state_dict(tensors)
        if statistics:
            kept = {name: value for name, value in learner.buffers.items() if name not in (FEATURES, DONE)}
            method.check_buffers(learner, kept)
        if at is None or (
            at[1] is not None and not 0 <= int(at[1].rows.min()) <= int(at[1].rows.max()) < len(stage.pool)
        ):
            raise ValueError("rows")
        shapes = {name: value.shape for name, value in learner.network.named_parameters()}
        held = {} if at[1] is None else at[1].optimiser
        kept = ((name.partition(".")[2], value.shape) for name, value in held.items())
        if any(name and shapes.get(name) != shape for name, shape in kept):
            raise ValueError("optimiser")
        clock.update({str(kind): float(seconds) for kind, seconds in data["clock"].items()})
        learner.notes[:] = [str(note) for note in data["notes"]]
    except Exception as error:
        raise EngramError(
            f"learning cannot be resumed: its checkpoint does not fit ({error}); drop it with {option('restart', True)}"
        ) from error
    return at
