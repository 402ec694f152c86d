"""Write an HTML page from a template, with a folder of figures and tables next to it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from engram.core.errors import EngramError
from engram.core.io import encoded, reading, write_bytes, write_text, writing
from engram.core.provenance import version

FILES = "FILES.txt"  # in the folder next to a page: the names of the files that belong to the page
_LONGEST = 120  # characters of a file name before its suffix


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


def file_names(texts: Iterable[str]) -> dict[str, str]:
    """Return a safe file name for each text, which is a name from data and a suffix: each name is used once.

    A name has only ASCII letters, digits, dot, dash and underscore, and begins with a letter, digit or underscore.
    """
    names: dict[str, str] = {}
    for text in texts:
        stem, _, suffix = text.rpartition(".")
        clean = re.sub(r"[^A-Za-z0-9.-]+", "_", stem).lstrip(".-")[:_LONGEST] or "file"
        taken = {name.lower() for name in names.values()}  # some file systems ignore case
        numbered = (f"{clean}{'' if number == 1 else f'-{number}'}.{suffix}" for number in count(1))
        names[text] = next(name for name in numbered if name.lower() not in taken)
    return names


def write_page_and_files(
    page: Path, source: jinja2.Template, context: Mapping[str, Any], files: Mapping[str, str | bytes]
) -> None:
    """Fill in a template, and write the page and its files. `link(key)` in the template is the address of a file.

    The files go to a folder named like the page plus `_files`, under the names that `file_names` gives to their keys.
    Files of an earlier page there are removed; other files stay.
    """
    folder, names = page.with_name(f"{page.stem}_files"), file_names(files)
    if folder.is_symlink():
        raise EngramError(f"cannot write to {folder}: it is a symbolic link; remove it, or give the page another name")
    address = quote(os.fsencode(folder.name))
    text = source.render(
        **context, link=lambda key: f"{address}/{names[key]}", folder_name=folder.name, version=version()
    )
    index = folder / FILES
    with reading(index):
        earlier = index.read_text(encoding="utf-8", errors="replace").splitlines() if index.is_file() else []
    for key, content in files.items():
        write_bytes(folder / names[key], content if isinstance(content, bytes) else encoded(content))
    write_text(index, "".join(f"{name}\n" for name in sorted(names.values())))
    for name in set(earlier).difference(names.values()):
        if Path(name).name == name and (folder / name).is_file():
            with writing(folder / name):
                (folder / name).unlink()
    write_text(page, text)


def is_report_folder(path: Path) -> bool:
    """Whether this is the folder of files next to a page."""
    return path.name.endswith("_files") and (path / FILES).is_file()
