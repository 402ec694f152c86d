"""A method's settings: what all have in common, which of them the base stage depends on, and what no method takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from engram.errors import EngramError, suggest
from engram.plain import to_plain

# For settings that play no part before the second stage: `field(default, metadata=AFTER_BASE)`.
AFTER_BASE = {"after_base": True}


@dataclass(frozen=True)
class Settings:
    """A method's settings: a frozen dataclass with a default for everything, checked where it is made."""


def base_settings(settings: Settings) -> dict[str, Any]:
    """The settings that play a part in the base stage, as plain data: all but those marked AFTER_BASE."""
    later = {field.name for field in fields(settings) if field.metadata.get("after_base")}
    return {name: value for name, value in to_plain(settings).items() if name not in later}


def refuse_negative(settings: object, *names: str) -> None:
    """Refuses those of the settings named that are below 0 or not a number; None stands for no number."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= 0:
            raise EngramError(f"{name} must be 0 or more, got {value}")


def check_temperature(temperature: float) -> None:
    """Refuses a temperature that no softmax can have."""
    if not temperature > 0:
        raise EngramError(f"temperature must be above 0, got {temperature}")


def check_choice(settings: object, name: str, choices: Sequence[str]) -> None:
    """Refuses a value of the setting named that is not one of the choices."""
    value = getattr(settings, name)
    if value not in choices:
        raise EngramError(f"no {name} {value!r}: {suggest(str(value), choices)}")
