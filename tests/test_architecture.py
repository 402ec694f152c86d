"""The shape of the package: layers as documented, names that occur once, no method named outside the methods."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from engram.methods import METHODS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "engram"
FILES = sorted(PACKAGE.rglob("*.py"))
# A method's name that is also an ordinary word of the code, or of another thing.
ORDINARY = {"channel", "joint", "replay", "uniform", "pixels", "ridge", "mas", "si", "wa", "pod", "gap", "gram"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(module: ast.Module) -> set[int]:
    """The ids of the nodes that are docstrings."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            found.add(id(node.body[0].value))  # pyright: ignore[reportAttributeAccessIssue]
    return found


def test_the_documented_layers_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = [set(layer.split(" | ")) for layer in contracts[0]["layers"]]
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("## Layers") : text.index("## A method declares")]
    documented = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table.splitlines() if row.startswith("| `")]
    assert documented == checked


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and those for type checkers only count too."""
    graph = grimp.build_graph("engram", cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(list(TopologicalSorter(imported).static_order())) == len(imported)  # a cycle raises CycleError


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text)) - {"methods/NAME.py"}
    missing = [name for name in names if not any((base / name).exists() for base in (PACKAGE, ROOT, ROOT / "docs"))]
    assert missing == []


def test_no_file_name_and_no_class_name_occurs_twice() -> None:
    files = Counter(path.name for path in FILES if path.name not in ("__init__.py", "__main__.py"))
    classes = Counter(
        node.name
        for path in FILES
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in (files + classes).items() if count > 1] == []


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=str)
def test_a_package_file_holds_no_logic(path: Path) -> None:
    if path == PACKAGE / "__init__.py":  # imports names when they are first used
        return
    kinds = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    assert all(isinstance(node, kinds) for node in tree(path).body)


def test_no_module_outside_the_methods_names_a_method() -> None:
    """Neither a class of a method nor its name as a text, alone or as the beginning of a recipe's name.

    The help of `engram learn` shows the default method. It must not import the methods, which need torch; another test
    compares it with the default.
    """
    classes = {info.kind.__name__ for info in METHODS.values()}
    names = set(METHODS) - ORDINARY
    found: list[str] = []
    for path in FILES:
        if path.is_relative_to(PACKAGE / "methods"):
            continue
        module = tree(path)
        documentation = docstrings(module)
        for node in ast.walk(module):
            if isinstance(node, ast.Name) and node.id in classes:
                found.append(f"{path.relative_to(PACKAGE)}: {node.id}")
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and re.match(r"engram\.methods\.(?!blocks|defaults)", node.module)
            ):
                found.append(f"{path.relative_to(PACKAGE)}: imports {node.module}")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                word = node.value.split("-")[0]
                if node.value in names or (
                    word in names and re.fullmatch(r"[\w-]+-(mini|cifar100|folder|imagenet)\S*", node.value)
                ):
                    found.append(f"{path.relative_to(PACKAGE)}: {node.value!r}")
    assert found == []
