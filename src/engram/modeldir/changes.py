"""What can be done to a model on disk beside learning: classes go, and the last lesson is taken back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.modeldir.directory import REMOVED
from engram.modeldir.model import Model
from engram.modeldir.pack import open_model, open_previous, pack_model, read_manifest
from engram.modeldir.writer import Writer


@dataclass(frozen=True)
class Undone:
    """A lesson that was taken back.

    gone: the classes that came with it; again: those that it learned again, which are what they were before. lesson,
    date: the last lesson now, and when the model became what it is again.
    """

    gone: list[Hashable]
    again: list[Hashable]
    classes: int
    lesson: int
    date: str


def remove_class(path: str | Path, label: Hashable, *more: Hashable, drop_learning: bool = False) -> Model:
    """Removes a class, or several at once, from the model at that path, files and all; returns the model then.

    What it was before its last lesson goes too: that had the class.
    """
    with Writer(path) as writer:
        refuse_learning(writer, drop=drop_learning, argument="drop_learning")
        model, _ = open_model(path, "cpu", without=(label, *more))  # whose pictures may be damaged
        model.remove((label, *more), datetime.now(UTC).isoformat(timespec="seconds"))
        model.measure()
        writer.commit(*pack_model(model), why=REMOVED)
    return model


def undo(path: str | Path, *, drop_learning: bool = False) -> Undone:
    """Takes the last lesson back: the model at that path is again what it was before, in one step."""
    with Writer(path) as writer:
        pointer = writer.current()
        before = open_previous(path)  # all of it is found unchanged, or nothing is undone
        refuse_learning(writer, drop=drop_learning, argument="drop_learning")
        now = _stages(path)
        assert pointer is not None
        assert pointer.previous is not None
        writer.go_back(pointer.previous)
        left = read_manifest(path)
    then = {known.label: known.stage for known in before.classes}
    return Undone(
        gone=[label for label in now if label not in then],
        again=[label for label, stage in now.items() if then.get(label, stage) != stage],
        classes=len(then),
        lesson=max((i for i, entry in enumerate(left["history"], 1) if entry["what"] == "learned"), default=0),
        date=left["history"][-1]["date"] if left["history"] else "",
    )


def _stages(path: str | Path) -> dict[Hashable, Any]:
    """The lesson that each class came with; nothing where the model is damaged, which is no reason not to go back."""
    try:
        return {known["label"]: known["stage"] for known in read_manifest(path)["classes"]}
    except EngramError:
        return {}


def refuse_learning(writer: Writer, drop: bool, argument: str) -> None:
    """Refuses to change a model under learning in progress, which could not go on then; argument: what drops it."""
    if drop:
        writer.drop_learning()
        return
    checkpoint, base = writer.learning(), writer.current()
    if checkpoint is not None and checkpoint.data.get("base") == (None if base is None else base.digest):
        raise EngramError(f"learning in {writer.path} was interrupted; finish it first, or drop it ({argument}=True)")
