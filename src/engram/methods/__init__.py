"""Methods: one file each, made of shared blocks; importing this package registers them all."""

from engram.methods import afc, joint, naive, replay, uniform
from engram.methods._base import (
    METHODS,
    Method,
    MethodInfo,
    Phase,
    Settings,
    Step,
    Training,
    find_method,
    register,
)

__all__ = [
    "METHODS",
    "Method",
    "MethodInfo",
    "Phase",
    "Settings",
    "Step",
    "Training",
    "afc",
    "find_method",
    "joint",
    "naive",
    "register",
    "replay",
    "uniform",
]
