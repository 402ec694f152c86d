"""The page for method authors names everything that a method is written with, with the right defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import engram.contract
from engram.contract import (
    Extension,
    ImageOutputs,
    Learner,
    Optimiser,
    Output,
    Passes,
    Phase,
    Stage,
    Step,
    StepHooks,
    Training,
)
from helpers import tiny_session

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
SECTIONS = {
    Step: "Step",
    Output: "Output",
    Stage: "Stage",
    Learner: "Learner",
    Passes: "Passes",
    Phase: "Phase",
    Training: "Training",
    Extension: "Extension and StepHooks",
    StepHooks: "Extension and StepHooks",
    Optimiser: "register_optimiser",
    ImageOutputs: "register_predictor",
}
TUPLE = {"count", "index"}  # methods of every named tuple


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return re.sub(r"```.*?```", "", found[1], flags=re.DOTALL)


def public_names(cls: type) -> set[str]:
    """The public fields, properties and methods of a class."""
    names = {*dir(cls), *(name for base in cls.__mro__ for name in getattr(base, "__annotations__", {}))}
    if cls is Learner:
        names |= set(vars(tiny_session().learner))
    inherited = TUPLE if issubclass(cls, tuple) else set()
    return {name for name in names if not name.startswith("_")} - inherited


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_public_name_is_on_the_page(cls: type) -> None:
    written = {name for code in re.findall(r"`([^`]+)`", section(SECTIONS[cls])) for name in re.findall(r"\w+", code)}
    assert public_names(cls) - written == set()


def test_every_field_is_compared() -> None:
    """Names that are only annotated, or only set when an object is made, count too."""
    assert {"labels", "old", "extra", "streams"} <= public_names(Step)
    assert {"maps", "logits"} <= public_names(Output)
    assert "count" not in public_names(Output)
    assert {"class_means", "notes", "store"} <= public_names(Learner)
    assert {"warmup", "optimiser", "in_step"} <= public_names(Training)


def registering() -> dict[str, Any]:
    return {name: getattr(engram.contract, name) for name in engram.contract.__all__ if name.startswith("register")}


@pytest.mark.parametrize("name", ["register", *sorted(set(registering()) - {"register", "register_backbone"})])
def test_every_way_to_register_is_on_the_page(name: str) -> None:
    text = PAGE[PAGE.index(f"### {name}\n") :]
    text = text[: text.index("\n##", 5)]
    assert f"@{name}(" in text, "with an example"
    for parameter in list(inspect.signature(registering()[name]).parameters)[1:]:
        assert f"`{parameter}" in text, parameter


def test_defaults_on_the_page_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (\S.*?) \| .*\|$", section("Training"), flags=re.MULTILINE)
    shown: dict[str, str] = {}
    for names, defaults in rows:
        fields = re.findall(r"`(\w+)`", names)
        values = [defaults] if len(fields) == 1 else defaults.split(", ")
        shown |= dict(zip(fields, values, strict=True))
    plain = Training()
    for name, text in shown.items():
        assert eval(text.strip("`")) == getattr(plain, name), name
    assert {"epochs", "lr", "betas", "warmup", "optimiser", "clip_norm"} <= shown.keys()
