"""What can be done to a model on disk beside learning: classes go or are renamed, the last lesson is taken back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from engram.core.errors import EngramError, suggest
from engram.models.labels import alike, decode_label, encode_label, plain_labels
from engram.models.model import Model
from engram.models.store.codec import last_lesson, open_model, open_previous, pack_model, read_manifest
from engram.models.store.generations import DAMAGED, REMOVED, UNDONE, Pointer, Snapshot, read_model, read_previous
from engram.models.store.writer import Writer


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


def rename_class(path: str | Path, old: Hashable, new: Hashable, *, drop_learning: bool = False) -> None:
    """Gives a class of the model at that path another name, also in what it was before its last lesson.

    Nothing else changes. Refuses a name that another class has, or that is written like one.
    """
    (new,) = plain_labels([new], "new")
    encode_label(new)
    with Writer(path) as writer:
        refuse_learning(writer, drop=drop_learning, argument="drop_learning")
        _check_names([known["label"] for known in read_manifest(path)["classes"]], old, new)
        pointer = writer.current()
        assert pointer is not None

        def renamed(snapshot: Snapshot) -> Pointer:
            files = [(name, partial(snapshot.read, name)) for name in sorted(snapshot.names)]
            return writer.write_generation(_renamed(snapshot.manifest, old, new), files)

        keeps = pointer.previous is not None and _can_go_back(path)
        previous = read_previous(path, renamed) if keeps else None
        writer.adopt(read_model(path, renamed), previous=previous, why=pointer.why if not pointer.previous else DAMAGED)


def _check_names(labels: Sequence[Hashable], old: Hashable, new: Hashable) -> None:
    """Refuses to rename what is not there, or to a name that is taken."""
    if old not in labels:
        raise EngramError(f"the model knows no class {old!r}: {suggest(str(old), map(str, labels))}")
    if new == old:
        raise EngramError(f"the class is called {new!r} already; give another name")
    for label in labels:
        if label != old and (label == new or alike([label, new])):
            raise EngramError(f"the model has a class {label!r} already; choose a name that is not like that")


def _renamed(manifest: dict[str, Any], old: Hashable, new: Hashable) -> dict[str, Any]:
    """What model.json says, with one label changed, and without what is written anew with every generation."""
    kept = {key: value for key, value in manifest.items() if key not in ("format", "engram", "files")}
    classes = [
        {**entry, "label": encode_label(new)} if decode_label(entry["label"]) == old else entry
        for entry in manifest["classes"]
    ]
    return {**kept, "classes": classes}


def _can_go_back(path: str | Path) -> bool:
    """Whether what the model was before its last lesson is whole."""
    try:
        open_previous(path)
    except EngramError:
        return False
    return True


def undo(path: str | Path, *, drop_learning: bool = False) -> Undone:
    """Takes the last lesson back: the model at that path is again what it was before, in one step."""
    with Writer(path) as writer:
        pointer = writer.current()
        before = open_previous(path)  # all of it is found unchanged, or nothing is undone
        refuse_learning(writer, drop=drop_learning, argument="drop_learning")
        now = _stages(path)
        assert pointer is not None
        assert pointer.previous is not None
        writer.drop_learning()  # which may be what a kill left of the lesson to undo, and would go on then
        writer.adopt(pointer.previous, why=UNDONE)
    then = {known.label: known.stage for known in before.classes}
    return Undone(
        gone=[label for label in now if label not in then],
        again=[label for label, stage in now.items() if then.get(label, stage) != stage],
        classes=len(then),
        **last_lesson(before.history),
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
