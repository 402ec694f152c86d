"""Write the page of `engram check`: thumbnails of the images that were found, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engram.core.io import write_text
from engram.core.provenance import version
from engram.report.html_page import template
from engram.report.thumbnails import thumbnail

MOST = 200  # findings of a kind on the page
MOST_PICTURES = 12  # of one finding


def write_check(
    page: Path,
    folder: str,
    images: int,
    groups: Sequence[tuple[str, str, Sequence[Any]]],
    pictures: Mapping[str, np.ndarray],
    labels_checked: bool,
) -> None:
    """Write the page. groups: kind, title and findings. pictures: uint8 images by path, for the thumbnails."""
    shown = [
        {
            "kind": kind,
            "title": title,
            "count": len(found),
            "findings": [_finding(each, pictures) for each in found[:MOST]],
        }
        for kind, title, found in groups
    ]
    text = template("check.html.jinja").render(
        folder=folder, images=images, groups=shown, labels_checked=labels_checked, version=version()
    )
    write_text(page, text)


def _finding(found: Any, pictures: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        "pictures": [
            {"path": path, "label": label, "source": thumbnail(pictures[path]) if path in pictures else ""}
            for path, label in list(zip(found.paths, found.labels, strict=True))[:MOST_PICTURES]
        ],
        "more": max(0, len(found.paths) - MOST_PICTURES),
        "detail": found.detail,
        "across": found.across,
        "suggested": found.suggested,
    }
