"""The code of README and pages runs: each page in one folder, from top to bottom, on few images and for one epoch.

A block that cannot run here has the comment `<!-- not run: REASON -->` before it. Commands that train on CIFAR-100 or
ImageNet need a download: they are planned by --dry-run, which checks every option. So are those of the method cards,
if they have options; the contract suite trains every method. `export` and `report`, which take seconds whatever the
data, run once.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from engram import ImageStore, RunConfig, Training, learn_into, read_mini, recipe_names
from engram.cli.main import main
from engram.data.sources import load
from engram.data.sources import mini as mini_module
from engram.experiment import recipes
from engram.methods import METHODS

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
# Pages whose code a test of their own runs, with what it needs: a server, a file, photographs.
ELSEWHERE = {
    "docs/api.md": "test_own_parts.py",
    "docs/architecture.md": "test_cli_reproduce.py",
    "docs/serving.md": "test_serve_clients.py",
    "docs/your-own-images.md": "test_walkthrough.py",
}
REASONS = {"minutes", "a GPU", "a download", "a checkout", "another package", "another program"}
PROGRAMS = {"git", "pip", "torchrun", "make", "pytest", "python", "for", "tensorboard", "source"}  # other programs
ONCE = ("export", "report")
DONE: set[str] = set()
LANGUAGES = {"python", "sh", "bash", "console", "text", "toml", "json", "javascript", "bibtex", ""}
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]*) -->\n\n?)?"
    r"(?:^```(?P<language>\w*)\n(?P<fenced>.*?)^```$|(?<=\n\n)(?P<indented>(?:    [^\n]*\n|\n(?=    ))+))",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One block of code of a page."""

    line: int
    language: str
    text: str
    reason: str | None


def blocks(page: str) -> list[Block]:
    """The blocks of a page; indented ones that begin with a program are commands."""
    text = (ROOT / page).read_text()
    found = []
    for match in BLOCK.finditer(text):
        code = match["fenced"]
        if code is None:
            code = re.sub(r"^    ", "", match["indented"], flags=re.MULTILINE)
        language = match["language"] or ""
        if match["fenced"] is None and re.match(rf"(engram|export|{'|'.join(PROGRAMS)}) ", code):
            language = "sh"
        found.append(Block(text.count("\n", 0, match.start()) + 1, language, code, match["reason"]))
    return found


@cache
def few_images() -> ImageStore:
    """The embedded set with two training images and one test image of each class, of 8x8 pixels."""
    whole, parts = read_mini(), []
    for split, count in ((whole.train, 2), (whole.test, 1)):
        rows = np.concatenate([np.flatnonzero(split.class_ids == label)[:count] for label in range(20)])
        parts += [split.images[rows, ::2, ::2], split.class_ids[rows]]
    return replace(ImageStore.from_arrays(*parts, class_names=whole.class_names), name="mini", origin="mini")


def shortened(config: RunConfig) -> RunConfig:
    """The configuration with one epoch in every phase; on the embedded set with two stages."""
    trainings = {each.name: getattr(config.settings, each.name) for each in fields(config.settings)}
    short = {name: replace(each, epochs=1) for name, each in trainings.items() if isinstance(each, Training)}
    base = 18 if config.data.name == "mini" else config.base
    return replace(config, base=base, settings=replace(config.settings, **short))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, clean_registries: None) -> Iterator[None]:
    """Few images, one epoch, and nothing registered afterwards."""
    small, trained, methods = few_images(), recipes._trained, set(METHODS)
    for module in (load, mini_module):
        monkeypatch.setattr(module, "read_mini", lambda: small)
    monkeypatch.setattr(recipes, "_trained", lambda *given: shortened(trained(*given)))
    yield
    for name in set(METHODS) - methods:
        del METHODS[name]


@pytest.fixture(scope="module")
def photos() -> dict[str, np.ndarray]:
    """Seven classes of six images each."""
    images, labels = read_mini().train.images, read_mini().train.class_ids
    return {name: images[labels == label][:6] for label, name in enumerate(read_mini().class_names[:7])}


def save(folder: Path, images: np.ndarray) -> None:
    folder.mkdir(parents=True)
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(folder / f"{number}.png")


def furnish(place: Path, page: str, photos: dict[str, np.ndarray]) -> dict[str, Any]:
    """Put what a page speaks of into a folder; return the names that its Python takes as given."""
    if page == "docs/start/first-model.md":
        return {}  # makes its images itself
    for name, images in photos.items():
        save(place / "photos" / name, images)
    for folder, name in (("photos-of-june", "hat"), ("photos-of-july", "ink")):
        save(place / folder / name, next(iter(photos.values())) // 2)
    one, two, three, four, *_ = photos.values()
    save(place / "inbox", one[:2])
    save(place / "test-photos" / next(iter(photos)), one[:2])
    if page in ("README.md", "docs/run-directory.md", "docs/results.md", "docs/how-to/experiments.md"):
        assert main(["run", "afc-mini-b10-s5", "--quiet"]) == 0  # what the page has trained for long, or on a GPU
    if page == "docs/run-directory.md":
        arguments = ["--image-size", "16", "--base", "6", "--out", "runs/afc-folder-order1-seed1", "--quiet"]
        assert main(["run", "afc-folder", "--data", "photos", *arguments]) == 0
    if page == "docs/estimator.md":
        content = (place / "inbox" / "0.png").read_bytes()
        one, two, three = (images[:, ::2, ::2] for images in (one, two, three))
        x, y = np.concatenate([one, two]), np.repeat(["a", "b"], 6)
        return {"x": x, "y": y, "x2": three, "y2": np.repeat("c", 6), "x3": x, "y3": y, "upload": content}
    if page == "docs/model-directory.md":
        images, labels = np.concatenate([one, two, three]), np.repeat(["kitten", "cat", "dog"], 6).tolist()
        config = {"method": "lda", "backbone": "resnet10", "image_size": 16}
        assert list(learn_into(place / "model", images, labels, config=config))
        Image.fromarray(one[0]).save(place / "mistake.png")
        Image.fromarray(three[0]).save(place / "withdrawn.png")
        return {"images": four, "labels": ["emu"] * 6, "pixels": one}
    return {}


def prepared(words: list[str], page: str) -> list[str] | None:
    """The arguments of a command as they are run here; None if it needs something else."""
    command, *rest = words[1:]
    data = " ".join(rest)
    if command in ONCE:
        if command in DONE:
            return None
        DONE.add(command)
    if command == "run":
        card = page.startswith(("docs/methods/", "docs/afc.md"))
        if card and set(rest) <= set(recipe_names()):
            return None
        planned = card or "cifar100" in data or "imagenet" in data
        rest = [{"1,2,3": "1,2", "64": "16"}.get(word, word) for word in rest]  # fewer runs, small images
        return [command, *rest, *(["--dry-run"] if planned and "--dry-run" not in rest else ["--quiet"])]
    if command == "learn":
        return None if "--weights" in rest else [command, *rest, "--quiet", "--epochs", "1"]
    return None if command in ("prepare", "serve", "demo", "doctor") else words[1:]


def follow(text: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a block."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[0] in PROGRAMS:
            continue
        if words[0] == "export":
            monkeypatch.setenv(*words[1].split("=", 1))
            continue
        assert words[0] == "engram", line
        if ">" in words:  # into a file
            words = words[: words.index(">")]
        arguments = prepared(words, page)
        if arguments is not None:
            assert main(arguments) == 0, line


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and any(blocks(page))])
def test_the_code_of_a_page_runs(
    page: str, quick: None, photos: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names = furnish(tmp_path, page, photos)
    own = re.search(r"export ENGRAM_METHODS=(\S+)", (ROOT / page).read_text())
    for block in blocks(page):
        if block.reason is not None:
            continue
        where = f"{page}:{block.line}"
        if block.language == "python" and own:
            Path(own[1]).write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * block.line + block.text, where, "exec"), names)
        elif block.language in ("sh", "console"):
            follow(block.text, page, monkeypatch)
    if own:
        sys.modules.pop(own[1], None)


def test_every_block_is_known() -> None:
    for page in [*PAGES, "CONTRIBUTING.md"]:
        for block in blocks(page):
            assert block.language in LANGUAGES, (page, block.line)
            assert block.reason is None or block.reason in REASONS, (page, block.line)
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text()
    assert os.environ.get("ENGRAM_METHODS") is None
