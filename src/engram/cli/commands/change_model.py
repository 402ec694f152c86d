"""The commands that change a model: `engram remove`, `rename`, `merge`, `move`, `undo`; and `export`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from engram.cli.commands.model_common import exclude, find_label
from engram.cli.commands.predict import check_paths, expand
from engram.cli.options.model_changes import Export, Merge, Move, Remove, Rename, Undo
from engram.cli.streams import confirmed, tell
from engram.cli.text import back_to, count_classes, count_images, make_console, more_steps, print_line, shorten
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.models.edit import Undone, merge_classes, remove_class, rename_class, undo
from engram.models.edit_images import RemovedImages, move_images, remove_images
from engram.models.from_run import is_run, model_from_run, open_for_prediction
from engram.models.labels import encode_label
from engram.models.model import Model
from engram.models.onnx_export import export_onnx, require_onnx
from engram.models.store.codec import open_model, read_manifest
from engram.models.store.writer import clean_up_model


def rename_command(options: Rename, _: Sequence[str]) -> int:
    """Carry out `engram rename`; return the exit status."""
    exclude(options.quiet, options.json)
    place = typed_path(options.model)
    labels = [known["label"] for known in read_manifest(place)["classes"]]
    old = find_label(labels, options.old, lambda label: f"rename_class({str(place)!r}, {label}, {options.new!r})")
    rename_class(place, old, options.new, drop_learning=options.drop_learning)
    if options.json:
        print_line(make_console(), json.dumps({"renamed": encode_label(old), "to": options.new}))
    elif not options.quiet:
        print_line(make_console(), f"{old} is now called {options.new}")
    return 0


def merge_command(options: Merge, _: Sequence[str]) -> int:
    """Carry out `engram merge`; return the exit status."""
    exclude(options.quiet, options.json)
    place = typed_path(options.model)
    labels = [known["label"] for known in read_manifest(place)["classes"]]
    one, into = (
        find_label(labels, name, lambda label: f"merge_classes({str(place)!r}, {label}, ...)")
        for name in (options.name, options.into)
    )
    left = len(merge_classes(place, one, into, drop_learning=options.drop_learning).classes)
    if options.json:
        print_line(
            make_console(), json.dumps({"merged": encode_label(one), "into": encode_label(into), "classes": left})
        )
    elif not options.quiet:
        print_line(make_console(), f"the images of {one} are now images of {into}; {count_classes(left)} left")
    return 0


def move_command(options: Move, _: Sequence[str]) -> int:
    """Carry out `engram move`; return the exit status."""
    exclude(options.quiet, options.json)
    place, paths = typed_path(options.model), _given_files(options.images)
    labels = [known["label"] for known in read_manifest(place)["classes"]]
    to = find_label(labels, options.to, lambda label: f"move_images({str(place)!r}, ..., {label})")
    moved = move_images(place, paths, to, drop_learning=options.drop_learning)
    kinds = {"exemplars": moved.exemplars, "heldout": moved.heldout, "learned": moved.learned}
    if options.json:
        counts = {
            kind: [{"class": encode_label(label), "images": number} for label, number in found.items()]
            for kind, found in kinds.items()
        }
        print_line(make_console(), json.dumps({"given": moved.given, "found": moved.found, **counts}))
    elif not moved.found:
        tell(
            f"nothing was moved: none of {count_images(moved.given)} was learned or is kept as another class than {to}"
        )
    elif not options.quiet:
        sources = shorten([str(label) for label in dict.fromkeys(label for own in kinds.values() for label in own)], 60)
        print_line(make_console(), f"{moved.found} of {count_images(moved.given)} moved from {sources} to {to}")
    return 0 if moved.found else 1


def _given_files(typed: Sequence[str]) -> list[str]:
    """Return the image files that were typed as files, folders and patterns."""
    places = [str(typed_path(text)) for text in typed]
    check_paths(places)
    paths = [path for path in expand(places) if path is not None]
    if not paths:
        raise EngramError(f"no images found in {', '.join(places)}")
    return paths


def remove_command(options: Remove, _: Sequence[str]) -> int:
    """Carry out `engram remove`; return the exit status."""
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
    names = shorten([str(label) for label in asked], 60)
    how = "permanently" if options.no_undo else "('engram undo' brings it back)"
    if _is_declined(options, f"remove {names} from {place} {how}?", "nothing was removed"):
        return 1
    removed = remove_class(place, *asked, drop_learning=options.drop_learning, undoable=not options.no_undo)
    left = len(removed.classes)
    for label in asked:
        known = classes[labels.index(label)]
        if options.json:
            print_line(console, json.dumps({"removed": encode_label(label), "classes": left}))
        elif not options.quiet:
            images = f"{known['exemplars']} exemplars and {known['heldout']} held-out images"
            print_line(console, f"removed {label} with {images}")
    if not options.quiet and not options.json:
        if not removed.method.keeps_statistics or removed.config.weights is None:
            print_line(console, "the backbone keeps in its weights what it learned from such images")
        kept = "" if options.no_undo else "; the state before is kept for 'engram undo' (--no-undo deletes it)"
        print_line(console, f"{count_classes(left)} left{kept}")
    return 0


def _is_declined(options: Remove | Undo, question: str, outcome: str) -> bool:
    """Ask, unless --yes or --json is given; if the answer is no, print the outcome on stderr and return True."""
    if options.yes or options.json or confirmed(question):
        return False
    tell(outcome)
    return True


def _remove_images(options: Remove, place: Path, console: Console) -> int:
    """Carry out `engram remove --images`; return the exit status."""
    paths = _given_files(options.classes)
    question = f"remove what {place} kept of {len(paths)} image{'' if len(paths) == 1 else 's'} permanently?"
    if _is_declined(options, question, "nothing was removed"):
        return 1
    removed = remove_images(place, paths, drop_learning=options.drop_learning)
    if options.json:
        kinds = {"exemplars": removed.exemplars, "heldout": removed.heldout, "learned": removed.learned}
        counts = {
            kind: [{"class": encode_label(label), "images": number} for label, number in found.items()]
            for kind, found in kinds.items()
        }
        found = {"given": removed.given, "found": removed.found, **counts, "before": removed.before}
        print_line(console, json.dumps(found))
    elif not removed.found:
        tell(f"the model has none of {count_images(removed.given)}; nothing was removed")
    elif not options.quiet:
        for line in _removed_lines(removed):
            print_line(console, line)
    return 0 if removed.found else 1


def _removed_lines(removed: RemovedImages) -> list[str]:
    """Describe what was removed, and what remains."""
    lines = [f"{removed.found} of {removed.given} images were found"]
    for label in dict.fromkeys([*removed.exemplars, *removed.heldout]):
        counts = [
            f"{found[label]} {name}{'' if found[label] == 1 else 's'}"
            for name, found in (("exemplar", removed.exemplars), ("held-out image", removed.heldout))
            if label in found
        ]
        lines.append(f"removed {' and '.join(counts)} of {label}")
    for label, number in removed.learned.items():
        what = "what was learned" if removed.exact else "the digests"
        lines.append(f"removed {what} of {number} image{'' if number == 1 else 's'} of {label}")
    if removed.before:
        lines.append("removed the earlier states that were kept for undo, which contained some of them")
    if (removed.exemplars or removed.learned) and not removed.exact:  # nothing was learned from held-out images
        lines.append(
            "the network keeps in its weights what it learned from them; only a new model without them would not"
        )
    return lines


UNDONE_CHANGES = {
    "learned": "the last lesson was undone",
    "removed": "the removal was undone",
    "renamed": "the new name was undone",
    "merged": "the merging of classes was undone",
    "moved": "the moving of images was undone",
}


def undo_command(options: Undo, _: Sequence[str]) -> int:
    """Carry out `engram undo`; return the exit status."""
    exclude(options.quiet, options.json)
    place = typed_path(options.model)
    manifest = _readable_manifest(place)
    if manifest is not None and manifest["undo"] is None:
        clean_up_model(place)
        raise EngramError(manifest["why_no_undo"])
    back = "" if manifest is None else f" ({back_to(manifest['undo'])})"
    if _is_declined(options, f"undo the last change of {place} permanently{back}?", "nothing was undone"):
        return 1
    undone = undo(place, drop_learning=options.drop_learning)
    if options.json:
        named = {key: [encode_label(label) for label in getattr(undone, key)] for key in ("gone", "back", "again")}
        print_line(make_console(), json.dumps(asdict(undone) | named))
    elif not options.quiet:
        print_line(make_console(), _undone_line(undone))
    return 0


def _undone_line(undone: Undone) -> str:
    """Describe what was undone, and the model now."""
    parts = [
        f"{what} {shorten([str(label) for label in labels], 60)}"
        for what, labels in (("gone:", undone.gone), ("back:", undone.back), ("as before:", undone.again))
        if labels
    ]
    what = UNDONE_CHANGES.get(undone.what, "the last change was undone")
    return f"{what}; {'; '.join([*parts, back_to(asdict(undone))])}{more_steps(undone.steps)}"


def _readable_manifest(place: Path) -> dict[str, Any] | None:
    """Return the manifest, or None if the model is damaged; the state before may still be readable."""
    try:
        return read_manifest(place)
    except EngramError:
        if not place.is_dir():
            raise
        return None


def export_command(options: Export, _: Sequence[str]) -> int:
    """Carry out `engram export`; return the exit status."""
    out = typed_path(options.out)
    if out.suffix.lower() != ".onnx":
        raise EngramError(f"the file must end in .onnx, got {out}")
    if out.is_dir():
        raise EngramError(f"{out} is a folder; choose another name")
    if out.exists() and not options.overwrite:
        raise EngramError(f"{out} exists; choose another name, or replace it with --overwrite")
    require_onnx()
    model = _open_for_export(typed_path(options.model))
    exported = export_onnx(model, out, options.by)
    console = make_console()
    if options.json:
        print_line(console, json.dumps(asdict(exported)))
        return 0
    height, width = model.config.image_size
    print_line(
        console,
        f"{out}: images uint8 (N, {height}, {width}, 3) to probabilities (N, {len(model.classes)}) by {exported.by}, "
        f"{exported.bytes / 1e6:.1f} MB",
    )
    print_line(
        console,
        f"checked in onnxruntime {exported.onnxruntime} on {exported.images} images: "
        f"probabilities differ by {exported.difference:.1e} at most",
    )
    return 0


def _open_for_export(place: Path) -> Model:
    """Open the model with its pictures, to compare the export on them; without them if they cannot be read.

    A run is opened as a model.
    """
    try:
        return model_from_run(place, "cpu", "float32") if is_run(place) else open_model(place, "cpu", "float32")[0]
    except EngramError as error:
        model = open_for_prediction(place, "cpu", "float32")
        tell(f"compared on noise only: {error}")
        return model
