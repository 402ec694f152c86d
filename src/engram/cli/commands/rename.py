"""`engram rename`: rename a class."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engram.cli.commands.model_common import exclude, find_label, printable
from engram.cli.options.models import Rename
from engram.cli.text import make_console, print_line
from engram.core.io import typed_path
from engram.models.edit import rename_class
from engram.models.labels import encode_label
from engram.models.store.codec import read_manifest


def rename_command(options: Rename, typed: Sequence[str]) -> int:
    """Carry out `engram rename`; return the exit status."""
    del typed
    exclude(options.quiet, options.json)
    place = typed_path(options.model)
    labels = [known["label"] for known in read_manifest(place)["classes"]]
    old = find_label(labels, options.old, lambda label: f"rename_class({str(place)!r}, {label}, {options.new!r})")
    rename_class(place, old, options.new, drop_learning=options.drop_learning)
    if options.json:
        print_line(make_console(), json.dumps({"renamed": encode_label(old), "to": options.new}))
    elif not options.quiet:
        print_line(make_console(), f"{printable(old)} is now called {printable(options.new)}")
    return 0
