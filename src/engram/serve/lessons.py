"""Lessons that are taught through the server: each runs in a process of its own, and its state survives a restart."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engram.core.errors import EngramError
from engram.core.safe_folder import Folder, MissingFile
from engram.models.learning import has_learning
from engram.models.store.generations import NoModelYet, Pointer, read_pointer
from engram.models.store.writer import Writer
from engram.runs.directory import is_running
from engram.serve.children import ChildOptions, ask_to_stop, start_process
from engram.serve.draft import RESULT, Draft, DraftImage
from engram.serve.lesson_state import Listener, ServedLesson, State, new_progress
from engram.serve.limits import Refused

STOP_SECONDS = 60.0  # to save when the server ends
_PROGRESS = ("done", "phase", "epoch", "epochs", "terms", "seconds_left", "step", "steps", "images_per_second")


def current_pointer(path: Path) -> Pointer | None:
    """Return the current generation of the model at a path, or None if there is none yet."""
    try:
        with Folder.open(path) as folder:
            return read_pointer(folder)
    except (NoModelYet, MissingFile):
        return None


class Lessons:
    """Starts, follows and stops the lessons of one model. Every method may be called by any thread.

    changed: called after the model has changed.
    """

    def __init__(self, path: Path, draft: Draft, options: ChildOptions, changed: Callable[[], None]) -> None:
        self._path, self._draft, self._options, self._changed = path, draft, options, changed
        self._lock = threading.RLock()
        self._lesson = ServedLesson()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._listeners: set[Listener] = set()
        self._closing = False

    def open(self) -> None:
        """Read what a server before left. A lesson that it did not end is finished, or was interrupted."""
        data = self._draft.read_lesson()
        if data is None:
            return
        with self._lock:
            self._lesson = lesson = ServedLesson(**data)
            if lesson.state == "running":
                lesson.state, lesson.interrupted = "stopped", True
            self._settle()

    def _settle(self) -> None:
        """Find out whether a lesson without an end has changed the model, and save the state."""
        lesson = self._lesson
        if lesson.state == "stopped":
            pointer = current_pointer(self._path)
            digest = None if pointer is None else pointer.digest
            before = None if pointer is None or pointer.previous is None else pointer.previous.digest
            if digest != lesson.base and before == lesson.base:
                lesson.state, lesson.error = "finished", None
                lesson.result = self._draft.read_result()
            elif digest != lesson.base:
                lesson.state, lesson.interrupted = "failed", False
                lesson.error = "the model was changed by another program during the lesson; teach the images again"
        if lesson.state == "stopped":
            self._draft.freeze(lesson.ids)
        elif lesson.state == "finished":
            lesson.interrupted = False
        self._draft.write_lesson(lesson.saved())
        if lesson.state == "finished":
            self._draft.taught(lesson.ids)
        elif lesson.state != "stopped":
            self._draft.thaw()

    def shown(self) -> dict[str, Any]:
        """Return the state of the last lesson."""
        with self._lock:
            return self._lesson.shown()

    @property
    def state(self) -> State:
        """The state of the last lesson."""
        return self._lesson.state

    @property
    def process_id(self) -> int | None:
        """The process that learns now."""
        process = self._process
        return None if process is None else process.pid

    def refuse_unfinished(self) -> None:
        """Refuse a change of the model while a lesson is not finished."""
        if self.state == "running":
            raise Refused(409, "the model is learning; wait until the lesson is finished, or stop and discard it")
        if self.state == "stopped":
            raise Refused(409, "a lesson was stopped before its end; continue or discard it first")

    def start(
        self, images: Sequence[DraftImage], epochs: int | None, minutes: float | None, more_of_known: bool
    ) -> None:
        """Start a lesson with these images, or continue the one that was stopped, with its own."""
        with self._lock:
            if self._closing:
                raise Refused(503, "the server is ending")
            lesson = self._lesson
            if lesson.state == "running":
                raise Refused(409, "the model is learning already")
            if is_running(self._path):  # such as the process of a lesson that saves after its server was killed
                raise Refused(409, "another process is changing the model now; try again in a moment")
            # Nothing of a lesson that failed is continued.
            restart = lesson.state == "failed" and has_learning(self._path)
            if lesson.state == "stopped":
                lesson.state, lesson.progress, lesson.error, lesson.interrupted = "running", None, None, False
            else:
                if not images:
                    raise Refused(409, "the draft is empty: add images first")
                pointer = current_pointer(self._path)
                lesson = ServedLesson(
                    "running",
                    [image.id for image in images],
                    list(dict.fromkeys(image.label for image in images)),
                    {"epochs": epochs, "minutes": minutes, "more_of_known": more_of_known},
                    None if pointer is None else pointer.digest,
                )
            self._draft.freeze(lesson.ids)
            self._draft.write_lesson(lesson.saved())
            (self._draft.folder / RESULT).unlink(missing_ok=True)
            self._lesson = lesson
            by_id = {image.id: image for image in self._draft.images()}
            own = [by_id[name] for name in lesson.ids if name in by_id]
            request = {
                "job": "learn",
                "model": str(self._path.absolute()),
                "paths": [str(self._draft.path(image.id).absolute()) for image in own],
                "labels": [image.label for image in own],
                "result": str((self._draft.folder / RESULT).absolute()),
                "checkpoint_minutes": self._options.checkpoint_minutes,
                "new_model": dict(self._options.new_model),
                "device": self._options.device,
                "threads": self._options.threads,
                "restart": restart,
                **lesson.options,
            }
            try:
                self._process = start_process(request)
            except OSError as error:
                lesson.state, lesson.error = "failed", f"no process could be started ({error.strerror})"
                self._settle()
                raise Refused(503, lesson.error) from None
            lesson.progress = new_progress("starting")
            self._tell("progress")
            self._thread = threading.Thread(target=self._follow, args=(self._process,), name="lesson", daemon=True)
            self._thread.start()

    def stop(self, discard: bool) -> None:
        """Ask the lesson to save and stop. discard: drop it; its images stay in the draft."""
        with self._lock:
            process, thread, state = self._process, self._thread, self._lesson.state
            if state == "running" and process is not None:
                if discard:
                    process.kill()
                else:
                    ask_to_stop(process)
                    return
            elif not discard:
                raise Refused(409, "no lesson is running")
        if thread is not None:
            thread.join(STOP_SECONDS)
        with self._lock:
            if self._lesson.state == "none":
                raise Refused(409, "there is no lesson to discard")
            if has_learning(self._path):
                with Writer(self._path) as writer:
                    writer.drop_learning()
            self._lesson = ServedLesson()
            self._draft.thaw()
            self._draft.write_lesson(None)
            self._tell("none")

    def close(self) -> None:
        """Let a running lesson save and stop, and end the streams of clients."""
        with self._lock:
            self._closing = True
            process, thread = self._process, self._thread
            for listener in self._listeners:
                listener.tell(None, {})
        if process is not None and self.state == "running":
            ask_to_stop(process)
        if thread is not None:
            thread.join(STOP_SECONDS)

    def listen(self) -> Listener:
        """Return a listener, whose first event is the present state."""
        listener = Listener()
        with self._lock:
            self._listeners.add(listener)
            data = self._lesson.shown()
            listener.tell("progress" if data["state"] == "running" else data["state"], data)
            if self._closing:
                listener.tell(None, {})
        return listener

    def leave(self, listener: Listener) -> None:
        """Forget a listener."""
        with self._lock:
            self._listeners.discard(listener)

    @property
    def listeners(self) -> int:
        """Number of clients that follow."""
        return len(self._listeners)

    def _tell(self, event: str) -> None:
        data = self._lesson.shown()
        for listener in self._listeners:
            listener.tell(event, data)

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Read the events of the process until it ends."""
        assert process.stdout is not None
        assert process.stdin is not None
        end: tuple[State, str | None] | None = None
        for line in process.stdout:
            with suppress(ValueError):
                end = self._receive(json.loads(line)) or end
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                stream.close()
        self._changed()  # before anybody reads that the lesson is finished
        with self._lock:
            lesson = self._lesson
            if end is None:
                how = f"by signal {-code}" if code < 0 else f"with status {code}"
                end = "stopped", f"the process of the lesson ended unexpectedly ({how}); the lesson can be continued"
                lesson.interrupted = True
            lesson.state, lesson.error = end
            lesson.interrupted |= self._closing and lesson.state == "stopped"
            lesson.progress, self._process = None, None
            try:
                self._settle()
            except (EngramError, Refused, OSError) as error:  # the model is damaged or the disk is full
                lesson.state, lesson.error = "failed", str(error)
            self._tell(lesson.state)

    def _receive(self, event: dict[str, Any]) -> tuple[State, str | None] | None:
        """Take an event of the process; return state and error if it is the last."""
        with self._lock:
            lesson, name = self._lesson, event.pop("event", "")
            if name == "learned":
                lesson.result = event
                return "finished", None
            if name == "learned_before":
                self._note(f"{', '.join(event['classes'])}: learned before; nothing was done")
                return "finished", None
            if name == "stopped":
                return "stopped", None
            if name == "failed":
                return "failed", self._without_path(event["error"])
            if name == "warned":
                self._note(self._without_path(event["message"]))
                return None
            if name == "epochs_chosen":
                self._note(f"{event['epochs']} epochs fit into the time")
                return None
            before = lesson.progress or new_progress("starting")
            if name == "progress":
                lesson.progress = {key: event[key] for key in _PROGRESS}
                if event["terms"]:
                    lesson.add_loss(event["done"], sum(event["terms"].values()))
            elif name == "working":
                lesson.progress = {**before, "phase": event["what"], "seconds_left": None}
            elif name == "images_read":
                lesson.progress = {**before, "phase": "read"}
            elif name == "phase_started":
                lesson.progress = {**before, "phase": event["phase"], "epoch": 0, "epochs": event["epochs"]}
            else:
                return None
            self._tell("progress")
            return None

    def _without_path(self, text: str) -> str:
        """Return a message in which the model is called by its name."""
        return text.replace(str(self._path.absolute()), self._path.name)

    def _note(self, text: str) -> None:
        self._lesson.add_note(text)
        data = self._lesson.shown() | {"note": text}
        for listener in self._listeners:
            listener.tell("note", data)
