"""`engram learn`: a new model from a folder of class folders, or new classes for an existing model."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from engram.cli.commands.model_common import (
    exclude,
    labels_by_name,
    prepare_hardware,
    read_files,
    refuse_models,
    tell_skipped_files,
)
from engram.cli.display import follow, make_display
from engram.cli.options.models import Learn, NewModelFlags
from engram.cli.result_tables import by_class_table, learned_line, lesson_table
from engram.cli.signals import Interrupt
from engram.cli.streams import printable, tell
from engram.cli.text import clock, count_classes, duration, make_console, print_line, print_table, shorten
from engram.core.errors import EngramError
from engram.core.events import EpochsChosen, Event, ImagesRead, Learned, Stopped
from engram.core.io import typed_path
from engram.data.augment import Augmentation
from engram.data.decode.image import EXTENSIONS, choose_size
from engram.data.sources.folder import check_not_nested, list_classes
from engram.data.store import Images
from engram.models.inputs import file_side
from engram.models.labels import similar_label_warnings
from engram.models.learning import has_learning, learn_into
from engram.models.lesson_plan import LabelConcerns, LearningResumed, SimilarLabels, plan_lesson
from engram.models.model_config import DEFAULT_METHOD, LARGEST_SIDE, VALIDATION_LEAST, ModelConfig
from engram.models.store.codec import read_manifest
from engram.models.store.generations import POINTER, NoModelYet
from engram.models.store.writer import clean_up_model, refuse_other_directory

HOLDOUT = 0.2
NAMED = 5  # classes in a warning


def learn_command(options: Learn, typed: Sequence[str]) -> int:
    """Carry out `engram learn`; return the exit status."""
    exclude(options.quiet, options.json)
    _check(options)
    prepare_hardware(options.hardware)
    console = make_console()
    silent = options.quiet or options.json
    place = typed_path(options.model)
    refuse_models("learn", options.images)
    _refuse_model_among_images(place, typed_path(options.images))
    refuse_other_directory(place)  # before the images are read; the writer checks again
    manifest = _read_if_exists(place)
    known: list[Hashable] = [] if manifest is None else [entry["label"] for entry in manifest["classes"]]
    paths, labels = _list_images(options, known, is_new=manifest is None)
    if manifest is not None:
        _refuse_changes(options.new_model, ModelConfig.from_plain(manifest["config"]), place)
        clean_up_model(place)
    side = _side(options.new_model, manifest, paths)

    def read(rows: Sequence[int]) -> tuple[Images, list[int]]:
        chosen = [paths[row] for row in rows]
        images, kept = read_files(chosen, side, options.lesson.skip_bad, None if silent else console)
        return images, [rows[position] for position in kept]

    plan = plan_lesson(place, labels, known, read, options.lesson.more_of_known)
    if plan.learned_before:
        assert manifest is not None
        _tell_learned_before(console, manifest, plan.learned_before, options)
        return 0
    if plan.left_out:
        _print_notice(f"left out what the model knows already: {_names(plan.left_out)} (--more-of-known)")
    config = _choose_config(options, side, len(plan.rows)) if manifest is None else None  # refuses before reading
    started = time.perf_counter()
    images, rows = read(plan.rows)
    images_read = ImagesRead(len(images), time.perf_counter() - started)
    labels = _labels_read([labels[row] for row in plan.rows], [labels[row] for row in rows])
    if not silent:
        resumes = has_learning(place) and not options.lesson.restart
        _tell_start(console, place, None if resumes else config, labels, images_read)
    _tell_concerns(labels, known)
    interrupt = Interrupt()
    events = learn_into(
        place,
        images,
        labels,
        config=config,
        known="refresh" if options.lesson.more_of_known else "refuse",
        epochs=_epochs(options, manifest, len(images)),
        minutes=options.lesson.minutes,
        restart=options.lesson.restart,
        undoable=not options.lesson.no_undo,
        stop=interrupt,
        checkpoint_minutes=options.lesson.checkpoint_minutes,
        device=options.hardware.device,
    )
    lesson = 1 + (0 if manifest is None else len(manifest["history"]))
    command = shlex.join(["engram", *(word for word in typed if word != "--restart")])  # --restart would drop it again
    return _follow(chain([images_read], events), lesson, console, interrupt, options, command)


def _check(options: Learn) -> None:
    lesson, holdout = options.lesson, options.new_model.holdout
    if lesson.epochs is not None and lesson.minutes is not None:
        raise EngramError("--epochs and --minutes exclude each other; give one of them")
    if lesson.epochs is not None and lesson.epochs < 1:
        raise EngramError(f"--epochs must be at least 1, got {lesson.epochs}")
    if lesson.minutes is not None and lesson.minutes <= 0:
        raise EngramError(f"--minutes must be more than 0, got {lesson.minutes:g}")
    if lesson.checkpoint_minutes < 0:
        raise EngramError(f"--checkpoint-minutes must be 0 or more, got {lesson.checkpoint_minutes:g}")
    if holdout is not None and not 0 <= holdout < 1:
        raise EngramError(f"--holdout must be a fraction of 0 or more and below 1, got {holdout:g}")


def _refuse_model_among_images(place: Path, images: Path) -> None:
    """Refuse a model inside the folder of images: the next lesson would read its pictures as a class."""
    real, root = place.resolve(), images.resolve()
    if real == root or not real.is_relative_to(root):
        return
    if not any(part.startswith(".") for part in real.relative_to(root).parts):  # hidden folders are skipped
        raise EngramError(f"the model {place} would be inside the folder of images {images}; choose a path outside it")


def _list_images(options: Learn, known: Sequence[Hashable], is_new: bool) -> tuple[list[str], list[Hashable]]:
    """Return the image files and the label of each. A folder named like a known label, which may be 7, gets that label.

    With --skip-bad, empty class folders are left out with a notice.
    """
    empty: list[str] = []
    paths, labels = list_classes(options.images, empty)
    if empty and not options.lesson.skip_bad:
        raise EngramError(
            f"class folders without an image: {_names(empty)}; add some ({', '.join(EXTENSIONS)}), remove them, or "
            "leave them out with --skip-bad"
        )
    check_not_nested(options.images, is_new=is_new)
    tell_skipped_files(options.images)
    if empty:
        _print_notice(f"left out class folders that have no image: {_names(empty)}")
    by_name = labels_by_name(known)
    return paths, [by_name.get(label, label) for label in labels]


def _read_if_exists(place: Path) -> dict[str, Any] | None:
    """Return the manifest of the model, or None if there is no model yet."""
    if not (place / POINTER).exists():
        return None
    try:
        return read_manifest(place)
    except NoModelYet:
        return None


def _refuse_changes(flags: NewModelFlags, config: ModelConfig, place: Path) -> None:
    """Refuse flags that describe another model than the one at this path."""
    changed = config.changed_by(
        method=flags.method,
        backbone=flags.backbone,
        side=flags.image_size,
        memory=flags.memory,
        validation=flags.holdout,
        flip=False if flags.no_mirror else None,
        seed=flags.seed,
    )
    for name, value in changed.items():
        flag = {"side": "--image-size", "validation": "--holdout", "flip": "--no-mirror"}.get(name, f"--{name}")
        made = f"without {flag}" if name == "flip" else f"with {flag} {value}"
        raise EngramError(
            f"the model at {place} was made {made}, which cannot be changed; leave {flag} out, or start a new model"
        )
    if flags.set:
        raise EngramError(f"the settings of the model at {place} cannot be changed; leave --set out")


def _side(flags: NewModelFlags, manifest: dict[str, Any] | None, paths: Sequence[str]) -> int:
    if manifest is not None:
        height, width = manifest["config"]["image_size"]
        return file_side((height, width))
    if flags.image_size is not None and not 8 <= flags.image_size <= LARGEST_SIDE:
        raise EngramError(f"--image-size must be 8 to {LARGEST_SIDE} pixels, got {flags.image_size}")
    return flags.image_size or choose_size(paths)


def _epochs(options: Learn, manifest: dict[str, Any] | None, images: int) -> int | None:
    """Return the epochs of the lesson; None means those of the configuration, or those that --minutes allows."""
    if manifest is None or options.lesson.epochs is not None or options.lesson.minutes is not None:
        return options.lesson.epochs
    trained = images + sum(known["exemplars"] for known in manifest["classes"])
    return ModelConfig.from_plain(manifest["config"]).lesson_epochs(trained, options.hardware.device)


def _choose_config(options: Learn, side: int, images: int) -> ModelConfig:
    """Return the configuration of a new model."""
    flags = options.new_model
    settings: dict[str, Any] = {}
    for text in flags.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise EngramError(f"--set takes KEY=VALUE, got {text!r}")
        settings[key.strip()] = value.strip()
    config = ModelConfig.choose(
        flags.method or DEFAULT_METHOD,
        image_size=side,
        images=images,
        memory=flags.memory,
        backbone=flags.backbone,
        settings=settings,
        seed=1 if flags.seed is None else flags.seed,
        validation=HOLDOUT if flags.holdout is None else flags.holdout,
        device=options.hardware.device,
    )
    if flags.no_mirror:
        config = replace(config, augmentation=Augmentation(pad=config.augmentation.pad, flip=False))
    return config


def _labels_read(given: Sequence[Hashable], read: list[Hashable]) -> list[Hashable]:
    """Return the labels of the images that were read; report classes without such an image, refuse if there is none."""
    lost = sorted(set(given) - set(read), key=str)
    if not read:
        raise EngramError(f"no image could be read of {_names(lost)}; repair the images or give others")
    if lost:
        _print_notice(f"left out classes of which no image could be read: {_names(lost)}")
    return read


def _names(labels: Sequence[Hashable]) -> str:
    return shorten(list(dict.fromkeys(printable(label) for label in labels)), 60)


def _print_notice(text: str) -> None:
    tell(text)


def _tell_learned_before(
    console: Console, manifest: dict[str, Any], labels: Sequence[Hashable], options: Learn
) -> None:
    lessons = [entry["date"] for entry in manifest["history"] if entry["what"] == "learned"]
    date = printable(lessons[-1])[:16].replace("T", " ")
    if options.json:
        names = list(dict.fromkeys(printable(label) for label in labels))
        print_line(console, json.dumps({"event": "learned_before", "classes": names, "last_lesson": date}))
    else:
        print_line(console, f"{_names(labels)}: learned before (the last lesson was on {date}); nothing was done")


def _tell_start(
    console: Console, place: Path, config: ModelConfig | None, labels: Sequence[Hashable], read: ImagesRead
) -> None:
    count = f"{read.images} image{'' if read.images == 1 else 's'}"
    classes = count_classes(len({printable(label) for label in labels}))
    print_line(console, f"{count} of {classes}: {_names(labels)}; read in {duration(read.seconds)}")
    if config is not None:
        height, width = config.image_size
        print_line(
            console,
            f"a new model in {place}: {config.method}, {config.backbone}, {width}x{height} pixels, "
            f"memory {config.memory}, {100 * config.validation:g} % held out",
        )


def _tell_concerns(labels: Sequence[Hashable], known: Sequence[Hashable]) -> None:
    """Print warnings about the labels and the number of images on stderr."""
    for warning in similar_label_warnings(dict.fromkeys(labels), known):
        _print_notice(warning)
    concerns = LabelConcerns.find(labels, known)
    if concerns.unlike_known:
        names = _names(sorted(concerns.unlike_known, key=str))
        _print_notice(f"the model's labels are not text, but those of folders are: {names}")
    if concerns.is_single_class:
        _print_notice("with a single class there is nothing to tell apart; learn a second one too")
    if concerns.few_images:
        few = [f"{printable(label)} ({count})" for label, count in concerns.few_images.items()]
        more = f" and {len(few) - NAMED} more" if len(few) > NAMED else ""
        _print_notice(
            f"classes with fewer than {VALIDATION_LEAST} images are learned badly, and none of them is held out to "
            f"measure accuracy: {', '.join(few[:NAMED])}{more}"
        )


def _follow(
    events: Iterator[Event], lesson: int, console: Console, interrupt: Interrupt, options: Learn, command: str
) -> int:
    """Show the events of the lesson; return the exit status."""
    display = make_display(console, interrupt, quiet=options.quiet, as_json=options.json, lesson=lesson)
    same_command = "the same command without --restart" if options.lesson.restart else "the same command"
    try:
        with interrupt:
            last = follow(_print_sentences(events, console, options), display)
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


def _print_sentences(events: Iterator[Event], console: Console, options: Learn) -> Iterator[Event]:
    """Yield the events, but print those that are one sentence, unless the output is JSON."""
    for event in events:
        if isinstance(event, SimilarLabels):
            continue  # printed before the lesson
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
    print_line(console, learned_line(event))
    if options.quiet:
        return
    if event.new_accuracy or event.after:
        print_table(console, lesson_table(event))
        if options.by_class:
            print_table(console, by_class_table(event))
    print_line(console, f"next: engram predict {shlex.quote(options.model)} PATH")
