"""The walk-through in docs/your-own-images.md, command by command, and its accuracy compared with naive training."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engram import read_manifest
from engram.cli.main import main
from helpers import SAMPLE, SHARED, decode_image, unpack_archive

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "your-own-images.md"
FIXTURE = ROOT / "tests" / "fixtures" / "ten-classes.tar.gz"
EPOCHS = 5  # of the comparison
LESSONS = {
    "first": ("bicycle", "cloud", "palm_tree", "rabbit", "road", "shrew"),
    "second": ("skyscraper", "snake"),
    "third": ("table", "train"),
}


def commands() -> list[list[str]]:
    """The commands of the page, without `engram`."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    typed = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert all(words[0] == "engram" for words in typed)
    return [words[1:] for words in typed]


def unpack(archive: Path, place: Path) -> Path:
    """Make photos/first, second, third and test as on the page."""
    unpack_archive(archive, place)
    (train,) = [path for path in place.rglob("train") if (path / "train").is_dir()]
    for lesson, names in LESSONS.items():
        (place / "photos" / lesson).mkdir(parents=True)
        for name in names:
            (train / name).rename(place / "photos" / lesson / name)
    (train.parent / "test").rename(place / "photos" / "test")
    return place


def run(words: list[str], epochs: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command with that many epochs and one thread, and return what it prints."""
    if words[0] == "learn":
        words = [
            str(epochs) if before == "--epochs" else word for before, word in zip(["", *words], words, strict=False)
        ]
        words += ["--threads", "1", "--device", "cpu"]
    capsys.readouterr()
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def walk(epochs: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Follow the page in the current directory and return the evaluation of all ten classes."""
    said: dict[str, str] = {}
    for words in commands():
        if words[0] != "remove":
            name = "unknown" if "--unknown" in words else words[0]
            said[name] = run(words, epochs, capsys)
    assert set(said) == {"check", "learn", "info", "predict", "unknown", "evaluate", "export"}
    assert "96 images checked" in said["check"]
    assert {line.split("\t")[1] for line in said["unknown"].splitlines()} <= {"known", "unknown"}
    assert "old classes, before" in said["learn"]
    assert "10 classes" in said["info"]
    assert all(len(line.split("\t")) == 7 for line in said["predict"].splitlines())
    assert "predicted" in said["evaluate"]
    assert "checked in onnxruntime" in said["export"]
    assert "engram evaluation" in Path("evaluation.html").read_text()
    found = json.loads(run(["evaluate", "model", "photos/test", "--json"], epochs, capsys))
    assert ask_onnx(capsys) == run(["predict", "model", "photo.jpg"], epochs, capsys).split("\t")[1]
    (remove,) = [words for words in commands() if words[0] == "remove"]
    run(remove, epochs, capsys)
    assert len(read_manifest("model")["classes"]) == 9
    return found


def ask_onnx(capsys: pytest.CaptureFixture[str]) -> str:
    """Run the page's Python code on a wide picture with an orientation tag and return what it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    picture = next(iter(sorted(Path("photos/test/rabbit").iterdir())))
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.open(picture).resize((300, 200)).save("photo.jpg", quality=95, exif=turned)
    capsys.readouterr()
    made: dict[str, Any] = {}
    exec(code, made)
    ours = decode_image("photo.jpg", made["side"]).astype(int)
    assert np.abs(made["pixels"][0] - ours).mean() < 2
    return capsys.readouterr().out.strip()


def naive(epochs: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Learn the same lessons without memory and distillation."""
    for lesson in LESSONS:
        flags = ["--method", "naive", "--backbone", "resnet10"] if lesson == "first" else []
        run(["learn", "naive", f"photos/{lesson}", *flags, "--epochs", "1"], epochs, capsys)
    return json.loads(run(["evaluate", "naive", "photos/test", "--json"], epochs, capsys))


def old_accuracy(found: dict[str, Any]) -> float:
    """Accuracy in percent on the classes of the first two lessons, after the third."""
    old = {*LESSONS["first"], *LESSONS["second"]}
    return float(np.mean([entry["accuracy"] for entry in found["classes"] if entry["class"] in old]))


def test_the_walk_through_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("onnxruntime", reason="engram[onnx] is not installed, and the walk-through exports")
    assert FIXTURE.stat().st_size < 300_000
    monkeypatch.chdir(unpack(FIXTURE, tmp_path))
    found = walk(2, capsys)
    assert found["images"] == 40


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"there is no sample of real images in {SHARED} (set ENGRAM_TEST_DATA)")
def test_old_classes_are_kept_where_naive_training_forgets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(unpack(SAMPLE, tmp_path))
    for words in commands():
        if words[0] == "learn":
            run(words, EPOCHS, capsys)
    ours = json.loads(run(["evaluate", "model", "photos/test", "--json"], EPOCHS, capsys))
    theirs = naive(EPOCHS, capsys)
    assert ours["images"] == theirs["images"] == 200
    assert old_accuracy(ours) > old_accuracy(theirs) + 20, (old_accuracy(ours), old_accuracy(theirs))
