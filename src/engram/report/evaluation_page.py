"""Make the page of `engram evaluate`: accuracy by class, confusion matrix, and thumbnails of what was confused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engram.core.io import write_text
from engram.core.provenance import version
from engram.report import figures
from engram.report.formatting import predictor_name
from engram.report.html_page import template
from engram.report.svg import drawing_style
from engram.report.tables import most_confused
from engram.report.thumbnails import thumbnail

ReadPictures = Callable[[Sequence[str]], Mapping[str, np.ndarray]]
_NAMED = 20  # classes that were left out, listed at most
_MOST_PAIRS = 30  # of confused classes with thumbnails
_PICTURES_OF_PAIR = 6


def write_evaluation(found: dict[str, Any], out: Path, read: ReadPictures | None = None) -> Path:
    """Write the page, with its figure and thumbnails inside, and return its path.

    found: the output of `engram evaluate --json`.
    read: uint8 images of SIDE pixels by path, without those that cannot be read. None: there are no thumbnails.
    """
    tested = [entry for entry in found["classes"] if entry["images"]]
    names = [str(entry["class"]) for entry in found["classes"]]
    counts = np.array(found["confusion"])
    by = predictor_name(found["by"])
    with drawing_style():
        title = f"{by}, {found['images']} images"
        alt = "Confusion matrix: rows true classes, columns predicted."
        drawing = figures.confusion_matrix(counts, names, "in order of arrival", title, "confusion", alt)
    text = template("evaluation.html.jinja").render(
        found=found,
        named=_NAMED,
        tested=sorted(tested, key=lambda entry: entry["accuracy"]),
        by=by,
        drawing=drawing,
        is_wide=figures.needs_width(len(names)),
        pairs=most_confused(counts, names),
        **({"mistakes": []} if read is None else _mistakes(found["mistakes"], read)),
        version=version(),
    )
    write_text(out, text)
    return out


def _mistakes(mistakes: Sequence[dict[str, Any]], read: ReadPictures) -> dict[str, Any]:
    """Return the pairs of classes that were confused, most often first, with thumbnails of some images."""
    by_pair: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for mistake in sorted(mistakes, key=lambda mistake: -mistake["probability"]):
        by_pair.setdefault((str(mistake["class"]), str(mistake["predicted"])), []).append(mistake)
    often = sorted(by_pair.items(), key=lambda pair: -len(pair[1]))
    chosen = [mistake["path"] for _, own in often[:_MOST_PAIRS] for mistake in own[:_PICTURES_OF_PAIR]]
    sources = {path: thumbnail(picture) for path, picture in read(chosen).items()}
    shown = [
        {
            "true": true,
            "predicted": predicted,
            "count": len(own),
            "pictures": [each | {"source": sources.get(each["path"])} for each in own[:_PICTURES_OF_PAIR]],
        }
        for (true, predicted), own in often[:_MOST_PAIRS]
    ]
    return {"mistakes": shown, "pairs_left_out": len(often) - len(shown)}
