"""Change a model on disk without learning: remove, rename and merge classes, undo, save."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from engram.core.errors import EngramError, option, suggest
from engram.models.labels import encode_label, group_similar, plain_labels
from engram.models.model import Model
from engram.models.store.codec import last_lesson, manifest_of, open_model, open_previous, pack_model, read_manifest
from engram.models.store.generations import (
    LEFT_OUT,
    REMOVED,
    SAVED,
    Pointer,
    Snapshot,
    read_model,
)
from engram.models.store.writer import Writer

T = TypeVar("T")


@dataclass(frozen=True)
class Undone:
    """Result of `undo`.

    what: the change that was undone: "learned", "removed", "merged", "moved" or "renamed"; empty if the model was so
        damaged that this is not known.
    gone: classes that are gone, because the change added them. back: classes that are back.
    again: classes that it learned again, now as they were before.
    classes: number of classes now.
    lesson, date: number of the last lesson now, and date of the last change before the one undone.
    steps: how many more changes can be undone.
    """

    what: str
    gone: list[Hashable]
    back: list[Hashable]
    again: list[Hashable]
    classes: int
    lesson: int
    date: str
    steps: int


def save_model(
    model: Model,
    path: str | Path,
    *,
    expected: Pointer | None = None,
    overwrite: bool = False,
    undoable: bool = True,
) -> Pointer:
    """Save the model at that path, which must hold no model or the expected generation; `overwrite` replaces any.

    undoable: keep the generation that was there for `undo`, if the model was made from it.
    """
    if model.learner is None:
        raise EngramError("there is nothing to save: the model has not learned anything yet")
    manifest, files = pack_model(model)  # refuses before anything is written
    with Writer(path, create=True) as writer:
        current = writer.current()
        if current is not None and current != expected and not overwrite:
            raise EngramError(
                f"there is another model at {path}, or it has changed since it was loaded; "
                f"choose another path, or replace it with {option('overwrite', True)}"
            )
        refuse_unfinished_lesson(writer, drop=overwrite, argument="overwrite")
        changes = _changes_since(model, path) if current is not None and current == expected else ["saved"]
        if current is not None and not changes:
            return writer.commit(manifest, files, previous=current.previous, why=current.why)
        if not undoable:
            return writer.commit(manifest, files, why=REMOVED if "removed" in changes else LEFT_OUT)
        return writer.commit(manifest, files, previous=None if "saved" in changes else current, why=SAVED)


def _changes_since(model: Model, path: str | Path) -> list[str]:
    """Return the kinds of lessons and removals since the model was the one at that path."""
    then, now = read_manifest(path)["history"], [asdict(entry) for entry in model.history]
    return [entry["what"] for entry in now[len(then) :]] if now[: len(then)] == then else ["saved"]


def remove_class(
    path: str | Path, label: Hashable, *more: Hashable, drop_learning: bool = False, undoable: bool = True
) -> Model:
    """Remove one or several classes from the model at that path; return the model.

    undoable: keep the state before, which contains the classes, for `undo`. False deletes it and all earlier states, so
        that nothing of the classes is left in the directory.
    """
    with Writer(path) as writer:
        refuse_unfinished_lesson(writer, drop=drop_learning)
        model, pointer = open_model(path, "cpu", without=(label, *more))  # their pictures may be damaged
        model.remove((label, *more))
        writer.commit(*pack_model(model), previous=pointer if undoable else None, why=REMOVED)
    return model


def rename_class(path: str | Path, old: Hashable, new: Hashable, *, drop_learning: bool = False) -> None:
    """Rename a class of the model at that path; refuse a name that another class has, or that is too similar to one."""
    (new,) = plain_labels([new], "new")
    encode_label(new)
    with Writer(path) as writer:
        refuse_unfinished_lesson(writer, drop=drop_learning)
        _check_names([known["label"] for known in read_manifest(path)["classes"]], old, new)
        pointer = writer.current()
        assert pointer is not None

        def renamed(snapshot: Snapshot) -> Pointer:
            files = [(name, partial(snapshot.read, name)) for name in sorted(snapshot.names)]
            return writer.write_generation(manifest_of(snapshot).rename(old, new).to_plain(), files)

        writer.adopt(read_model(path, renamed), previous=pointer)


def _check_names(labels: Sequence[Hashable], old: Hashable, new: Hashable) -> None:
    """Refuse to rename an unknown class, or to use a name that is taken."""
    if old not in labels:
        raise EngramError(f"the model knows no class {old!r}: {suggest(str(old), map(str, labels))}")
    if new == old:
        raise EngramError(f"the class is called {new!r} already; give another name")
    for label in labels:
        if label != old and (label == new or group_similar([label, new])):
            raise EngramError(f"the model has a class {label!r} already; choose a name that differs more")


def undo(path: str | Path, *, drop_learning: bool = False) -> Undone:
    """Undo the last change, a lesson or another: restore the model at that path as it was before, atomically.

    Several of the last changes can be undone one after the other.
    """
    with Writer(path) as writer:
        pointer = writer.current()
        before = open_previous(path)  # verifies every file before anything changes
        refuse_unfinished_lesson(writer, drop=drop_learning)
        manifest = unless_damaged(lambda: read_manifest(path))  # must not prevent an undo
        now = {} if manifest is None else {known["label"]: known["stage"] for known in manifest["classes"]}
        assert pointer is not None
        assert pointer.previous is not None
        writer.drop_learning()  # a killed process may have left the checkpoint of the lesson that is undone
        earlier = pointer.previous
        writer.adopt(earlier, previous=earlier.previous, why=earlier.why)
    then = {known.label: known.stage for known in before.classes}
    history = [] if manifest is None else manifest["history"][len(before.history) :]
    return Undone(
        what="" if manifest is None else history[-1]["what"] if history else "renamed",
        gone=[label for label in now if label not in then],
        back=[label for label in then if label not in now and manifest is not None],
        again=[label for label, stage in now.items() if then.get(label, stage) != stage],
        classes=len(then),
        **last_lesson(before.history),
        steps=len(earlier.earlier()),
    )


def unless_damaged(read: Callable[[], T]) -> T | None:
    """Return what is read, or None if it cannot be read."""
    try:
        return read()
    except EngramError:
        return None


def refuse_unfinished_lesson(writer: Writer, drop: bool, argument: str = "drop_learning") -> None:
    """Refuse to change a model with an unfinished lesson, which could not be resumed afterwards.

    drop: drop that lesson instead. argument: the argument that drops it, for the message.
    """
    if drop:
        writer.drop_learning()
        return
    checkpoint, base = writer.learning(), writer.current()
    if checkpoint is not None and checkpoint.data.get("base") == (None if base is None else base.digest):
        raise EngramError(
            f"learning in {writer.path} was interrupted; finish it first, or drop it with {option(argument, True)}"
        )


def merge_classes(path: str | Path, label: Hashable, into: Hashable, *, drop_learning: bool = False) -> Model:
    """Make the images of a class of the model at that path images of another one; return the model.

    The scores become those of a model that learned all of them as that class. Methods that keep no statistics of each
    class refuse it.
    """
    with Writer(path) as writer:
        refuse_unfinished_lesson(writer, drop=drop_learning)
        model, pointer = open_model(path, "cpu")
        model.merge(label, into)
        writer.commit(*pack_model(model), previous=pointer)
    return model
