"""The documentation site builds without a warning, asks no other host for anything, and has every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import engram
import engram.contract

ROOT = Path(__file__).parents[1]
REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
OTHER_HOST = re.compile(r"""(?:src|href)=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import""")


class Page(HTMLParser):
    """What a built page loads, and where it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loaded = given.get("src") or (given.get("href") if tag == "link" else None)
        if loaded is not None:
            self.loads.append(loaded)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="engram[docs] is not installed")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(place)]
    # Not part of the build: an announcement of the theme's authors.
    environment = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": ":".join(sys.path), "HOME": str(place), "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return place


def test_the_site_builds_strictly_and_is_complete(site: Path) -> None:
    pages = {page.relative_to(site).as_posix(): Page(page.read_text()) for page in site.rglob("*.html")}
    for name, page in pages.items():
        others = [loaded for loaded in page.loads if re.match(r"(https?:)?//", loaded)]
        assert not others, (name, others)
    for style in site.rglob("*.css"):
        assert not OTHER_HOST.search(style.read_text()), style
    written = sorted((ROOT / "docs").rglob("*.md"))
    for source in written:
        name = source.relative_to(ROOT / "docs").as_posix()
        assert re.sub(r"(README|index)\.md$", "index.html", name).replace(".md", ".html") in pages, name
    assert {"contributing.html", "changes.html", "measured.html", "start/comparison-notebook.html"} <= pages.keys()
    entries = {name for page in pages.values() for name in re.findall(r'id="engram\.(?:contract\.)?(\w+)"', page.text)}
    assert public_names() <= entries
    train = pages["reference/runs.html"].text
    assert "configuration from start to end" in train, "the docstring of train"
    assert "<li><code>track</code>: " in train, "its parameters as a list"


def public_names() -> set[str]:
    own = {name for name in engram.contract.__all__ if name not in engram.__all__}
    return {*engram.__all__, *own}


def test_every_public_name_has_an_entry_with_an_example() -> None:
    """The examples are run by test_docs_code.py."""
    pattern = r"^### `engram(?:\.contract)?\.(\w+)`\n(.*?)(?=^##|\Z)"
    entries = dict(re.findall(pattern, REFERENCE, flags=re.DOTALL | re.MULTILINE))
    assert public_names() - entries.keys() == set(), "names without an entry in docs/reference/"
    assert entries.keys() - public_names() == set(), "entries of names that are not public"
    assert [name for name, text in entries.items() if "```python\n" not in text] == [], "entries without an example"


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a Markdown file, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_links_between_files_lead_somewhere() -> None:
    """As a code host shows them; the strict build checks those of the site."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "results/README.md")]
    for file in [*top, *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (file.parent / path).resolve() if path else file
            assert target.exists(), (file.name, link)
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target.read_text()), (file.name, link)
