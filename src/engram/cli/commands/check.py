"""`engram check`: duplicates, unreadable, tiny and blurry images, and labels that are probably wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engram.cli.commands.model_common import (
    exclude,
    list_labelled,
    nesting_problem,
    prepare_hardware,
    refuse_models,
    report_path,
    tell_unreadable,
)
from engram.cli.main import UNREADABLE
from engram.cli.options.models import Check
from engram.cli.streams import printable, tell
from engram.cli.text import bold, make_console, print_line
from engram.core.io import typed_path
from engram.models.image_check import Checked, ImageFinding, check_images
from engram.models.store.codec import open_model

NONE = "none"
SHOWN = 20  # findings of a kind in the terminal
TITLES = {
    "exact": "groups of the same picture",
    "near": "groups of near-duplicates",
    "label": "labels that are probably wrong",
    "blurry": "blurry",
    "tiny": "tiny",
    "unreadable": "unreadable",
}


def check_command(options: Check, typed: Sequence[str]) -> int:
    """Carry out `engram check`; return the exit status."""
    del typed
    exclude(options.quiet, options.json)
    page = report_path(options.report)
    prepare_hardware(options.hardware)
    refuse_models("check", options.images)
    model = None
    if options.model != NONE:
        model, _ = open_model(typed_path(options.model), options.hardware.device, images=False)
    paths, labels = list_labelled(options.images, options.table, [], skip_bad=True)
    if (problem := nesting_problem(options.images, options.table)) is not None:
        tell(problem)
    done = check_images(paths, labels, model)
    console = make_console()
    counts = {kind: len(done.of(kind)) for kind in TITLES}
    if page is not None:
        from engram.report.check_page import write_check

        groups = [(kind, title, done.of(kind)) for kind, title in TITLES.items()]
        write_check(page, options.images, done.images, groups, done.pictures, done.labels_checked)
    if options.json:
        plain = [finding.to_plain() for finding in done.findings]
        print_line(console, json.dumps({"images": done.images, "counts": counts, "findings": plain}))
    else:
        _tell(done, counts, options)
        if page is not None:
            print_line(console, f"report: {page}")
    return UNREADABLE if counts["unreadable"] else 0


def _tell(done: Checked, counts: dict[str, int], options: Check) -> None:
    console = make_console()
    said = ", ".join(f"{title}: {counts[kind]}" for kind, title in TITLES.items() if counts[kind])
    print_line(console, f"{done.images} images checked; {said or 'nothing found'}")
    if not done.labels_checked:
        print_line(console, "labels were not checked: give a model instead of none")
    if options.quiet:
        return
    for kind, title in TITLES.items():
        found = done.of(kind)
        if not found:
            continue
        if kind == "unreadable":
            tell_unreadable((finding.paths[0], finding.detail) for finding in found)
            continue
        console.print(bold(title))
        for finding in found[:SHOWN]:
            print_line(console, f"  {_line(finding)}")
        if len(found) > SHOWN:
            print_line(console, f"  and {len(found) - SHOWN} more (--json or --report shows all)")


def _line(finding: ImageFinding) -> str:
    names = ", ".join(printable(path) for path in finding.paths[:SHOWN])
    if finding.kind == "label":
        suggested = printable(finding.suggested)
        return f"{names}: labelled {printable(finding.labels[0])}, looks like {suggested} ({finding.detail})"
    across = " (in different classes)" if finding.across else ""
    return f"{names}{across}{f': {finding.detail}' if finding.detail else ''}"
