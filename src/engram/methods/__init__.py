"""Methods: one file each, made of shared blocks; importing this package registers every one of them."""

import importlib
import pkgutil

from engram.methods._base import (
    METHODS,
    Method,
    MethodInfo,
    Neighbours,
    Phase,
    Settings,
    Step,
    Training,
    find_method,
    register,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METHODS",
    "Method",
    "MethodInfo",
    "Neighbours",
    "Phase",
    "Settings",
    "Step",
    "Training",
    "find_method",
    "register",
]
