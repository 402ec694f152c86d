"""The engine: executes what a method describes, on a CPU or a GPU."""

from engram.engine.engine import Engine
from engram.engine.loop import NonFiniteLoss, PhaseLoop, PhaseState

__all__ = ["Engine", "NonFiniteLoss", "PhaseLoop", "PhaseState"]
