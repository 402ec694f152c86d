"""`engram learn`: a new model from a folder of class folders, or new classes for an existing model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engram.cli.commands.model_common import (
    check_new_model,
    config_arguments,
    exclude,
    list_labelled,
    nesting_problem,
    prepare_hardware,
    read_files,
    refuse_models,
)
from engram.cli.display import follow, make_display
from engram.cli.options.models import Learn
from engram.cli.signals import Interrupt
from engram.cli.streams import printable, tell
from engram.cli.text import (
    clock,
    count_classes,
    count_images,
    duration,
    make_console,
    make_table,
    percent,
    print_line,
    print_table,
    shorten,
)
from engram.core.errors import EngramError
from engram.core.events import EpochsChosen, Event, Learned, Stopped
from engram.core.io import typed_path
from engram.data.sources.table import is_table
from engram.models.file_groups import FOLDER, NONE, check_grouping, group_keys
from engram.models.inputs import ImageFiles
from engram.models.labels import labels_by_name
from engram.models.learning import has_learning, learn_into
from engram.models.lesson import LessonStarted
from engram.models.lesson_plan import LearnedBefore, LearningResumed, LessonNotice, LessonRead
from engram.models.store.codec import read_manifest_if_exists
from engram.track import TrackedRun, Tracking
from engram.track.tracking import describe


def learn_command(options: Learn, typed: Sequence[str]) -> int:
    """Carry out `engram learn`; return the exit status."""
    exclude(options.quiet, options.json)
    _check(options)
    prepare_hardware(options.hardware)
    tracking = Tracking(options.track)
    console = make_console()
    place = typed_path(options.model)
    if options.lesson.group_by is not None:
        check_grouping(options.lesson.group_by)
    refuse_models("learn", options.images)
    _refuse_model_among_images(place, typed_path(options.images))
    manifest = read_manifest_if_exists(place)
    known: list[Hashable] = [] if manifest is None else [entry["label"] for entry in manifest["classes"]]
    paths, labels = _list_images(options, known, is_new=manifest is None)
    shown = None if options.quiet or options.json else console
    lesson, interrupt = options.lesson, Interrupt()
    events = learn_into(
        place,
        ImageFiles(paths, lambda files, side: read_files(files, side, lesson.skip_bad, shown)),
        labels,
        config=config_arguments(options.new_model, is_new=manifest is None),
        start=None if options.new_model.from_ is None else typed_path(options.new_model.from_),
        known="refresh" if lesson.more_of_known else "ignore",
        epochs="auto" if lesson.epochs is None and lesson.minutes is None else lesson.epochs,
        minutes=lesson.minutes,
        restart=lesson.restart,
        undoable=not lesson.no_undo,
        undo_steps=lesson.undo_steps,
        groups=None if lesson.group_by is None else group_keys(paths, labels, lesson.group_by, _root(options.images)),
        near_duplicates=lesson.group_by != NONE,
        validate=_images_to_hold_out(options, known, shown),
        stop=interrupt,
        checkpoint_minutes=lesson.checkpoint_minutes,
        device=options.hardware.device,
    )
    number = 1 + (0 if manifest is None else len(manifest["history"]))
    command = shlex.join(["engram", *(word for word in typed if word != "--restart")])  # --restart would drop it again
    named = f"{place.resolve().name}-lesson{number}"
    tracked = tracking.follow(events, _describe(named))
    return _follow(_print_sentences(tracked, console, options), number, console, interrupt, options, command)


def _describe(name: str) -> Callable[[Event], TrackedRun | None]:
    """Return a function that describes the lesson to trackers when it starts."""

    def describe_lesson(event: Event) -> TrackedRun | None:
        if not isinstance(event, LessonStarted):
            return None
        return describe(name, event.config.to_plain(), {"method": event.config.method, "lesson": name})

    return describe_lesson


def _check(options: Learn) -> None:
    lesson = options.lesson
    if lesson.epochs is not None and lesson.minutes is not None:
        raise EngramError("--epochs and --minutes exclude each other; give one of them")
    if lesson.epochs is not None and lesson.epochs < 1:
        raise EngramError(f"--epochs must be at least 1, got {lesson.epochs}")
    if lesson.minutes is not None and lesson.minutes <= 0:
        raise EngramError(f"--minutes must be more than 0, got {lesson.minutes:g}")
    if lesson.checkpoint_minutes < 0:
        raise EngramError(f"--checkpoint-minutes must be 0 or more, got {lesson.checkpoint_minutes:g}")
    check_new_model(options.new_model)


def _refuse_model_among_images(place: Path, images: Path) -> None:
    """Refuse a model inside the folder of images: the next lesson would read its pictures as a class."""
    real, root = place.resolve(), images.resolve()
    if real == root or not real.is_relative_to(root):
        return
    if not any(part.startswith(".") for part in real.relative_to(root).parts):  # hidden folders are skipped
        raise EngramError(f"the model {place} would be inside the folder of images {images}; choose a path outside it")


def _list_images(options: Learn, known: Sequence[Hashable], is_new: bool) -> tuple[list[str], list[Hashable]]:
    """Return the image files and the label of each. A folder named like a known label, which may be 7, gets that label.

    Empty class folders are left out with a notice, and with --skip-bad those without a file of a kind that is read.
    """
    left_out: list[str] = []
    paths, labels = list_labelled(options.images, options.table, left_out, options.lesson.skip_bad)
    problem = nesting_problem(options.images, options.table, is_new)
    if problem is not None and options.lesson.group_by != FOLDER:
        raise EngramError(f"{problem} or, if they are groups of its images, give --group-by {FOLDER}")
    if left_out:
        _print_notice(f"left out class folders that have no image: {shorten(list(map(printable, left_out)), 60)}")
    by_name = labels_by_name(known)
    return paths, [by_name.get(label, label) for label in labels]


def _root(images: str) -> str:
    """Return the folder of images; of a table, the folder that it is in."""
    place = typed_path(images)
    return str(place.parent if is_table(images) else place)


def _images_to_hold_out(
    options: Learn, known: Sequence[Hashable], console: Console | None
) -> tuple[ImageFiles, list[Hashable]] | None:
    """Return the images of --validate and their labels, or None."""
    lesson = options.lesson
    if lesson.validate is None:
        return None
    refuse_models("learn", lesson.validate)
    paths, labels = list_labelled(lesson.validate, options.table, [], lesson.skip_bad)
    by_name = labels_by_name(known)
    files = ImageFiles(paths, lambda files, side: read_files(files, side, lesson.skip_bad, console))
    return files, [by_name.get(label, label) for label in labels]


def _print_notice(text: str) -> None:
    tell(text)


def _tell_start(console: Console, event: LessonRead, place: Path) -> None:
    names = list(dict.fromkeys(map(printable, event.labels)))
    count = f"{count_images(event.images)} of {count_classes(len(names))}"
    print_line(console, f"{count}: {shorten(names, 60)}; read in {duration(event.seconds)}")
    config = event.config
    if config is not None:
        height, width = config.image_size
        network = config.backbone if config.weights is None else f"{config.backbone} (pretrained)"
        print_line(
            console,
            f"a new model in {place}: {config.method}, {network}, {width}x{height} pixels, "
            f"memory {config.memory}, {100 * config.validation:g} % held out",
        )


def _follow(
    events: Generator[Event], number: int, console: Console, interrupt: Interrupt, options: Learn, command: str
) -> int:
    """Show the events of the lesson; return the exit status."""
    first = next(events)
    if isinstance(first, LearnedBefore):
        if options.json:
            print_line(console, json.dumps(first.to_json()))
        else:
            names = shorten(list(map(printable, first.classes)), 60)
            print_line(
                console, f"{names}: learned before (the last lesson was on {first.last_lesson}); nothing was done"
            )
        return 0
    display = make_display(console, interrupt, quiet=options.quiet, as_json=options.json, lesson=number)
    same_command = "the same command without --restart" if options.lesson.restart else "the same command"
    try:
        with interrupt, closing(events):
            last = follow(chain([first], events), display)
    except KeyboardInterrupt:
        saved = has_learning(typed_path(options.model))
        rest = f"{same_command} continues from the last checkpoint" if saved else "nothing was saved yet"
        raise KeyboardInterrupt(f"stopped at once; the model did not change; {rest}") from None
    if isinstance(last, Learned):
        if not options.json:
            _tell_learned(console, last, options)
        return 0
    assert isinstance(last, Stopped), f"unexpected last event {last.name}"
    if not options.json:
        print_line(console, f"saved; the model did not change. To continue, run {same_command}:")
        print_line(console, command, "bold")
    return interrupt.status


def _print_sentences(events: Iterator[Event], console: Console, options: Learn) -> Generator[Event]:
    """Yield the events, but print those that are one sentence; with JSON only notices, on stderr."""
    for event in events:
        if isinstance(event, LessonNotice) and not isinstance(event, LearningResumed):
            _print_notice(event.message)
            continue
        if isinstance(event, LessonRead) and not options.quiet and not options.json:
            _tell_start(console, event, typed_path(options.model))
        if options.json or not isinstance(event, (LearningResumed, EpochsChosen)):
            yield event
        elif isinstance(event, EpochsChosen):
            if not options.quiet:
                print_line(console, _epochs_line(event))
            elif not event.fits:
                _print_notice(_epochs_line(event))
        elif not options.quiet:
            print_line(console, "learning was interrupted here; it continues from its checkpoint")


def _epochs_line(event: EpochsChosen) -> str:
    epochs = f"{event.epochs} epoch{'s' if event.epochs > 1 else ''} of {duration(event.seconds_per_epoch)}"
    minutes = f"{event.minutes:g} minute{'' if event.minutes == 1 else 's'}"
    if not event.fits:
        return (
            f"even one epoch does not fit into {minutes}: it takes about {duration(event.seconds)} and is done anyway"
        )
    return f"by the first steps {epochs} each fit into {minutes}: about {clock(event.seconds)} in all"


def _tell_learned(console: Console, event: Learned, options: Learn) -> None:
    """Print what was learned, kept and forgotten."""
    measured = bool(event.new_accuracy or event.after)
    print_line(console, learned_line(event, with_accuracy=options.quiet or not measured))
    if options.quiet:
        return
    if measured:
        print_table(console, lesson_table(event))
        if options.by_class:
            print_table(console, by_class_table(event))
    print_line(console, f"next: engram predict {shlex.quote(options.model)} PATH")


def learned_line(event: Learned, with_accuracy: bool) -> str:
    """Return the result of a lesson in one line. with_accuracy: no table with the accuracies follows."""
    again = list(map(printable, event.refreshed))
    new = [printable(name) for name in event.new if name not in event.refreshed]
    parts = [f"learned {shorten(new, 50)}"] if new else []
    parts += [f"learned again {shorten(again, 50)}"] if again else []
    shares = _balanced(event)
    said = [f"of these {_both(event, 'new')}"] if event.new_accuracy else []
    for which, before, after in (
        ("those learned again", "refreshed_before", "refreshed_after"),
        ("the old", "before", "after"),
    ):
        said += [f"of {which} {_both(event, before)} before and {_both(event, after)} now"] if shares[after] else []
    accuracy = f"; held-out accuracy (mean over classes; plain: of all images) {', '.join(said)}"
    exemplars = f"{event.exemplars} exemplar{'s' if event.exemplars != 1 else ''}"
    exemplars += f" and {event.held_out} held-out image{'s' if event.held_out != 1 else ''} kept"
    where = f" ({event.path})" if event.path else ""
    return (
        f"{', '.join(parts)} in {duration(event.seconds)}; {count_classes(event.num_classes)} known, {exemplars}"
        f"{accuracy if said and with_accuracy else ''}{where}"
    )


def _balanced(event: Learned) -> dict[str, dict[str, float]]:
    """Return the balanced accuracies by the names that the plain ones have."""
    return {
        "before": event.before,
        "after": event.after,
        "new": event.new_accuracy,
        "refreshed_before": event.refreshed_before,
        "refreshed_after": event.refreshed_after,
    }


def _both(event: Learned, name: str) -> str:
    """Return balanced and plain accuracy by predictor: cnn 51.3 (plain 49.0)."""
    plain = event.plain.get(name, {})
    return ", ".join(
        f"{by} {percent(share)}{f' (plain {percent(plain[by])})' if by in plain else ''}"
        for by, share in _balanced(event)[name].items()
    )


def lesson_table(event: Learned) -> Table:
    """Return held-out accuracy, balanced and plain, by predictor: old classes, forgetting, new classes."""
    predictors = list(dict.fromkeys([*event.new_accuracy, *event.after]))
    columns = [f"{by} %\n{kind}" for by in predictors for kind in ("balanced", "plain")]
    table = make_table(["held-out accuracy", *columns], right=columns)
    rows: dict[str, str] = {}
    if event.after:
        rows |= {"old classes, before": "before", "old classes, now": "after", "forgotten, points": "lost"}
    if event.refreshed:
        rows |= {"learned again, before": "refreshed_before", "learned again, now": "refreshed_after"}
    if len(event.new) > len(event.refreshed):
        rows["new and learned again" if event.refreshed else "classes learned now"] = "new"
    kinds = [_with_lost(_balanced(event)), _with_lost(event.plain)]
    for title, name in rows.items():
        table.add_row(title, *[percent(kind.get(name, {}).get(by)) for by in predictors for kind in kinds])
    return table


def _with_lost(shares: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the accuracies, and what the old classes lost."""
    before, after = shares.get("before", {}), shares.get("after", {})
    return shares | {"lost": {by: before[by] - after[by] for by in after if by in before}}


def by_class_table(event: Learned) -> Table:
    """Return held-out accuracy of each class before and after the lesson, by predictor."""
    predictors = list(dict.fromkeys(by for entry in event.by_class for by in entry["after"]))
    columns = [f"{by}\n{when}" for by in predictors for when in ("before %", "now %")]
    table = make_table(["class", *columns], right=columns)
    for entry in event.by_class:
        table.add_row(printable(entry["class"]), *_cells(entry, predictors))
    return table


def _cells(entry: dict[str, Any], predictors: list[str]) -> list[str]:
    before, after = entry["before"] or {}, entry["after"]
    return [percent(values.get(by)) for by in predictors for values in (before, after)]
