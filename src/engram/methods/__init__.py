"""Methods: one file each, made of shared blocks; importing this package registers every one of them."""

import importlib
import pkgutil

from engram.methods._base import (
    METHODS,
    OWN_METHODS,
    Method,
    MethodInfo,
    Neighbours,
    Passes,
    Phase,
    Settings,
    Step,
    Terms,
    Tether,
    Training,
    find_method,
    register,
)
from engram.methods.batches import Beside, CutMix, Mixed
from engram.methods.look import Look

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METHODS",
    "OWN_METHODS",
    "Beside",
    "CutMix",
    "Look",
    "Method",
    "MethodInfo",
    "Mixed",
    "Neighbours",
    "Passes",
    "Phase",
    "Settings",
    "Step",
    "Terms",
    "Tether",
    "Training",
    "find_method",
    "register",
]
