"""Engine: executes the phases that a method declares, on a CPU or a GPU."""

from engram.engine.engine import Engine
from engram.engine.loop import PhaseLoop, PhaseState
from engram.engine.loss_history import NonFiniteLoss

__all__ = ["Engine", "NonFiniteLoss", "PhaseLoop", "PhaseState"]
