"""Methods: one file each, made of shared blocks; importing this package registers all of them.

What a method is written with is offered here, so that a method of one's own needs one import.
"""

from engram.contract.batches import Beside, CutMix, Mixed
from engram.contract.learner import Learner
from engram.contract.look import Look
from engram.contract.method import (
    METHODS,
    OWN_METHODS,
    Method,
    MethodInfo,
    Neighbours,
    Passes,
    Phase,
    Step,
    Terms,
    Tether,
    find_method,
    register,
)
from engram.contract.registering import import_all
from engram.contract.settings import Settings, Training, setting
from engram.data.stage import Stage

import_all(__name__, __path__)

__all__ = [
    "METHODS",
    "OWN_METHODS",
    "Beside",
    "CutMix",
    "Learner",
    "Look",
    "Method",
    "MethodInfo",
    "Mixed",
    "Neighbours",
    "Passes",
    "Phase",
    "Settings",
    "Stage",
    "Step",
    "Terms",
    "Tether",
    "Training",
    "find_method",
    "register",
    "setting",
]
