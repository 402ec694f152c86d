"""Hooks of the documentation site: pages from outside docs/, source files that pages link to, and notebooks.

The files in docs/ link to each other and to the rest of the repository by relative paths, as a code host shows them.
Here every link is turned into one of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "results/README.md": "measured.md",
    "results": "measured.md",
}
LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")
FENCED = re.compile(r"^( *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
ENTRY = re.compile(r"^### `(engram\.[\w.]+)`$", re.MULTILINE)  # of the reference: signature and docstring


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add what pages link to: pages of the repository, source files as pages, results as they are."""
    for source, uri in PAGES.items():
        if source.endswith(".md"):
            files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        uri = notebook.relative_to(ROOT / "docs").as_posix()
        files.append(File.generated(config, f"{uri.removesuffix('.ipynb')}-notebook.md", content=as_markdown(notebook)))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    for place in sorted({place for file in pages for place in outside(file.src_uri, file.content_string)}):
        if not place.endswith(".py"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / place)))
            continue
        code = (ROOT / place).read_text()
        text = f"---\nsearch:\n  exclude: true\n---\n# `{place}`\n\n````python\n{code}````\n"
        files.append(File.generated(config, f"{place}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page into links of the site."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        target = repository_path(here, link[2])
        return link[0] if target is None else link[1] + site_path(here, target) + link[3]

    markdown = ENTRY.sub(r"::: \1", markdown)
    markdown = markdown.replace("± ", "±\u00a0")  # in narrow columns
    parts = FENCED.split(markdown)
    return "".join(part if FENCED.match(part) else LINK.sub(moved, part) for part in parts)


def repository_path(page: str, link: str) -> str | None:
    """The file in the repository that a link of a page means, or None if it is an address of another host."""
    if re.match(r"[a-z]+:", link):
        return None
    sources = {uri: source for source, uri in reversed(PAGES.items())}
    folder = posixpath.dirname(sources.get(page, f"docs/{page}"))
    return posixpath.normpath(posixpath.join(folder, link))


def site_path(page: str, target: str) -> str:
    """The link from a page of the site to what is shown of a file in the repository."""
    uri = PAGES.get(target) or target.removeprefix("docs/")
    if uri == target and target.endswith(".py"):
        uri = f"{target}.md"
    uri = re.sub(r"\.ipynb$", "-notebook.md", uri)
    return posixpath.relpath(uri, posixpath.dirname(page) or ".")


def outside(page: str, text: str) -> set[str]:
    """The files outside docs/ that a page links to."""
    links = LINK.findall(FENCED.sub("", text))
    found = {target for _, link, _ in links if (target := repository_path(page, link))}
    return {target for target in found if not target.startswith("docs/") and target not in PAGES}


def as_markdown(notebook: Path) -> str:
    """A notebook as a page: its text, its code, and what the code has shown."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        parts += [shown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def shown(output: dict[str, Any]) -> str:
    """One output of a cell: HTML and pictures as they are, text in a block."""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    if "image/png" in data:
        return f'<img class="output" alt="what the cell shows" src="data:image/png;base64,{data["image/png"].strip()}">'
    text = "".join(output.get("text") or data.get("text/plain", []))
    return f"```text\n{text.rstrip()}\n```"
