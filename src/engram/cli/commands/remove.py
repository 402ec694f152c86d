"""`engram remove`: a class and all that is kept of it, gone from the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engram.cli.commands.common import print_line
from engram.cli.commands.models import exclude, find_label, printable
from engram.cli.model_options import Remove
from engram.cli.text import count_classes, make_console
from engram.modeldir import read_manifest, remove_class
from engram.modeldir.labels import encode_label


def remove_command(options: Remove, typed: Sequence[str]) -> int:
    """The exit status of `engram remove`."""
    del typed
    exclude(options.quiet, options.json)
    console = make_console()
    place = Path(options.model).expanduser()
    classes = read_manifest(place)["classes"]
    labels = [known["label"] for known in classes]
    asked = [find_label(labels, name) for name in dict.fromkeys(options.classes)]  # all are there, or none goes
    for label in asked:
        known = classes[labels.index(label)]
        model = remove_class(place, label, drop_learning=options.drop_learning)
        left = len(model.classes)
        if options.json:
            print_line(console, json.dumps({"removed": encode_label(label), "classes": left}))
        elif not options.quiet:
            print_line(
                console,
                f"removed {printable(label)} with {known['exemplars']} exemplars and {known['heldout']} held-out "
                f"images; {count_classes(left)} left",
            )
    if not options.quiet and not options.json:
        print_line(console, "what the network's backbone learned from such images stays in its weights")
    return 0
