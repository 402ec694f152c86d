"""A model that is served: the open generation, its pictures, its draft and its lessons."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engram.core.errors import EngramError
from engram.core.memory_limits import return_memory
from engram.models.labels import labels_by_name
from engram.models.store.codec import open_model, read_manifest
from engram.models.store.generations import Pointer
from engram.serve.children import ChildOptions
from engram.serve.draft import Draft
from engram.serve.gallery import Examples, Gallery, Once
from engram.serve.lessons import Lessons, current_pointer
from engram.serve.limits import Limits, Refused
from engram.serve.predicting import Generation

LOOK_SECONDS, RETRY_SECONDS = 0.5, 5.0


@dataclass(frozen=True, eq=False)
class OpenGeneration:
    """All that is known about the generation that is served."""

    generation: Generation
    manifest: dict[str, Any]
    examples: Examples
    gallery: Once

    @property
    def predictor(self) -> str | None:
        """The predictor whose accuracy is shown."""
        return next(iter(self.generation.model.predictors), None)


class ServedModel:
    """One model. A new generation is opened beside the old one, and then takes its place."""

    def __init__(self, name: str, path: Path, limits: Limits, options: ChildOptions) -> None:
        self.name, self.path = name, path
        self.options = options
        self.draft = Draft(path.with_name(path.name + ".draft"), limits)
        self.lessons = Lessons(path, self.draft, options, self.refresh)
        self.checking = threading.Lock()
        self.error: str | None = None
        self._lock = threading.Lock()
        self._open: OpenGeneration | None = None
        self._failed: tuple[Pointer | None, float] | None = None
        self._teaching = threading.Lock()

    def open(self) -> None:
        """Open the model and what a server before left."""
        self.refresh()
        if self.error is not None:
            raise EngramError(self.error)
        with suppress(Refused):  # another server teaches it; this one can still predict
            self.teach()

    def teach(self) -> None:
        """Read the draft and the last lesson, unless that was done; refuse if another server teaches this model."""
        with self._teaching:
            if not self.draft.is_open:
                self.draft.open()
                self.lessons.open()

    def close(self) -> None:
        """Let a lesson save, and release the draft."""
        self.lessons.close()
        self.draft.close()

    def refresh(self) -> None:
        """Take over the current generation if it is another one. A damaged one is reported, and the old one stays."""
        with self._lock:
            pointer: Pointer | None = None
            try:
                pointer = current_pointer(self.path)
                held = None if self._open is None else self._open.generation.pointer
                if pointer is None or (held is not None and _same(pointer, held)):
                    self.error = None
                    return
                if self._failed is not None and self._failed[0] == pointer and time.monotonic() < self._failed[1]:
                    return
                if held == pointer and self._open is not None:  # only what undo restores is another
                    generation = Generation(self.name, self._open.generation.model, pointer)
                else:
                    model, pointer = open_model(self.path, self.options.device, images=False)
                    generation = Generation(self.name, model, pointer)
                    _warm_up(generation)
                manifest = read_manifest(self.path)
                if manifest["digest"] != pointer.digest:
                    return  # replaced meanwhile; the next look finds that one
                examples = Examples.of(pointer, manifest["classes"])
                gallery = Once(lambda: Gallery.make(examples, self.path, self.options.device))
                self._open = OpenGeneration(generation, manifest, examples, gallery)
                self.error = self._failed = None
                if held is not None:
                    return_memory()  # of the one before
            except EngramError as error:
                self.error = str(error)
                self._failed = (pointer, time.monotonic() + RETRY_SECONDS)

    @property
    def current(self) -> OpenGeneration | None:
        """The generation that is served; None before the first lesson."""
        return self._open

    def need(self) -> OpenGeneration:
        """Return the generation that is served; refuse if there is none yet."""
        found = self._open
        if found is None:
            raise Refused(409, "the model has not learned anything yet; teach it some classes first")
        return found

    def label(self, name: str) -> Any:
        """Return the label of a class by its name."""
        labels = labels_by_name(self.need().generation.model.labels)
        if name not in labels:
            raise Refused(404, f"the model knows no class {name[:80]!r}")
        return labels[name]

    def text(self, error: EngramError) -> str:
        """Return the message of an error without the path of the model."""
        return str(error).replace(str(self.path), self.name)


def _same(one: Pointer, other: Pointer) -> bool:
    return one == other and one.previous == other.previous and one.why == other.why


def _warm_up(generation: Generation) -> None:
    """Predict one image, so that the first request does not wait for what is made at first use."""
    if generation.model.classes:
        height, width = generation.model.config.image_size
        generation.read(np.zeros((1, height, width, 3), dtype=np.uint8))


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each model: that of its directory, with a number if another one has it already."""
    names: list[str] = []
    for path in paths:
        base = path.absolute().name or "model"
        name, number = base, 2
        while name in names:
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return names


class Watcher:
    """A thread that looks for new generations."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            for model in self._models:
                model.refresh()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()
