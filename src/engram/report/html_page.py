"""Write an HTML page from a template, with a folder of figures and tables next to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from engram.core.errors import EngramError
from engram.core.io import write_text
from engram.core.provenance import version

FILES = "FILES.txt"  # in the folder next to a page: the names of the files that belong to the page


def template(name: str, *folders: Path) -> jinja2.Template:
    """Load a template from these folders or from the report's; values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent / "templates"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def check_page_path(page: Path) -> None:
    """Check that the name of a page ends in .html."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise EngramError(f"the page cannot be written to {page}: give a file name that ends in .html")


def write_page_and_files(
    page: Path, source: jinja2.Template, context: Mapping[str, Any], files: dict[str, str]
) -> None:
    """Fill in a template, and write the page and its files.

    The files go to a folder named like the page plus `_files`. Files of an earlier page there are removed; other files
    stay.
    """
    folder = page.with_name(f"{page.stem}_files")
    names = {"folder": quote(os.fsencode(folder.name)), "folder_name": folder.name, "version": version()}
    text = source.render(**context, **names)
    if folder.is_symlink():
        raise EngramError(f"{folder} is a link, and the report writes only next to its page; remove it")
    index = folder / FILES
    earlier = index.read_text(encoding="utf-8").splitlines() if index.is_file() else []
    for name, content in files.items():
        write_text(folder / name, content)
    write_text(index, "".join(f"{name}\n" for name in sorted(files)))
    for name in set(earlier) - set(files):
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)
    write_text(page, text)


def is_report_folder(path: Path) -> bool:
    """Whether this is the folder of files next to a page."""
    return path.name.endswith("_files") and (path / FILES).is_file()
