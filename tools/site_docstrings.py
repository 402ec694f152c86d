"""Docstrings as Markdown for the site: lists of parameters as lists, examples as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

HEADING = re.compile(r"^Parameters\n-+\n", re.MULTILINE)
NAME = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", re.MULTILINE)
CODE = re.compile(r"(?:^(?:>>>|\.\.\.) ?.*\n?)+", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Changes every docstring before it is shown."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The text with `name: what it is` as items of a list, and `>>> ` lines as a block of code."""
    parts = HEADING.sub("\n", text).split("\n\n")
    listed = [NAME.sub(r"- `\1`: ", part) if NAME.match(part.lstrip("\n")) else part for part in parts]
    return CODE.sub(_fenced, "\n\n".join(listed))


def _fenced(lines: re.Match[str]) -> str:
    code = re.sub(r"^(?:>>>|\.\.\.) ?", "", lines[0], flags=re.MULTILINE)
    return f"```python\n{code.rstrip()}\n```\n"
