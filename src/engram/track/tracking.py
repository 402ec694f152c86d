"""Tell trackers about runs and lessons, from their events. One that fails or is missing never stops a run."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

from engram.core import events
from engram.core.errors import EngramError
from engram.core.events import Event, Warned
from engram.core.provenance import versions
from engram.core.serialize import flatten
from engram.report.groups import make_groups
from engram.runs.comparison import MEASURES
from engram.runs.reader import read_log, read_manifest, read_run
from engram.track.services import check_tracker
from engram.track.tracker import Axis, Confusion, Status, TrackedRun, Tracker

Describe = Callable[[Event], TrackedRun | None]
ENDS: dict[type[Event], Status] = {
    events.RunFinished: "finished",
    events.Learned: "finished",
    events.Stopped: "stopped",
    events.RunFailed: "failed",
}


class Tracking:
    """The trackers that a user asked for, each checked; see `check_tracker`.

    >>> from engram import recipe, run
    >>> from engram.track import Tracking
    >>> for event in Tracking(["tensorboard"]).follow(run(recipe("afc-mini-b10-s5"), directory="runs/tracked")):
    ...     pass
    """

    def __init__(self, trackers: str | Sequence[str] = ()) -> None:
        texts = [trackers] if isinstance(trackers, str) else trackers
        self._makers = dict(map(check_tracker, texts))

    def follow(self, run: Iterable[Event], describe: Describe | None = None) -> Generator[Event, None, None]:
        """Yield the events of a run or a lesson, and warnings if a tracker fails.

        describe: called with each event until it returns the run; None reads it from the run's directory.
        """
        pairs = (("", event) for event in run)
        found = self._all(pairs, describe)
        # Generators are closed here, not when Python collects them, so that the run directory is released.
        with closing(run) if isinstance(run, Generator) else nullcontext(), closing(found):
            for _, event in found:
                yield event

    def follow_together(
        self, runs: Generator[tuple[str, Event], None, None]
    ) -> Generator[tuple[str, Event], None, None]:
        """Yield the events of several runs with the names of their runs; each is a run of the tracker."""
        with closing(runs):
            yield from self._all(runs, None)

    def _all(
        self, pairs: Iterable[tuple[str, Event]], describe: Describe | None
    ) -> Generator[tuple[str, Event], None, None]:
        found: dict[str, _Followed] = {}
        try:
            for name, event in pairs:
                if name not in found:
                    found[name] = _Followed(self._makers, describe or describe_run)
                ends = type(event) in ENDS
                if not ends:
                    yield name, event
                for warning in found[name].note(event):
                    yield name, warning
                if ends:  # the last event stays the last
                    del found[name]
                    yield name, event
        finally:
            for followed in found.values():  # the run ended with an error, or nobody reads its events any more
                followed.abandon()


class _Followed:
    """The trackers of one run or lesson."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], describe: Describe) -> None:
        self._makers, self._describe = makers, describe
        self._trackers: dict[str, Tracker] = {}
        self._started = False
        self._epochs: dict[tuple[int, str, int], int] = {}  # position of each epoch on the axis of epochs

    def note(self, event: Event) -> list[Warned]:
        """Tell the trackers about an event; return a warning for each tracker that fails, which is not used again."""
        if not self._makers:
            return []
        warnings: list[Warned] = []
        if not self._started:
            try:
                run = self._describe(event)
            except Exception as error:
                self._started = True
                return [_warning("tracking", error)]
            if run is None:
                return []
            self._started = True
            if isinstance(event, events.RunStarted) and event.resumed and event.directory is not None:
                with suppress(Exception):
                    for point in read_log(Path(event.directory)).losses:
                        self._position(point.stage, point.phase, point.epoch)
            for name, make in self._makers.items():
                try:
                    tracker = make()
                    tracker.start(run)
                    self._trackers[name] = tracker
                except Exception as error:
                    warnings.append(_warning(name, error))
        if not self._trackers:
            return warnings
        try:
            calls = list(self._calls(event))
        except Exception as error:
            return [*warnings, _warning("tracking", error)]
        for name, tracker in list(self._trackers.items()):
            try:
                for call in calls:
                    call(tracker)
            except Exception as error:
                del self._trackers[name]
                warnings.append(_warning(name, error))
        return warnings

    def abandon(self) -> None:
        """End the trackers of a run that has no end."""
        for tracker in self._trackers.values():
            with suppress(Exception):
                tracker.finish("failed", {})

    def _calls(self, event: Event) -> Iterator[Callable[[Tracker], None]]:
        """Yield the calls that each tracker gets for an event."""
        if isinstance(event, events.EpochFinished):
            numbers = {f"loss/{event.phase}/{term}": value for term, value in event.terms.items()}
            numbers |= {f"lr/{event.phase}": event.lr, "seconds/epoch": event.seconds, "stage_of_epoch": event.stage}
            yield _log("epoch", self._position(event.stage, event.phase, event.epoch), numbers)
        elif isinstance(event, events.StageFinished):
            kinds = {"accuracy": event.accuracy, "average": event.average, "task_accuracy": event.task_accuracy}
            numbers = _by_predictor(kinds) | {"classes": event.classes, "seconds/stage": event.seconds}
            for by, column in event.accuracy_by_stage.items():
                numbers |= {f"accuracy_of_stage_{i}/{by}": value for i, value in enumerate(column)}
            yield _log("stage", event.stage, numbers)
        elif isinstance(event, events.RunFinished) and event.directory is not None:
            stage = len(event.result["stages"]) - 1
            for confusion in confusions(Path(event.directory)):
                yield lambda tracker, confusion=confusion: tracker.log_confusion(stage, confusion)
        elif isinstance(event, events.Learned):
            yield _log("lesson", 0, _learned(event))
        if type(event) in ENDS:
            summary = _summary(event)
            yield lambda tracker: tracker.finish(ENDS[type(event)], summary)

    def _position(self, stage: int, phase: str, epoch: int) -> int:
        """The position of an epoch among all; an epoch that a resumed run repeats keeps its position."""
        return self._epochs.setdefault((stage, phase, epoch), len(self._epochs))


def _log(axis: Axis, step: int, numbers: Mapping[str, float]) -> Callable[[Tracker], None]:
    return lambda tracker: tracker.log(axis, step, numbers)


def _by_predictor(kinds: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    return {f"{kind}/{by}": value for kind, found in kinds.items() for by, value in found.items() if value is not None}


def _summary(event: Event) -> dict[str, float]:
    if not isinstance(event, events.RunFinished):
        return {}  # of a lesson everything is logged at its end
    result = {f"summary/{title}": event.result[key] for key, title in MEASURES.items()}
    return _by_predictor(result) | {"summary/seconds": event.result["seconds"]}


def _learned(event: events.Learned) -> dict[str, float]:
    kinds = {"old_before": event.before, "old": event.after, "new": event.new_accuracy}
    found = _by_predictor({f"accuracy_{name}": values for name, values in kinds.items()})
    return found | {"classes": event.num_classes, "exemplars": event.exemplars, "seconds/lesson": event.seconds}


def _warning(name: str, error: Exception) -> Warned:
    if isinstance(error, EngramError):  # a sentence by itself
        return Warned(f"the run continues without the tracker {name}: {error}")
    reason = " ".join(str(error).split())[:200]
    return Warned(f"the tracker {name} failed ({type(error).__name__}: {reason}); the run continues without it")


def describe_run(event: Event) -> TrackedRun | None:
    """Describe a run from its directory, when it starts; without one, only by what the event has."""
    if not isinstance(event, events.RunStarted):
        return None
    if event.directory is None:
        return describe(event.recipe, {}, {"recipe": event.recipe, "method": event.method, **event.card})
    directory = Path(event.directory)
    manifest = read_manifest(directory)
    about = {"recipe": manifest.recipe, "method": event.method, "directory": str(directory.resolve())}
    about |= {"data": manifest.data.name, "command": manifest.command or ""}
    about |= {f"hardware.{name}": value for name, value in manifest.hardware.items()}
    key = hashlib.blake2b(f"{directory.resolve()}\n{manifest.created}".encode(errors="replace"), digest_size=8)
    return describe(directory.resolve().name, manifest.config, about | dict(manifest.versions), key.hexdigest())


def describe(name: str, config: Mapping[str, Any], about: Mapping[str, Any], key: str | None = None) -> TrackedRun:
    """Describe a run or a lesson. key: None for a new one."""
    texts = {word: str(value) for word, value in {**versions(), **about}.items()}
    return TrackedRun(name, key or uuid.uuid4().hex[:16], flatten(config), texts)


def confusions(directory: Path) -> list[Confusion]:
    """Return the confusion matrices after the last stage of a run, for each predictor."""
    from engram.report.figures import confusion as draw  # matplotlib takes a second to import
    from engram.report.svg import drawing_style

    (group,) = make_groups([read_run(directory)])
    with drawing_style():
        return [Confusion(by, group.class_names, group.confusion(by), draw(group, by).png()) for by in group.predictors]
