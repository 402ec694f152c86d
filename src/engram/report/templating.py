"""Templates of HTML pages."""

from __future__ import annotations

from pathlib import Path

import jinja2


def template(name: str, *folders: Path) -> jinja2.Template:
    """The template of that name, in these folders or the report's own; what is put into it is shown as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent / "templates"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)
