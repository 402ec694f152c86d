"""`engram learn`: a new model from a folder of class folders, or new classes for one there is."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from engram.cli.commands.model_common import (
    exclude,
    labels_by_name,
    naming_flags,
    prepare_hardware,
    printable,
    read_files,
    refuse_models,
    tell_passed_over,
)
from engram.cli.display import follow, make_display
from engram.cli.lesson_tables import by_class_table, learned_line, lesson_table
from engram.cli.options.models import Learn, NewModelFlags
from engram.cli.signals import Interrupt
from engram.cli.text import bold, clock, count_classes, duration, make_console, print_line, print_table, shorten
from engram.core.errors import EngramError
from engram.core.events import EpochsChosen, Event, ImagesRead, Learned, Stopped, Warned
from engram.core.io import typed_path
from engram.data.augment import Augmentation
from engram.data.decode.image import EXTENSIONS, choose_size
from engram.data.sources.folder import list_classes, refuse_nested
from engram.models.api import RESUMED, ModelConfig, NoModelYet, has_learning, learn_into, open_model, read_manifest
from engram.models.inputs import file_side
from engram.models.labels import doubts
from engram.models.model_config import LARGEST_SIDE, VALIDATION_LEAST
from engram.models.split import knows_all
from engram.models.store.generations import POINTER
from engram.models.store.writer import refuse_others, tidy

HOLDOUT = 0.2
NAMED = 5  # classes in a warning
COMPARED = 4096  # images at a time with what the model was given before


def learn_command(options: Learn, typed: Sequence[str]) -> int:
    """The exit status of `engram learn`."""
    exclude(options.quiet, options.json)
    _check(options)
    prepare_hardware(options.hardware)
    console = make_console()
    silent = options.quiet or options.json
    place = typed_path(options.model)
    refuse_models("learn", options.images)
    _refuse_among_images(place, typed_path(options.images))
    refuse_others(place)  # before the images are read, and again when it is written
    manifest = known_model(place)
    paths, labels = _listed(options, manifest)
    if manifest is not None:
        _refuse_changes(options.new_model, ModelConfig.from_plain(manifest["config"]), place)
        tidy(place)
        if before := _learned_before(options, manifest, place, (paths, labels), None if silent else console):
            _tell_learned_before(console, manifest, before, options)
            return 0
        paths, labels = _leave_out_known(options, manifest, paths, labels)
    size = _side(options.new_model, manifest, paths)
    config = choose_config(options, size, len(paths)) if manifest is None else None  # refused before, not after reading
    started = time.perf_counter()
    images, kept = read_files(paths, size, options.lesson.skip_bad, None if silent else console)
    read = ImagesRead(len(images), time.perf_counter() - started)
    labels = _kept_labels(labels, kept)
    epochs = options.lesson.epochs
    if manifest is not None and epochs is None and options.lesson.minutes is None:
        trained = len(images) + sum(known["exemplars"] for known in manifest["classes"])
        epochs = ModelConfig.from_plain(manifest["config"]).lesson_epochs(trained, options.hardware.device)
    if not silent:
        begun = has_learning(place) and not options.lesson.restart
        _tell_beginning(console, place, None if begun else config, labels, read)
    told = _tell_doubts(labels, [] if manifest is None else [known["label"] for known in manifest["classes"]])
    interrupt = Interrupt()
    events = learn_into(
        place,
        images,
        labels,
        config=config,
        known="refresh" if options.lesson.more_of_known else "refuse",
        epochs=epochs,
        minutes=options.lesson.minutes,
        restart=options.lesson.restart,
        undoable=not options.lesson.no_undo,
        stop=interrupt,
        checkpoint_minutes=options.lesson.checkpoint_minutes,
        device=options.hardware.device,
    )
    lesson = 1 + (0 if manifest is None else len(manifest["history"]))
    again = shlex.join(["engram", *(word for word in typed if word != "--restart")])  # which would drop it once more
    news = (event for event in events if not (isinstance(event, Warned) and event.message in told))
    return _carry_out(chain([read], news), lesson, console, interrupt, options, again)


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
    if options.new_model.holdout is not None and not 0 <= options.new_model.holdout < 1:
        raise EngramError(f"--holdout must be a share of 0 or more and below 1, got {options.new_model.holdout:g}")


def _refuse_among_images(place: Path, images: Path) -> None:
    """Refuses a new model in the folder of images: the next lesson would take its pictures for a class."""
    real, root = place.resolve(), images.resolve()
    if real == root or not real.is_relative_to(root):
        return
    if not any(part.startswith(".") for part in real.relative_to(root).parts):  # such are passed over
        raise EngramError(f"the model {place} would lie in the folder of images {images}; choose a place outside of it")


def _listed(options: Learn, manifest: dict[str, Any] | None) -> tuple[list[str], list[Hashable]]:
    """The image files and the class of each, as the model has it: folders' names are text, but its labels may not be.

    With --skip-bad, empty class folders are passed over by name.
    """
    empty: list[str] = []
    paths, labels = list_classes(options.images, empty)
    names = shorten([printable(name) for name in empty], 60)
    if empty and not options.lesson.skip_bad:
        raise EngramError(
            f"class folders without an image: {names}; add some ({', '.join(EXTENSIONS)}), remove them, or go on "
            "without them with --skip-bad"
        )
    refuse_nested(options.images, is_new=manifest is None)
    tell_passed_over(options.images)
    if empty:
        print(f"engram: left out class folders that have no image: {names}", file=sys.stderr)
    known = labels_by_name([] if manifest is None else [known["label"] for known in manifest["classes"]])
    return paths, [known.get(label, label) for label in labels]


def known_model(place: Path) -> dict[str, Any] | None:
    """What the model there says of itself; None where there is none yet."""
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


def _learned_before(
    options: Learn,
    manifest: dict[str, Any],
    place: Path,
    given: tuple[Sequence[str], Sequence[Hashable]],
    console: Console | None,
) -> list[Hashable]:
    """The classes of the images, if the model was given all of them before, as when a command is given again."""
    paths, labels = given
    if options.lesson.more_of_known or not set(labels) <= {known["label"] for known in manifest["classes"]}:
        return []
    model, side = open_model(place, "cpu")[0], _side(options.new_model, manifest, paths)
    found: dict[Hashable, None] = {}
    for start in range(0, len(paths), COMPARED):
        images, kept = read_files(paths[start : start + COMPARED], side, options.lesson.skip_bad, console)
        own = [labels[start + position] for position in kept]
        if not knows_all(model, images, own):
            return []
        found.update(dict.fromkeys(own))
    return list(found)


def _tell_learned_before(
    console: Console, manifest: dict[str, Any], labels: Sequence[Hashable], options: Learn
) -> None:
    names = list(dict.fromkeys(printable(label) for label in labels))
    lessons = [entry["date"] for entry in manifest["history"] if entry["what"] == "learned"]
    date = printable(lessons[-1])[:16].replace("T", " ")
    if options.json:
        print_line(console, json.dumps({"event": "learned_before", "classes": names, "last_lesson": date}))
    else:
        print_line(console, f"{shorten(names, 60)}: learned before (the last lesson was on {date}); nothing was done")


def _leave_out_known(
    options: Learn, manifest: dict[str, Any], paths: list[str], labels: list[Hashable]
) -> tuple[list[str], list[Hashable]]:
    """The images to learn from: those of classes the model knows are left out, unless more of them was asked for."""
    known = {known["label"] for known in manifest["classes"]}
    left = sorted({label for label in labels if label in known}, key=str)
    if options.lesson.more_of_known or not left:
        return paths, labels
    names = shorten([printable(label) for label in left], 60)
    rest = [(path, label) for path, label in zip(paths, labels, strict=True) if label not in known]
    if not rest:
        raise EngramError(
            f"there is nothing to learn: the model knows {names} already; --more-of-known learns known classes again, "
            "from these images and those it kept"
        )
    print(f"engram: left out what the model knows already: {names} (--more-of-known)", file=sys.stderr)
    return [path for path, _ in rest], [label for _, label in rest]


def _side(flags: NewModelFlags, manifest: dict[str, Any] | None, paths: Sequence[str]) -> int:
    if manifest is None:
        if flags.image_size is not None and not 8 <= flags.image_size <= LARGEST_SIDE:
            raise EngramError(f"--image-size must be 8 to {LARGEST_SIDE} pixels, got {flags.image_size}")
        return flags.image_size or choose_size(paths)
    height, width = manifest["config"]["image_size"]
    return file_side((height, width))


def _kept_labels(labels: Sequence[Hashable], kept: Sequence[int]) -> list[Hashable]:
    """The labels of the images that could be read; names classes of which there is none, and refuses to learn none."""
    found = [labels[position] for position in kept]
    lost = sorted({printable(label) for label in set(labels) - set(found)})
    if not found:
        raise EngramError(f"no image could be read of {shorten(lost, 60)}; mend the images or give others")
    if lost:
        print(f"engram: left out classes of which no image could be read: {shorten(lost, 60)}", file=sys.stderr)
    return found


def choose_config(options: Learn, size: int, images: int) -> ModelConfig:
    """The configuration of a new model."""
    flags = options.new_model
    settings: dict[str, Any] = {}
    for text in flags.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise EngramError(f"--set takes KEY=VALUE, got {text!r}")
        settings[key.strip()] = value.strip()
    config = ModelConfig.choose(
        flags.method or "afc",
        image_size=size,
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


def _tell_beginning(
    console: Console, place: Path, config: ModelConfig | None, labels: Sequence[Hashable], read: ImagesRead
) -> None:
    names = list(dict.fromkeys(printable(label) for label in labels))
    many = f"{read.images} image{'' if read.images == 1 else 's'} of {count_classes(len(names))}"
    print_line(console, f"{many}: {shorten(names, 60)}; read in {duration(read.seconds)}")
    if config is not None:
        height, width = config.image_size
        print_line(
            console,
            f"a new model in {place}: {config.method}, {config.backbone}, {width}x{height} pixels, "
            f"memory {config.memory}, {100 * config.validation:g} % held out",
        )


def _tell_doubts(labels: Sequence[Hashable], known: Sequence[Any]) -> list[str]:
    """Says on stderr what is odd about the labels, and what the lesson lacks: a second class, or images of some.

    Returns what `learn_into` would say too.
    """
    counts = Counter(labels)
    told = doubts(counts, known)
    for doubt in told:
        print(f"engram: {doubt}", file=sys.stderr)
    if known and not any(isinstance(label, str) for label in known) and (new := counts.keys() - set(known)):
        names = shorten(sorted(printable(label) for label in new), 60)
        print(f"engram: the model's labels are not text, but those of folders are: {names}", file=sys.stderr)
    if not known and len(counts) == 1:
        print("engram: one class alone teaches nothing to tell apart yet; learn a second one too", file=sys.stderr)
    few = [f"{printable(label)} ({count})" for label, count in counts.items() if count < VALIDATION_LEAST]
    if few:
        more = f" and {len(few) - NAMED} more" if len(few) > NAMED else ""
        names = ", ".join(few[:NAMED]) + more
        least = f"fewer than {VALIDATION_LEAST} images of a class teach little and are too few to hold any out"
        print(f"engram: {least}, so no accuracy is measured on them: {names}", file=sys.stderr)
    return told


def _carry_out(
    events: Iterator[Event], lesson: int, console: Console, interrupt: Interrupt, options: Learn, command: str
) -> int:
    display = make_display(console, interrupt, quiet=options.quiet, as_json=options.json, lesson=lesson)
    told = events if options.json else _told(events, console, options.quiet)
    try:
        with interrupt, naming_flags("--restart"):
            last = follow(told, display)
    except KeyboardInterrupt:
        saved = has_learning(typed_path(options.model))
        how = "the same command without --restart" if options.lesson.restart else "the same command"
        rest = f"{how} goes on from the last checkpoint" if saved else "nothing was saved yet"
        raise KeyboardInterrupt(f"quit at once, and the model is what it was; {rest}") from None
    if isinstance(last, Learned):
        if not options.json:
            tell_learned(console, last, options)
        return 0
    assert isinstance(last, Stopped), f"a lesson ends learned or stopped, not with {last.name}"
    if not options.json:
        how = "the same command without --restart" if options.lesson.restart else "the same command again"
        print_line(console, f"saved; the model is what it was. To go on, {how}:")
        console.print(bold(command), soft_wrap=True)
    return interrupt.status


def _told(events: Iterator[Event], console: Console, quiet: bool) -> Iterator[Event]:
    """The events, less those that are sentences, which are printed."""
    for event in events:
        text = None
        if isinstance(event, Warned) and event.message == RESUMED:
            text = "learning was interrupted here; it goes on where it stood"
        elif isinstance(event, EpochsChosen):
            text = chosen_line(event)
        elif isinstance(event, Warned):
            event = Warned(re.sub(r"\bafter stage \d+\b", "after this lesson", event.message))
        if text is None:
            yield event
        elif not quiet:
            print_line(console, text)
        elif isinstance(event, EpochsChosen) and not event.fits:
            print(f"engram: {text}", file=sys.stderr)


def chosen_line(event: EpochsChosen) -> str:
    """How many epochs there will be, and why."""
    epochs = f"{event.epochs} epoch{'s' if event.epochs > 1 else ''} of {duration(event.seconds_per_epoch)}"
    minutes = f"{event.minutes:g} minute{'' if event.minutes == 1 else 's'}"
    if not event.fits:
        needs = f"it takes about {duration(event.seconds)} and is done anyway"
        return f"even a lesson of one epoch does not fit into {minutes}: {needs}"
    return f"by the first steps {epochs} each fit into {minutes}: about {clock(event.seconds)} in all"


def tell_learned(console: Console, event: Learned, options: Learn) -> None:
    """Prints what was learned, what was kept and what was forgotten."""
    print_line(console, learned_line(event))
    if options.quiet:
        return
    accuracy: Mapping[str, float] = event.new_accuracy or event.after
    if accuracy:
        print_table(console, lesson_table(event))
    if options.by_class and accuracy:
        print_table(console, by_class_table(event))
    print_line(console, f"next: engram predict {shlex.quote(options.model)} PATH")
