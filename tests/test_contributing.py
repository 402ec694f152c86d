"""The worked example of CONTRIBUTING: one file makes a method, and every claim made of it holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its contract suite with the example's two files in them."""
    there = tmp_path_factory.mktemp("contributor")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    method, test = blocks
    shutil.copytree(ROOT / "src", there / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (there / "tests").mkdir()
    for name in ("conftest.py", "helpers.py", "test_methods_contract.py"):
        shutil.copy(ROOT / "tests" / name, there / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", there)
    (there / "src/engram/methods/steady.py").write_text(method)
    (there / "tests/test_steady.py").write_text(test)
    return there


def call(copy: Path, *arguments: str) -> str:
    """What a command of the copy prints."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_is_listed_and_has_recipes(copy: Path) -> None:
    assert "steady" in call(copy, "engram", "list", "methods")
    recipes = call(copy, "engram", "list", "recipes")
    for name in ("steady-cifar100-b50-s10", "steady-mini-b10-s5", "steady-folder"):
        assert name in recipes


def test_the_example_passes_the_contract_and_its_own_test(copy: Path) -> None:
    printed = call(copy, "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "tests", "-k", "steady")
    (passed,) = re.findall(r"(\d+) passed", printed)
    assert int(passed) >= 15
    assert "failed" not in printed


def test_the_example_passes_the_checks(copy: Path) -> None:
    files = ("src/engram/methods/steady.py", "tests/test_steady.py")
    (copy / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text().replace('venv = ".venv"\n', ""))
    assert "0 errors, 0 warnings" in call(copy, "basedpyright", "--pythonpath", sys.executable, *files)
    call(copy, "ruff", "check", *files)
    call(copy, "ruff", "format", "--check", *files)


def test_the_example_runs(copy: Path) -> None:
    short = ("--epochs", "1", "--stop-after-stage", "1", "--quiet")
    call(copy, "engram", "run", "steady-mini-b10-s5", *short, "--out", str(copy / "run"))
    assert (copy / "run/result.json").exists()
