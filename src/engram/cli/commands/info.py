"""`engram info`: classes, history and settings of a model, without opening its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from engram.cli.options.models import Info
from engram.cli.streams import printable
from engram.cli.text import (
    back_to,
    bold,
    card_table,
    count_classes,
    count_images,
    duration,
    make_console,
    make_table,
    more_steps,
    percent,
    print_line,
    print_table,
    shorten,
)
from engram.core.io import typed_path
from engram.models.accuracies import balanced_accuracy, plain_accuracy
from engram.models.calibration import FEWEST
from engram.models.labels import encode_label
from engram.models.learning import has_learning
from engram.models.store.codec import read_manifest
from engram.nn.pretrained import PretrainedWeights, describe_weights
from engram.runs.directory import is_running


def info_command(options: Info, typed: Sequence[str]) -> int:
    """Carry out `engram info`; return the exit status."""
    del typed
    console = make_console()
    place = typed_path(options.model)
    manifest = read_manifest(place)
    manifest |= accuracies(manifest)
    manifest["changing_now"] = is_running(place)
    manifest["learning_interrupted"] = has_learning(place) and not manifest["changing_now"]
    if options.json:
        for known in manifest["classes"]:
            known["label"] = encode_label(known["label"])
        print_line(console, json.dumps(manifest, allow_nan=False))
        return 0
    console.print(bold(f"{place}: {count_classes(len(manifest['classes']))}"))
    console.print(card_table(card(manifest)))
    print_table(console, class_table(manifest))
    print_table(console, history_table(manifest))
    if manifest["changing_now"]:
        print_line(
            console,
            "another process is learning here now, or changing the model; until it is finished, the model is as above",
        )
    if manifest["learning_interrupted"]:
        print_line(console, "learning was interrupted here; run the same 'engram learn' again to continue")
    return 0


def card(manifest: dict[str, Any]) -> dict[str, str]:
    """Return settings and sizes by name."""
    config, classes, sizes = manifest["config"], manifest["classes"], manifest["bytes"]
    memory = config["memory"]
    budget = memory["budget"] if memory["budget"] in ("all", "none") else f"{memory['budget']}={memory['size']}"
    height, width = config["image_size"]
    kept, held = (sum(known[kind] for known in classes) for kind in ("exemplars", "heldout"))
    learned = sum(known["images"] for known in classes)
    return {
        "method": f"{config['method']}, predicts by {' and '.join(manifest['predictors'])}",
        "network": f"{config['backbone']}, images of {width}x{height} pixels, seed {config['seed']}",
        **({} if config.get("weights") is None else {"pretrained": _pretrained(config["weights"])}),
        "memory": f"{budget}: {kept} exemplars, {_size(sizes['exemplars'])}",
        "held out": f"{held} images, {_size(sizes['heldout'])}; of new images {100 * config['validation']:g} %",
        **({"head": _head(manifest["learned_heldout"])} if manifest["learned_heldout"] else {}),
        "accuracy": _accuracy(manifest),
        "confidence": _confidence(manifest, held),
        "learned from": f"{learned:,} images of the classes that it knows",
        "weights": _size(sizes["weights"]),
        "undo": _undo(manifest),
        "written by": f"engram {manifest['engram']}, generation {manifest['generation']}",
    }


def _pretrained(weights: dict[str, Any]) -> str:
    """Describe the weights that the network started from."""
    return printable(describe_weights(PretrainedWeights(**weights)))


def _head(heldout: int) -> str:
    """Describe the head that predicts and the one that was measured, if they differ."""
    return (
        f"predictions: fitted to all images, {heldout} held-out ones included; accuracy and confidence: measured "
        "before, without them"
    )


def _undo(manifest: dict[str, Any]) -> str:
    """Describe what can be undone, or why nothing can."""
    if manifest["undo"] is None:
        return printable(manifest["why_no_undo"])
    undo = manifest["undo"]
    return f"{back_to(undo)}; kept for that: {_size(undo['bytes'])}{more_steps(undo['steps'] - 1)}"


def _confidence(manifest: dict[str, Any], held: int) -> str:
    """Describe which predictors are calibrated."""
    fitted = " and ".join(manifest["temperatures"])
    if not fitted:
        return "not calibrated"
    gone = "" if held >= FEWEST else ", most of them removed since"
    return f"{fitted} calibrated on held-out images{gone}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def class_table(manifest: dict[str, Any]) -> Table:
    """Return a table of the classes: lesson, number of images, held-out accuracy."""
    accuracies = [f"{by} %" for by in manifest["predictors"]]
    right = ["lesson", "images", "exemplars", "held\nout", *accuracies]
    table = make_table(["class", *right], right=right)
    for known in manifest["classes"]:
        counts = [str(known["stage"] + 1), *(f"{known[kind]:,}" for kind in ("images", "exemplars", "heldout"))]
        shares = [percent(known["accuracy"].get(by)) for by in manifest["predictors"]]
        table.add_row(printable(known["label"]), *counts, *shares)
    return table


def history_table(manifest: dict[str, Any]) -> Table:
    """Return a table of lessons and removals: date, what changed, accuracy before and after."""
    by = manifest["predictors"][0] if manifest["predictors"] else "cnn"
    numbers = ["images", "epochs", "time", "old %\nbefore", "old %\nnow", "new %"]
    table = make_table(
        ["", "date", "what", *numbers],
        right=["", *numbers],
        title=f"held-out accuracy by {by}, balanced: mean over classes",
    )
    table.columns[1].no_wrap = True  # the date
    table.padding = (0, 1, 0, 0)  # fits into 100 columns
    for first, last in _lines(manifest["history"]):
        entry, what, counts = manifest["history"][last], f"removed {count_classes(last - first + 1)}", ["", "", ""]
        if entry["what"] in ("merged", "moved"):
            moved = f"moved {count_images(entry['images'])} to another class"
            what = "merged two classes" if entry["what"] == "merged" else moved
        if entry["what"] == "learned":
            what = _learned(manifest, last)
            counts = [f"{entry['images']:,}", str(entry["epochs"]), duration(entry["seconds"])]
        numbered = str(last + 1) if first == last else f"{first + 1}-{last + 1}"
        shares = [percent(entry[when].get(by)) for when in ("before", "after", "new")]
        table.add_row(numbered, printable(entry["date"])[:10], what, *counts, *shares)
        if entry["plain"]:
            shares = [percent(entry["plain"].get(when, {}).get(by)) for when in ("before", "after", "new")]
            table.add_row("", "", "plain: of all images", "", "", "", *shares)
        if entry["refreshed_after"]:
            shares = [percent(entry[when].get(by)) for when in ("refreshed_before", "refreshed_after")]
            table.add_row("", "", "those learned again", "", "", "", *shares, "")
    return table


def accuracies(manifest: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return balanced ("accuracy") and plain accuracy ("accuracy_of_images") on the held-out images, by predictor."""
    shares = {number: known["accuracy"] for number, known in enumerate(manifest["classes"])}
    images = {number: known["heldout"] for number, known in enumerate(manifest["classes"])}
    return {
        "accuracy": balanced_accuracy(shares, shares),
        "accuracy_of_images": plain_accuracy(shares, images, shares),
    }


def _accuracy(manifest: dict[str, Any]) -> str:
    balanced, plain = accuracies(manifest).values()
    said = [f"{by} {percent(share)} % / {percent(plain.get(by))} %" for by, share in balanced.items()]
    return f"{', '.join(said)} (held out; balanced / plain)" if said else "not measured: no image is held out"


def _lines(history: Sequence[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield the first and last entry of each line: consecutive removals share one."""
    for removed, entries in groupby(range(len(history)), lambda place: history[place]["what"] == "removed"):
        places = list(entries)
        yield from [(places[0], places[-1])] if removed else [(place, place) for place in places]


def _learned(manifest: dict[str, Any], number: int) -> str:
    """Describe a lesson: its classes by name, or their number if some are gone since."""
    came = [printable(known["label"]) for known in manifest["classes"] if known["stage"] == number]
    gone = _gone(manifest, number)
    if not gone:
        return f"learned {shorten(came, 28)}".rstrip()
    lost = sum(_gone(manifest, place) for place in range(len(manifest["history"])))
    removed = sum(entry["what"] in ("removed", "merged") for entry in manifest["history"])
    why = "since removed" if lost == removed else "since learned again" if not removed else "gone since"
    return f"learned {count_classes(len(came) + gone)} ({gone} {why})"


def _gone(manifest: dict[str, Any], number: int) -> int:
    """Return how many classes of a lesson the model has no longer; 0 if their number was not recorded."""
    learned = manifest["history"][number]["classes"]
    return max(0, learned - sum(known["stage"] == number for known in manifest["classes"]))
