"""The examples in docs/serving.md do what they say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from model_helpers import NAMES, make
from serve_helpers import images_of, serving

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"


def example(language: str, api: httpx.Client) -> str:
    """The example in a language, for the server that runs."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert "127.0.0.1:8000" in found
    return found.replace("127.0.0.1:8000", f"127.0.0.1:{api.base_url.port}")


def run(*command: str, folder: Path) -> str:
    """What a command prints."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("clients")
    make(place / "model", NAMES[:3])
    for name, label in (("x.jpg", "apple"), ("y.jpg", "boat")):
        (place / name).write_bytes(images_of(label, 1)[0])
    photos = place / "photos" / "dingo"
    photos.mkdir(parents=True)
    for number, content in enumerate(images_of("dingo", 8)):
        (photos / f"{number}.png").write_bytes(content)
    return place


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[httpx.Client]:
    with serving(folder / "model") as found:
        yield found


def test_curl(api: httpx.Client, folder: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    out = run("sh", "-ec", example("sh", api), folder=folder)
    assert '"class": "apple"' in out
    assert '"class":"dingo"' in out
    assert "engram_images_predicted_total" in out
    assert api.get("/models/model/draft").json()["images"] == []


def test_python(api: httpx.Client, folder: Path) -> None:
    lines = run(sys.executable, "-I", "-c", example("python", api), folder=folder).splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["x.jpg", "apple"], ["y.jpg", "boat"]]
    assert lines[2].startswith("finished ['dingo'] accuracy {")
    assert lines[3] == "taken back: ['dingo']"


def test_javascript(api: httpx.Client, folder: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (folder / "example.mjs").write_text(example("javascript", api))
    lines = run(node, "example.mjs", folder=folder).splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["x.jpg", "apple"], ["y.jpg", "boat"]]
    assert lines[2].startswith("event: ")
