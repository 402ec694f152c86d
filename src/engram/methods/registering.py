"""What `register` refuses: names that no recipe could have, and classes that no run could be made of."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engram.errors import EngramError

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # a part of recipes' and of directories' names
NME_ENDING = "-nme"


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


def check_predictors(name: str, cls: type, predictors: Sequence[str], memory: str) -> None:
    """Refuses to predict by exemplars with a memory that has none."""
    if memory in ("none", "optional") and "nme" in predictors:
        raise EngramError(
            f"{name} cannot predict by nme, the nearest mean of exemplars, with memory={memory!r}; "
            f'write predictors = ("cnn",) in {cls.__name__}'
        )
