"""Check images before learning: duplicates, unreadable, tiny and blurry ones, and labels that are probably wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.data.decode.image import smaller_side
from engram.data.decode.prefetch import decode_files
from engram.models.digests import digest_of
from engram.models.inputs import file_side
from engram.models.model import Model
from engram.models.near_duplicates import SMALLEST, Details, DisjointSets

SIDE = 128  # pixels of the pictures that are compared
TINY = 32  # pixels of the smaller side, without a model; with one, its image size
BLURRED = 4.0  # robust standard deviations that sharpness is below the median
FEWEST = 20  # images to compare sharpness, and 2 of each of 2 classes to compare labels
NEIGHBOURS = 5


@dataclass(frozen=True)
class ImageFinding:
    """One finding about one or several images.

    kind: "exact", "near", "unreadable", "tiny", "blurry" or "label". paths, labels: of these images. detail: a number
    or reason. across: duplicates in different classes. suggested: the class that a label should perhaps be.
    """

    kind: str
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    detail: str = ""
    across: bool = False
    suggested: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        more = {"suggested": self.suggested} if self.suggested is not None else {}
        duplicate = {"across_classes": self.across} if self.kind in ("exact", "near") else {}
        return {
            "kind": self.kind,
            "paths": list(self.paths),
            "labels": list(self.labels),
            **({"detail": self.detail} if self.detail else {}),
            **duplicate,
            **more,
        }


@dataclass(frozen=True, eq=False)
class Checked:
    """Result of a check. pictures: of the images in findings that can be read, by path, (SIDE, SIDE, 3)."""

    images: int
    findings: list[ImageFinding]
    labels_checked: bool
    pictures: dict[str, np.ndarray] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[ImageFinding]:
        """Return the findings of these kinds."""
        return [finding for finding in self.findings if finding.kind in kinds]


def check_images(paths: Sequence[str], labels: Sequence[str], model: Model | None) -> Checked:
    """Check image files with their labels. model: its network compares the images of each class; None leaves it out."""
    images, kept, skipped = decode_files(paths, SIDE, skip_bad=True)
    label_of = dict(zip(paths, labels, strict=True))
    findings = [ImageFinding("unreadable", (path,), (label_of[path],), reason) for path, reason in skipped]
    read, own = [paths[row] for row in kept], [labels[row] for row in kept]
    least = TINY if model is None else min(model.config.image_size)
    sides = [smaller_side(path) for path in read]
    detailed = np.flatnonzero([side is not None and side >= SMALLEST for side in sides])
    findings += _duplicates(images, detailed, read, own)
    findings += [
        ImageFinding("tiny", (path,), (label,), f"{side} pixels")
        for path, label, side in zip(read, own, sides, strict=True)
        if side is not None and side < least
    ]
    findings += _blurry(images, read, own)
    if model is not None:
        findings += _labels(model, read, own)
    shown = {path for finding in findings for path in finding.paths}
    pictures = {path: image for path, image in zip(read, images, strict=True) if path in shown}
    return Checked(len(paths), findings, model is not None, pictures)


def _duplicates(
    images: np.ndarray, detailed: np.ndarray, paths: Sequence[str], labels: Sequence[str]
) -> list[ImageFinding]:
    """Return groups of equal and of similar images. detailed: rows of those with details to compare."""
    exact, near = DisjointSets(len(images)), DisjointSets(len(images))
    first: dict[bytes, int] = {}
    for row, image in enumerate(images):
        exact.join(first.setdefault(digest_of(image), row), row)
        near.join(exact.find(row), row)
    for one, other in Details(images[detailed]).pairs():
        near.join(int(detailed[one]), int(detailed[other]))
    findings: list[ImageFinding] = []
    for kind, sets in (("exact", exact), ("near", near)):
        groups: dict[int, list[int]] = {}
        for row in range(len(images)):
            groups.setdefault(sets.find(row), []).append(row)
        for group in groups.values():
            if len(group) < 2 or (kind == "near" and len({exact.find(row) for row in group}) < 2):
                continue
            own = tuple(labels[row] for row in group)
            findings.append(ImageFinding(kind, tuple(paths[row] for row in group), own, across=len(set(own)) > 1))
    return sorted(findings, key=lambda finding: (finding.kind != "exact", not finding.across))


def _blurry(images: np.ndarray, paths: Sequence[str], labels: Sequence[str]) -> list[ImageFinding]:
    """Return images whose details are much weaker than those of most images of the set."""
    if len(images) < FEWEST:
        return []
    sharpness = np.log(np.array([_laplacian_variance(image) for image in images]) + 1e-3)
    middle = float(np.median(sharpness))
    spread = 1.4826 * float(np.median(np.abs(sharpness - middle)))  # the standard deviation, if they are normal
    rows = np.flatnonzero(sharpness < middle - BLURRED * max(spread, 1e-6))
    return [
        ImageFinding(
            "blurry", (paths[row],), (labels[row],), f"sharpness {np.exp(sharpness[row] - middle):.1%} of the median"
        )
        for row in sorted(rows.tolist(), key=lambda row: sharpness[row])
    ]


def _laplacian_variance(image: np.ndarray) -> float:
    grey = torch.from_numpy(image).float().mean(dim=2)[None, None]
    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]
    return float(F.conv2d(grey, kernel).var())


def _labels(model: Model, paths: Sequence[str], labels: Sequence[str]) -> list[ImageFinding]:
    """Return images that the rest of their class disagrees with, the most certain first."""
    images, kept, _ = decode_files(paths, file_side(model.config.image_size), skip_bad=True)
    assert model.learner is not None
    embedding = model.engine.embed(model.learner.network, torch.from_numpy(images)).float().cpu()
    names = sorted({labels[row] for row in kept})
    own = torch.tensor([names.index(labels[row]) for row in kept])
    found = suspicious_labels(embedding, own)
    return [
        ImageFinding(
            "label", (paths[kept[row]],), (labels[kept[row]],), f"{share:.0%} of its neighbours", suggested=names[other]
        )
        for row, other, share in found
    ]


def suspicious_labels(embedding: Tensor, labels: Tensor) -> list[tuple[int, int, float]]:
    """Return rows whose label the others disagree with, the label they suggest, and the share of neighbours with it.

    Both must disagree: the nearest class mean, of its own class without the image itself, and most of the nearest
    neighbours.

    embedding: (N, D). labels: (N,), 0 to K - 1.
    """
    counts = labels.bincount()
    if len(labels) < FEWEST or int((counts > 1).sum()) < 2:
        return []
    unit = F.normalize(embedding - embedding.mean(dim=0), dim=1)
    sums = torch.zeros(len(counts), unit.shape[1]).index_add_(0, labels, unit)
    similar = unit @ F.normalize(sums, dim=1).T
    rows = torch.arange(len(labels))
    similar[rows, labels] = (unit * F.normalize(sums[labels] - unit, dim=1)).sum(dim=1)
    nearest = similar.argmax(dim=1)
    found: list[tuple[int, int, float]] = []
    for row in ((nearest != labels) & (counts[labels] > 1)).nonzero().flatten().tolist():
        close = unit @ unit[row]
        close[row] = -2
        votes = labels[close.topk(min(NEIGHBOURS, len(labels) - 1)).indices].bincount(minlength=len(counts))
        other = int(nearest[row])
        share = float(votes[other]) / NEIGHBOURS
        if share > 0.5:
            found.append((row, other, share))
    return sorted(found, key=lambda entry: (-entry[2], float(similar[entry[0], labels[entry[0]]])))
