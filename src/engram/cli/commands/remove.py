"""`engram remove`: a class and all that is kept of it, gone from the files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from engram.cli.commands.common import print_line
from engram.cli.commands.models import confirmed, exclude, find_label, naming_flags, printable
from engram.cli.model_options import Remove
from engram.cli.text import count_classes, make_console, shorten
from engram.files import typed_path
from engram.modeldir import read_manifest, remove_class
from engram.modeldir.labels import encode_label


def remove_command(options: Remove, typed: Sequence[str]) -> int:
    """The exit status of `engram remove`."""
    del typed
    exclude(options.quiet, options.json)
    console = make_console()
    place = typed_path(options.model)
    classes = read_manifest(place)["classes"]
    labels = [known["label"] for known in classes]
    call = f"remove_class({str(place)!r}, {{}})"
    asked = [find_label(labels, name, call) for name in dict.fromkeys(options.classes)]  # all are there, or none goes
    names = shorten([printable(label) for label in asked], 60)
    if not options.yes and not options.json and not confirmed(f"remove {names} from {place} for good?"):
        print("engram: nothing was removed", file=sys.stderr)
        return 1
    with naming_flags("--drop-learning"):
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
            f"{count_classes(left)} left; what the network's backbone learned from such images stays in its weights",
        )
    return 0
