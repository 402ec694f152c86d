"""`engram remove`: remove classes with their pictures, or single images, from a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from engram.cli.commands.model_common import confirmed, exclude, find_label, printable
from engram.cli.commands.predict import check_paths, expand
from engram.cli.options.models import Remove
from engram.cli.text import count_classes, make_console, print_line, shorten
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.models.edit import RemovedImages, remove_class, remove_images
from engram.models.labels import encode_label
from engram.models.store.codec import read_manifest
from engram.models.store.writer import clean_up_model


def remove_command(options: Remove, typed: Sequence[str]) -> int:
    """Carry out `engram remove`; return the exit status."""
    del typed
    exclude(options.quiet, options.json)
    console = make_console()
    place = typed_path(options.model)
    if options.images:
        return _remove_images(options, place, console)
    classes = read_manifest(place)["classes"]
    clean_up_model(place)  # even if the class is gone already: a killed removal may have left files
    labels = [known["label"] for known in classes]

    def call(label: str) -> str:
        return f"remove_class({str(place)!r}, {label})"

    asked = [find_label(labels, name, call) for name in dict.fromkeys(options.classes)]  # removes all of them or none
    names = shorten([printable(label) for label in asked], 60)
    if not options.yes and not options.json and not confirmed(f"remove {names} from {place} for good?"):
        print("engram: nothing was removed", file=sys.stderr)
        return 1
    left = len(remove_class(place, *asked, drop_learning=options.drop_learning).classes)
    for label in asked:
        known = classes[labels.index(label)]
        if options.json:
            print_line(console, json.dumps({"removed": encode_label(label), "classes": left}))
        elif not options.quiet:
            images = f"{known['exemplars']} exemplars and {known['heldout']} held-out images"
            print_line(console, f"removed {printable(label)} with {images}")
    if not options.quiet and not options.json:
        print_line(
            console,
            f"{count_classes(left)} left; the backbone keeps in its weights what it learned from such images",
        )
    return 0


def _remove_images(options: Remove, place: Path, console: Console) -> int:
    """Carry out `engram remove --images`; return the exit status."""
    typed = [str(typed_path(text)) for text in options.classes]
    check_paths(typed)
    paths = [path for path in expand(typed) if path is not None]
    if not paths:
        raise EngramError(f"there is no image in {', '.join(typed)}")
    question = f"remove what {place} kept of {len(paths)} image{'' if len(paths) == 1 else 's'} for good?"
    if not options.yes and not options.json and not confirmed(question):
        print("engram: nothing was removed", file=sys.stderr)
        return 1
    removed = remove_images(place, paths, drop_learning=options.drop_learning)
    if options.json:
        kinds = {"exemplars": removed.exemplars, "heldout": removed.heldout, "learned": removed.learned}
        counts = {
            kind: [{"class": encode_label(label), "images": number} for label, number in found.items()]
            for kind, found in kinds.items()
        }
        print_line(
            console, json.dumps({"given": removed.given, "found": removed.found, **counts, "before": removed.before})
        )
    elif not removed.found:
        print(f"engram: the model has nothing of the {removed.given} images; nothing was removed", file=sys.stderr)
    elif not options.quiet:
        _tell(console, removed)
    return 0 if removed.found else 1


def _tell(console: Console, removed: RemovedImages) -> None:
    print_line(console, f"{removed.found} of {removed.given} images were found")
    for label in dict.fromkeys([*removed.exemplars, *removed.heldout]):
        counts = [
            f"{found[label]} {name}{'' if found[label] == 1 else 's'}"
            for name, found in (("exemplar", removed.exemplars), ("held-out image", removed.heldout))
            if label in found
        ]
        print_line(console, f"removed {' and '.join(counts)} of {printable(label)}")
    for label, number in removed.learned.items():
        print_line(console, f"removed the digests of {number} image{'' if number == 1 else 's'} of {printable(label)}")
    if removed.before:
        print_line(console, "removed the state before the last lesson, which contained some of them")
    if removed.exemplars or removed.learned:  # nothing was learned from held-out images
        print_line(
            console,
            "the network keeps in its weights what it learned from them; only a new model without them would not",
        )
