"""What `register` refuses: names that no recipe could have, and classes that no run could be made of."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Sequence

from engram.contract.settings import Settings
from engram.core.errors import EngramError
from engram.data.memory import SELECTORS

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # a part of recipes' and of directories' names
NME_ENDING = "-nme"
MEMORIES = ("needed", "none", "all", "optional")


def check_name(name: str) -> None:
    """Refuses a name that recipes and directories could not begin with, or that would be taken for another's recipe."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise EngramError(
            f"a method cannot be called {name!r}: a name is lower-case letters and digits, with single dashes between, "
            "such as 'my-method2'"
        )
    if name.endswith(NME_ENDING):
        other = name.removesuffix(NME_ENDING)
        raise EngramError(
            f"a method cannot be called {name!r}: so are recipes of {other} that predict by nme; "
            f"choose a name that does not end in {NME_ENDING}"
        )


def check_class(name: str, cls: type, base: type) -> None:
    """Refuses what is no class made from the one given, which is Method."""
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise EngramError(f"{name} is registered with {cls!r}; register takes a class made from {base.__name__}")


def check_settings(name: str, settings: type[Settings]) -> None:
    """Refuses settings that recipes could not be made of: those that are no Settings, or lack a default."""
    if not isinstance(settings, type) or not issubclass(settings, Settings):
        raise EngramError(
            f"the settings of {name} must be a class made from engram.methods.Settings, as a frozen dataclass, "
            f"got {settings!r}"
        )
    try:
        settings()
    except Exception as error:  # whatever their own checks raise
        raise EngramError(
            f"the settings of {name} cannot be made without arguments ({error}); give every setting of "
            f"{settings.__name__} a default that it takes"
        ) from error


def check_choices(name: str, memory: str, selection: str) -> None:
    """Refuses a memory or a selection of exemplars that there is not."""
    for what, value, valid in (("memory", memory, MEMORIES), ("selection", selection, tuple(SELECTORS))):
        if value not in valid:
            raise EngramError(f"the {what} of {name} must be one of {', '.join(valid)}, got {value!r}")


def check_predictors(name: str, cls: type, predictors: Sequence[str], memory: str) -> None:
    """Refuses to predict by exemplars with a memory that has none."""
    if memory in ("none", "optional") and "nme" in predictors:
        raise EngramError(
            f"{name} cannot predict by nme, the nearest mean of exemplars, with memory={memory!r}; "
            f'write predictors = ("cnn",) in {cls.__name__}'
        )


def import_all(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, which registers the methods in them."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
