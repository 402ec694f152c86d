"""What a release is made of: the sdist has every file of the repository, pins cover the tools, workflows do .ci/run."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
ALWAYS = {"pyproject.toml", "README.md", "LICENSE", ".gitignore"}  # hatchling adds them


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;! ]", each, maxsplit=1)[0].lower().replace("_", "-") for each in requirements}


def test_the_sdist_has_every_file_that_is_tracked() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {line.split("/")[0] for line in listed.splitlines()}
    included = {name.strip("/") for name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    assert tracked - included - ALWAYS == set()
    assert included - tracked == set()


def test_the_tools_of_the_tests_are_pinned_and_have_every_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names([line for line in pins if line and not line.startswith("#")])
    wanted = names([*PROJECT["project"]["dependencies"], *extras["dev"]])
    assert wanted - pinned == set(), "without a pin"
    for extra in ("docs", "estimator", "onnx", "serve", "tensorboard"):
        assert set(extras[extra]) <= set(extras["dev"]), extra


def test_workflows_do_what_the_checks_do_and_name_exact_versions() -> None:
    assert {"build.yml", "docs.yml", "publish.yml", "test.yml"} == WORKFLOWS.keys()
    assert "- run: .ci/run\n" in WORKFLOWS["test.yml"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "mkdocs build --strict" in WORKFLOWS["docs.yml"]
    for name, text in WORKFLOWS.items():
        for used in re.findall(r"uses: (\S+)", text):
            assert used.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), (name, used)
        assert "permissions:" in text
    for version in ("3.11", "3.12", "3.13"):
        assert f"Python :: {version}" in str(PROJECT["project"]["classifiers"])
        assert f'"{version}"' in WORKFLOWS["build.yml"]
