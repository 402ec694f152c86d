"""The HTML page about a model's accuracy on a folder of images, made from numbers: it needs neither model nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engram.core.io import write_text
from engram.core.provenance import version
from engram.report.figures import confusion_matrix, needs_width
from engram.report.formatting import predictor_name
from engram.report.html_page import template
from engram.report.svg import drawing_style
from engram.report.tables import most_confused

_NAMED = 20  # classes that are left out, listed at most


def write_evaluation(found: dict[str, Any], out: Path) -> Path:
    """Write the page, with its figure inside, and return its path. found: the output of `engram evaluate --json`."""
    tested = [entry for entry in found["classes"] if entry["images"]]
    names = [str(entry["class"]) for entry in found["classes"]]
    counts = np.array(found["confusion"])
    by = predictor_name(found["by"])
    with drawing_style():
        title = f"{by}, {found['images']} images"
        alt = "Confusion matrix: rows true classes, columns predicted."
        drawing = confusion_matrix(counts, names, "in order of arrival", title, "confusion", alt)
    text = template("evaluation.html.jinja").render(
        found=found,
        named=_NAMED,
        tested=sorted(tested, key=lambda entry: entry["accuracy"]),
        by=by,
        drawing=drawing,
        is_wide=needs_width(len(names)),
        pairs=most_confused(counts, names),
        version=version(),
    )
    write_text(out, text)
    return out
