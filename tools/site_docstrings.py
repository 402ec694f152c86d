"""Docstrings as Markdown for the site: lists of parameters as lists, examples as code, pages as links."""

from __future__ import annotations

import re
from typing import Any

import griffe

HEADING = re.compile(r"^Parameters\n-+\n", re.MULTILINE)
NAME = re.compile(r"(?:\A|\n|(?<=\.) +)([a-z_]\w*(?:, [a-z_]\w*)*): ")
PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")
CODE = re.compile(r"(?:^(?:>>>|\.\.\.) ?.*\n?)+", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Changes every docstring before it is shown."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The text with `name: what it is` as items of a list, `>>> ` lines as a block of code, and pages as links."""
    text = PAGE.sub(r"[\1](../\1.html)", text)  # the entries are in docs/reference/
    parts = HEADING.sub("\n", text).split("\n\n")
    listed = [NAME.sub(r"\n- `\1`: ", part).strip("\n") if NAME.match(part.lstrip("\n")) else part for part in parts]
    return CODE.sub(_fenced, "\n\n".join(listed))


def _fenced(lines: re.Match[str]) -> str:
    code = re.sub(r"^(?:>>>|\.\.\.) ?", "", lines[0], flags=re.MULTILINE)
    return f"```python\n{code.rstrip()}\n```\n"
