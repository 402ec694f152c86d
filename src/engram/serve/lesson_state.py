"""The state of a lesson, as clients see it and as it is written to disk; and the clients that follow it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["none", "running", "stopped", "failed", "finished"]
NOTES = 50
LOSSES = 300
QUEUED = 256  # events that wait for a slow client


def new_progress(phase: str) -> dict[str, Any]:
    """Return the progress of a lesson that has done nothing yet."""
    nothing = dict.fromkeys(("epoch", "epochs", "step", "steps"), 0)
    return {"done": 0.0, "phase": phase, **nothing, "terms": {}, "seconds_left": None, "images_per_second": 0.0}


@dataclass
class ServedLesson:
    """The last lesson of a model, as clients see it."""

    state: State = "none"
    ids: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    progress: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)

    def add_loss(self, done: float, loss: float) -> None:
        """Add a point to the curve; of too many, every second one stays."""
        if not self.losses or done > self.losses[-1][0]:
            self.losses.append((round(done, 4), round(loss, 4)))
        if len(self.losses) > LOSSES:
            self.losses = self.losses[::2]

    def add_note(self, text: str) -> None:
        """Add a sentence; only the last ones stay."""
        self.notes = [*self.notes, text][-NOTES:]

    def shown(self) -> dict[str, Any]:
        """Return what clients see."""
        return {
            "state": self.state,
            "progress": self.progress,
            "result": self.result,
            "error": self.error,
            "interrupted": self.interrupted,
            "images": len(self.ids),
            "classes": list(self.classes),
            "notes": list(self.notes),
            "losses": list(self.losses),
            "options": dict(self.options),
        }

    def saved(self) -> dict[str, Any]:
        """Return what is written to disk."""
        kept = ("state", "ids", "classes", "options", "base", "result", "error", "interrupted", "notes")
        return {name: getattr(self, name) for name in kept}


class Listener:
    """A client that follows a lesson."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()

    def tell(self, event: str | None, data: dict[str, Any]) -> None:
        """Pass an event on, from any thread; None ends the stream."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, None if event is None else (event, data))

    def _put(self, item: tuple[str, dict[str, Any]] | None) -> None:
        if self._events.qsize() < QUEUED or item is None or item[0] != "progress":
            self._events.put_nowait(item)

    async def next(self, seconds: float) -> tuple[str, dict[str, Any]] | Literal["silence"] | None:
        """Return the next event, None at the end, or "silence" after that many seconds without one."""
        try:
            return await asyncio.wait_for(self._events.get(), seconds)
        except TimeoutError:
            return "silence"
