"""`engram check`: duplicates, unreadable, tiny and blurry images, wrong labels, and a page that runs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter

from engram.cli.main import main
from engram.models.image_check import suspicious_labels
from model_helpers import make


def scene(seed: int) -> Image.Image:
    """A picture of random shapes with fine details."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((160, 160))
    noise = rng.normal(0, 12, (160, 160, 3))
    return Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "photos"
    hostile = "<script>alert(1)"
    for name in ("cat", hostile):
        (root / name).mkdir(parents=True)
        for number in range(12):
            scene(number + (100 if name == "cat" else 0)).save(root / name / f"{number}.png")
    scene(100).save(root / "cat" / "copy.png")  # the same picture twice
    ImageEnhance.Brightness(scene(5)).enhance(1.2).save(root / "cat" / "similar.jpg")  # of the other class
    scene(50).filter(ImageFilter.GaussianBlur(12)).save(root / "cat" / "blurred.png")
    scene(51).resize((20, 20)).save(root / "cat" / "small.png")
    (root / "cat" / "broken.png").write_bytes(b"x")
    return root


def test_each_kind_is_found(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "none", "photos", "--json", "--device", "cpu", "--report", "page.html"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 29
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for finding in found["findings"]:
        by_kind.setdefault(finding["kind"], []).append(finding)
    names = {
        kind: [sorted(Path(path).name for path in each["paths"]) for each in findings]
        for kind, findings in by_kind.items()
    }
    assert names["exact"] == [["0.png", "copy.png"]]
    assert names["near"] == [["5.png", "similar.jpg"]]
    assert by_kind["near"][0]["across_classes"] is True
    assert sorted(names["blurry"]) == [["blurred.png"], ["small.png"]]  # a small one is enlarged
    assert names["tiny"] == [["small.png"]]
    assert names["unreadable"] == [["broken.png"]]
    assert "label" not in names
    page = Path("page.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/jpeg;base64,") == 7


def test_the_terminal_and_bad_requests(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "none", "photos", "--device", "cpu"]) == 3
    told = capsys.readouterr()
    assert "29 images checked; groups of the same picture: 1, groups of near-duplicates: 1" in told.out
    assert "labels were not checked: give a model instead of none" in told.out
    assert "similar.jpg (in different classes)" in told.out
    assert "broken.png cannot be read" in told.err
    assert main(["check", "none", "photos", "--report", "page.txt"]) == 2
    assert main(["check", "nowhere", "photos"]) == 2
    assert main(["check", "none", "missing"]) == 2


def test_wrong_labels_are_suggested() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(5), 20)
    points = torch.from_numpy(4 * np.eye(5)[labels] + rng.normal(0, 0.5, (100, 5))).float()
    assert suspicious_labels(points, torch.from_numpy(labels)) == []
    wrong = labels.copy()
    wrong[[3, 40]] = [2, 4]
    found = suspicious_labels(points, torch.from_numpy(wrong))
    assert sorted((row, label) for row, label, _ in found) == [(3, 0), (40, 2)]
    assert suspicious_labels(points[:10], torch.from_numpy(labels[:10])) == []  # too few


def test_labels_are_compared_by_the_network_of_a_model(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(photos.parent / "model", ("apple", "boat"))
    assert main(["check", "model", "photos", "--json", "--device", "cpu"]) == 3
    kinds = {finding["kind"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert kinds <= {"exact", "near", "unreadable", "blurry", "label"}  # 20 pixels are not tiny for this model
