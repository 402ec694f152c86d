"""One HTML page on how a model did on a folder of images; it gets numbers and needs neither the model nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engram.core.io import write_text

_NAMED = 20  # classes, at most, of those left out


def write_evaluation(found: dict[str, Any], out: Path) -> Path:
    """The path of the page; all of it, the figure included, is in the one file.

    found: what `engram evaluate --json` prints.
    """
    write_text(out, render(found))
    return out


def render(found: dict[str, Any]) -> str:
    """The page."""
    import numpy as np  # these take a second to import, and most commands do not need them

    from engram.core.provenance import version
    from engram.report.figures import confusion_matrix, needs_width
    from engram.report.svg import drawing_style
    from engram.report.tables import most_confused, predictor_name
    from engram.report.templating import template

    tested = [entry for entry in found["classes"] if entry["images"]]
    names = [str(entry["class"]) for entry in found["classes"]]
    counts = np.array(found["confusion"])
    by = predictor_name(found["by"])
    with drawing_style():
        title = f"{by}, {found['images']} images"
        alt = "Confusion matrix: rows true classes, columns predicted."
        drawing = confusion_matrix(counts, names, "in order of arrival", title, "confusion", alt)
    return template("evaluation.html.jinja").render(
        found=found,
        named=_NAMED,
        tested=sorted(tested, key=lambda entry: entry["accuracy"]),
        by=by,
        drawing=drawing,
        is_wide=needs_width(len(names)),
        pairs=most_confused(counts, names),
        version=version(),
    )
