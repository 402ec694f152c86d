"""The worked example of CONTRIBUTING: one file makes a method, and every claim made of it holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engram.methods import METHODS
from helpers import Engram
from test_cli import photos
from test_cli_several import SMALL

__all__ = ["photos"]  # a fixture

ROOT = Path(__file__).parents[1]


def blocks() -> list[str]:
    """The example's method and its test, and then the other examples."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its contract suite with the example's two files in them."""
    there = tmp_path_factory.mktemp("contributor")
    method, test = blocks()[:2]
    shutil.copytree(ROOT / "src", there / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (there / "tests").mkdir()
    for name in ("conftest.py", "helpers.py", "test_methods_contract.py"):
        shutil.copy(ROOT / "tests" / name, there / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", there)
    (there / "src/engram/methods/steady.py").write_text(method)
    (there / "tests/test_steady.py").write_text(test)
    return there


def call(copy: Path, *arguments: str) -> str:
    """What Python prints with these arguments and the copy's package."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_is_listed_has_recipes_and_runs(copy: Path) -> None:
    short = ("--base", "2", "--increment", "2", "--epochs", "1", "--stop-after-stage", "1", "--quiet")
    run = ["run", "steady-mini-b10-s5", *short, "--out", str(copy / "run")]
    code = f"from engram.cli.main import main\nassert main(['list', 'recipes']) == main({run}) == 0"
    recipes = call(copy, "-c", code)
    for name in ("steady-cifar100-b50-s10", "steady-mini-b10-s5", "steady-folder"):
        assert name in recipes
    assert (copy / "run/result.json").exists()


def test_the_example_passes_the_contract_and_its_own_test(copy: Path) -> None:
    printed = call(copy, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "tests", "-k", "steady")
    (passed,) = re.findall(r"(\d+) passed", printed)
    assert int(passed) >= 15
    assert "failed" not in printed


def test_the_example_passes_the_checks(copy: Path) -> None:
    files = ("src/engram/methods/steady.py", "tests/test_steady.py", "tests/three_layers.py")
    (copy / files[2]).write_text(next(block for block in blocks() if "@register_backbone" in block))
    (copy / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text().replace('venv = ".venv"\n', ""))
    assert "0 errors, 0 warnings" in call(copy, "-m", "basedpyright", "--pythonpath", sys.executable, *files)
    call(copy, "-m", "ruff", "check", *files)
    call(copy, "-m", "ruff", "format", "--check", *files)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example in a file outside the package, which ENGRAM_METHODS names."""
    file = tmp_path / "mine" / "steady.py"
    file.parent.mkdir()
    file.write_text(blocks()[0])
    monkeypatch.setenv("ENGRAM_METHODS", f" {file}, ")
    yield file
    METHODS.pop("steady", None)
    sys.modules.pop(str(file), None)


SHORT = ("--base", "2", "--increment", "2", "--epochs", "1", "--finetune-epochs", "1", "--quiet", "--out", "run")


def test_a_method_outside_the_package_runs_stops_and_resumes(engram: Engram, own: Path) -> None:
    assert "steady" in engram("list", "methods").out
    stopped = engram("run", "steady-mini-b10-s5", *SHORT, "--stop-after-stage", "0")
    assert (stopped.status, stopped.err) == (0, "")
    resumed = engram("resume", "run", "--stop-after-stage", "1", "--quiet")
    assert (resumed.status, resumed.err) == (0, "")
    assert len(json.loads(Path("run/result.json").read_text())["stages"]) == 2


def edit(file: Path) -> None:
    """The method is another from here on, as for the next process."""
    file.write_text(file.read_text() + "\n# edited\n")
    METHODS.pop("steady")
    sys.modules.pop(str(file))


def versions(run: str | Path) -> dict[str, str]:
    return json.loads((Path(run) / "run.json").read_text())["versions"]


def test_runs_of_edited_code_stand_apart(engram: Engram, own: Path, photos: Path) -> None:
    command = ("run", "steady-folder", "--data", photos, *SMALL)
    assert engram(*command, "--orders", "1,2").status == 0
    first, second = sorted(Path("runs").iterdir())
    code = versions(first)["method_code"]
    assert (versions(second)["method_file"], versions(second)["method_code"]) == ("steady.py", code)
    assert str(own.parent) not in str(versions(first))
    again = engram(*command, "--orders", "1,2")
    assert (again.err, again.out.count("[code ")) == ("", 0)
    edit(own)
    planned = engram(*command, "--orders", "1,2,3", "--dry-run")
    outcome = engram(*command, "--orders", "1,2,3")
    for told in (planned.err, outcome.err):
        assert told.count("\n") == 1
        assert told.startswith("engram: 2 runs are done already, but not recorded with the present code of the method")
        assert told.endswith(f": {first.name}, {second.name}\n")
    third = max(Path("runs").iterdir())
    assert versions(third)["method_code"] != code
    for name in (code, versions(third)["method_code"]):
        assert name in outcome.out.partition("recipe")[2], "a row of its own"
    assert engram("report", "runs").status == 0
    page = Path("runs/report.html").read_text()
    for text in (f"code={code}", "steady-folder", "runs with different code are separate groups"):
        assert text in page


def test_a_run_that_goes_on_with_edited_code_says_so(engram: Engram, own: Path) -> None:
    assert engram("run", "steady-mini-b10-s5", *SHORT, "--stop-after-stage", "0").status == 0
    begun = versions("run")["method_code"]
    edit(own)
    for stage, warned in ((1, True), (2, False)):
        told = engram("resume", "run", "--stop-after-stage", str(stage), "--json").out
        assert ("the code of the method steady in steady.py was changed since" in told) is warned
        codes = versions("run")["method_code"].split(", ")
        assert (len(codes), codes[0]) == (2, begun)
    assert versions("run")["method_file"] == "steady.py"
    for kept in ("checkpoint", "stages", "result.json"):
        shutil.move(Path("run", kept), own.parent)
    edit(own)
    assert "was not trained" not in engram("resume", "run", "--stop-after-stage", "0", "--json").out
    assert versions("run")["method_code"] not in codes, "nothing of the other code is left"


def test_the_command_on_record_can_be_typed_again(engram: Engram, own: Path, photos: Path) -> None:
    for number, recipes in enumerate((["replay-folder"], ["steady-folder"], ["steady-folder", "replay-folder"])):
        assert engram("run", *recipes, "--data", photos, *SMALL, "--out", f"runs{number}", "--quiet").status == 0
    for place in (Path("runs1"), *Path("runs2").iterdir()):
        command = json.loads((place / "run.json").read_text())["command"]
        assert command.startswith(f"ENGRAM_METHODS={own}, engram run steady-folder ")
    assert json.loads(Path("runs0/run.json").read_text())["command"].startswith("engram run replay-folder ")
    assert versions("runs0").keys().isdisjoint({"method_file", "method_code"})


def test_an_unknown_method_says_how_ones_own_is_brought_in(
    engram: Engram, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engram("run", "steady-mini-b10-s5", *SHORT, "--stop-after-stage", "0").status == 0
    monkeypatch.delenv("ENGRAM_METHODS")
    METHODS.pop("steady")
    for command in (("run", "steady-mini-b10-s5"), ("resume", "run"), ("run", "acf-mini-b10-s5")):
        outcome = engram(*command)
        assert outcome.status == 2
        assert "ENGRAM_METHODS=FILE.py" in outcome.err
    near = engram("run", "warm-mini-b10-s5").err
    assert "did you mean 'wa-mini-b10-s5'? (a method of your own: " in near, "it may be either"
    for known in ("afc", "afc-mini-b10-s6", "AFC mini b10 s5", "afc_mini_b10_s5"):
        assert "ENGRAM_METHODS" not in engram("run", known).err, "the method is known"


def test_a_module_on_the_path_is_named_as_one(engram: Engram, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(own.parent)
    monkeypatch.setenv("ENGRAM_METHODS", "steady")
    assert "steady" in engram("list", "methods").out
    sys.modules.pop("steady")


def test_what_cannot_be_brought_in_is_named(engram: Engram, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write_text("import nothing_of_that_name")
    leaving = own.with_name("leaving.py")
    leaving.write_text("import sys\nsys.exit(0)")
    for given, wanted in (
        ("nowhere.py", ["nowhere.py", "no such file"]),
        ("no_module.at_all", ["no_module.at_all", "no such module"]),
        (str(own), [str(own), "nothing_of_that_name", "ENGRAM_DEBUG=1"]),
        (str(leaving), [str(leaving), "SystemExit"]),
    ):
        monkeypatch.setenv("ENGRAM_METHODS", given)
        outcome = engram("list", "methods")
        assert outcome.status == 2
        assert outcome.err.count("\n") == 1
        for text in ("ENGRAM_METHODS", *wanted):
            assert text in outcome.err
