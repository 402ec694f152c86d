"""The command line as a user runs it: results, and messages about wrong input."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engram import ImageStore, read_mini, recipe
from engram.cli import options as cli_options
from engram.cli.commands.run_common import follow_run
from engram.cli.commands.setup import check_torch
from engram.cli.main import main
from engram.cli.options.all_commands import COMMANDS
from engram.cli.options.overrides import configure
from engram.cli.options.runs import RunningFlags
from engram.cli.parser import parse
from engram.cli.signals import Interrupt
from engram.cli.text import make_console
from engram.core.events import Event, RunStarted
from engram.data.sources.cifar import OFFICIAL_NAMES
from engram.experiment.run_config import directory_name
from engram.experiment.session import Session
from engram.methods.defaults import DEFAULT_METHOD, DEMO_METHODS
from fake_runs import fake_run
from helpers import Engram, Outcome, timeless

CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox")
SMALL = ("--backbone", "resnet10", "--epochs", "1", "--finetune-epochs", "1", "--batch-size", "16", "--increment", "2")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: tiny networks gain nothing from a second one, and lose a lot if its core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """Start a command in a new process."""
    command = [sys.executable, "-m", "engram", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def make_photos(folder: Path, classes: tuple[str, ...] = CLASSES, count: int = 12, size: int = 16) -> Path:
    """Make a folder of class folders: noise, tinted by class."""
    rng = np.random.default_rng(len(classes))
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 120, (size, size, 3))
            pixels[..., number % 3] += 60 + 20 * number // 3
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name / f"{i:02d}.png")
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos") / "animals")


@pytest.fixture
def mutable_photos(photos: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(photos, tmp_path / "photos"))


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three stages; tests copy it."""
    place = tmp_path_factory.mktemp("finished") / "run"
    assert (
        main(["run", "afc-folder", "--data", str(photos), "--base", "2", *SMALL, "--out", str(place), "--quiet"]) == 0
    )
    return place


@pytest.fixture(scope="module")
def stopped(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after stage 1; tests copy it."""
    place = tmp_path_factory.mktemp("stopped") / "run"
    arguments = ["run", "afc-folder", "--data", str(photos), "--base", "2", *SMALL, "--out", str(place), "--quiet"]
    assert main([*arguments, "--stop-after-stage", "1"]) == 0
    return place


@pytest.fixture
def stopped_copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "stopped"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_refused(outcome: Outcome, *words: str) -> None:
    assert outcome.status == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("engram: ")
    assert outcome.err.count("\n") == 1, outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


# Help and typing mistakes.


def test_help_is_quick_and_does_not_load_torch(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from engram.cli.main import main\n"
        "status = [main(['--help'])]\n"
        "seconds = time.process_time()\n"  # CPU time: other programs may be running
        "status = (*status, main(['run', '--help']))\n"
        "heavy = sorted({'torch', 'numpy', 'matplotlib', 'PIL'} & set(sys.modules))\n"
        "print(status, heavy, seconds, file=sys.stderr)\n"
    )
    seconds: list[float] = []
    text = ""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        status, _, rest = done.stderr.strip().partition(" [")
        heavy, _, taken = rest.partition("] ")
        assert (status, heavy) == ("(0, 0)", "")
        seconds.append(float(taken))
        text = done.stdout
    assert min(seconds) < 0.5
    assert "engram demo" in text
    for flag in ("--data", "--order", "--memory", "--variant", "--dry-run", "--set", "--stop-after-stage"):
        assert flag in text


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_with_an_example(command: str, engram: Engram) -> None:
    outcome = engram(command, "--help")
    assert outcome.status == 0
    assert f"engram {command}" in outcome.out
    assert "For example:" in outcome.out
    assert command in engram("--help").out


def test_other_arguments_do_not_change_the_help(engram: Engram) -> None:
    beside = engram("results", "merge", "--help")
    assert beside.status == 0
    assert "WHAT OUT IN [IN ...]" in beside.out.splitlines()[0]
    assert beside.out == engram("results", "--help").out


@pytest.mark.parametrize("columns", ["80", "60", "300"])
def test_paragraphs_of_the_help_are_wrapped(columns: str, engram: Engram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for command in (["--help"], *([name, "--help"] for name in COMMANDS)):
        prose = [line for line in engram(*command).out.splitlines() if line[:1].isalpha() and "{demo," not in line]
        assert prose[0].startswith("usage: engram")
        assert all(len(line) <= min(int(columns), 100) for line in prose)
    said = " ".join(engram("run", "--help").out.split())
    assert "With several runs, the same command again skips those that are done" in said


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("run", "engram run [-h] [OPTIONS] RECIPE [RECIPE ...]"),
        ("list", "engram list [-h] [WHAT] [TEXT]"),
        ("results", "engram results [-h] WHAT OUT IN [IN ...]"),
        ("resume", "engram resume [-h] [OPTIONS] DIR\n"),
    ],
)
def test_the_usage_marks_optional_and_repeatable_arguments(command: str, usage: str, engram: Engram) -> None:
    assert engram(command, "--help").out.startswith(f"usage: {usage}")


def test_the_help_names_the_default_method(engram: Engram) -> None:
    assert f"or {DEFAULT_METHOD})" in engram("learn", "--help").out


def test_completion_scripts_have_commands_and_flags(engram: Engram) -> None:
    for shell in ("bash", "zsh"):
        printed = engram("--print-completion", shell)
        assert (printed.status, printed.err) == (0, "")
        assert all(word in printed.out for word in ("reproduce", "--image-size", "engram"))
    assert_refused(engram("--print-completion", "fish"), "needs the name of a shell: bash, zsh")


def test_version(engram: Engram) -> None:
    assert engram("--version").out.startswith("engram 0.")


def test_a_source_tree_that_is_not_installed_can_be_run(
    engram: Engram, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name == "engram":
            raise metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", from_name)
    assert engram("--version").out == "engram unknown (not installed)\n"
    assert "unknown (not installed)" in engram("doctor").out
    run = ("run", "naive-folder", "--data", photos, "--backbone", "resnet10", "--epochs", "1", "--out", "run")
    assert engram(*run, "--stop-after-stage", "0", "--quiet").status == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engram"] == "unknown (not installed)"


def test_no_arguments_print_the_help(engram: Engram) -> None:
    outcome = engram()
    assert (outcome.status, outcome.err) == (2, "")
    assert "usage: engram" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], ["'rnu'", "did you mean 'run'?"]),
        (["help"], ["did you mean '--help'?"]),
        (["--versoin"], ["did you mean '--version'?"]),
        (["run"], ["needs RECIPE"]),
        (["run", "afc-mini-b10-s5", "more"], ["'more'"]),
        (["run", "afc-mini-b10-s5", "--epohs", "3"], ["'--epohs'", "did you mean '--epochs'?"]),
        (["run", "afc-mini-b10-s5", "--epochs", "many"], ["--epochs", "whole number", "'many'"]),
        (["run", "afc-mini-b10-s5", "--epochs"], ["--epochs needs a value"]),
        (["run", "afc-mini-b10-s5", "--lr", "nan"], ["--lr", "a number", "'nan'"]),
        (["run", "afc-mini-b10-s5", "--quiet=yes"], ["--quiet takes no value"]),
        (["run", "afc-mini-b10-s5", "--variant", "papre"], ["--variant", "did you mean 'paper'?"]),
        (["run", "acf-mini-b10-s5"], ["'acf-mini-b10-s5'", "did you mean 'afc-mini-b10-s5'?"]),
        (["run", "afc-mini-b10-s5", "--device", "gpu"], ["--device", "did you mean 'cuda'?"]),
        (["run", "afc-mini-b10-s5", "--device", "cpu:1"], ["--device", "got 'cpu:1'"]),
        (["run", "afc-mini-b10-s5", "--device", "cuda:99"], ["there is no GPU 99: "]),
        (["run", "afc-mini-b10-s5", "--device", "cuda:one"], ["--device cuda:N takes numbers of GPUs", "'one'"]),
        (["run", "afc-mini-b10-s5", "--device", "cuda:1", "--devices", "1"], ["exclude each other"]),
        (["run", "afc-mini-b10-s5", "--device", "cpu", "--devices", "0"], ["--device cpu uses none"]),
        (["run", "afc-mini-b10-s5", "--devices", "0,0"], ["--devices takes numbers of GPUs, each once", "'0,0'"]),
        (["run", "afc-mini-b10-s5", "--out", "None"], ["--out cannot be 'None'; leave it out"]),
        (["info", "~nobody-of-that-name/model"], ["~nobody-of-that-name/model"]),
        (["run", "iCaRL-mini-b10-s5"], ["did you mean 'icarl-mini-b10-s5'?"]),
        (["run", "afc-mini-b10-s"], ["did you mean one of afc-mini-b10-s10, afc-mini-b10-s5?"]),
        (["run", "afk"], ["'afk'", "METHOD-DATA", "'engram list' shows all"]),
        (["run", "naive"], ["'naive'", "valid names: naive-cifar100-b0-s10, "]),
        (["run", "afc-mini-b10-s5", "--quiet", "--json"], ["--quiet and --json"]),
        (["run", "afc-mini-b10-s5", "--threads", "0"], ["--threads"]),
        (
            ["run", "afc-mini-b10-s5", "--stop-after-stage", "6"],
            ["--stop-after-stage 6 is beyond the last stage: the run has 6 stages, 0 (the base) to 5"],
        ),
        (["run", "afc-mini-b10-s5", "--stop-after-stage", "-1"], ["--stop-after-stage"]),
        (["run", "afc-mini-b10-s5", "--epochs", "-3"], ["epochs", "-3"]),
        (["run", "afc-mini-b10-s5", "--batch-size", "0"], ["batch_size", "0"]),
        (["run", "afc-mini-b10-s5", "--backbone", "resnet23"], ["did you mean 'resnet32'?"]),
        (["run", "replay-mini-b10-s5", "--lambda-disc", "2"], ["--lambda-disc", "replay"]),
        (["run", "naive-mini-b10-s5", "--finetune-epochs", "2"], ["--finetune-epochs", "naive"]),
        (["run", "naive-mini-b10-s5", "--memory", "per_class=5"], ["naive", "per_class=5"]),
        (["run", "naive-mini-b10-s5", "--selection", "random"], ["--selection"]),
        (["run", "afc-mini-b10-s5", "--memory", "none"], ["needs a memory", "naive", "lwf"]),
        (["run", "afc-mini-b10-s5", "--memory", "twenty"], ["'twenty'", "per_class=K"]),
        (["run", "afc-mini-b10-s5", "--memory", "total=3"], ["3", "20 classes", "total=20"]),
        (["run", "afc-mini-b10-s5", "--memory", "per_class=0"], ["at least one exemplar", "per_class=0"]),
        (["run", "afc-mini-b10-s5", "--base", "21"], ["1 to 20", "21"]),
        (["run", "afc-mini-b10-s5", "--order", "fox,house,fox"], ["fox", "more than once"]),
        (["run", "afc-mini-b10-s5", "--order", "fox,house"], ["lacks 18 of the 20 classes"]),
        (["run", "afc-mini-b10-s5", "--order", "1,2,3"], ["lacks 17 of the 20 classes", "--orders"]),
        (["run", "afc-mini-b10-s5", "--order", "fox,huose"], ["did you mean 'house'?"]),
        (
            ["run", "afc-mini-b10-s5", "--set", "settings.importanse_samples=9"],
            ["did you mean 'settings.importance_samples'?"],
        ),
        (["run", "afc-mini-b10-s5", "--set", "settings.train.lrr=9"], ["did you mean 'settings.train.lr'?"]),
        (["run", "afc-mini-b10-s5", "--set", "train.epochs=9"], ["did you mean 'settings.train.epochs'?"]),
        (["run", "afc-mini-b10-s5", "--set", "train.epohs=9"], ["did you mean 'settings.train.epohs'?"]),
        (
            ["run", "afc-mini-b10-s5", "--set", "epochs=9"],
            ["did you mean 'settings.train.epochs' or 'settings.finetune.epochs'?"],
        ),
        (["run", "afc-mini-b10-s5", "--set", "augmentation.blur=9"], ["valid names: augmentation.brightness, "]),
        (["run", "afc-mini-b10-s5", "--set", "settings.train.epochs=0"], ["settings.train.epochs must be", "got 0"]),
        (["run", "afc-mini-b10-s5", "--epochs", "0"], ["settings.train.epochs must be at least 1, got 0"]),
        (["run", "gdumb-mini-b10-s5", "--set", "settings.rehearse.epochs=0"], ["settings.rehearse.epochs", "got 0"]),
        (["run", "afc-mini-b10-s5", "--set", "augmentation.pad"], ["--set", "KEY=VALUE"]),
        (["run", "afc-mini-b10-s5", "--set", "memory=3"], ["'3'", "per_class=K"]),
        (["run", "afc-mini-b10-s5", "--set", "method=naive"], ["cannot change the method", "name of the recipe"]),
        (["run", "afc-mini-b10-s5", "--set", " recipe = mine"], ["cannot change the recipe", "engram list"]),
        (["run", "afc-mini-b10-s5", "--set", "augmentation.pad=wide"], ["augmentation.pad", "'wide'"]),
        (["run", "afc-mini-b10-s5", "--skip-bad"], ["--skip-bad", "folder"]),
        (["run", "afc-mini-b10-s5", "--holdout", "2"], ["holdout", "2"]),
        (["run", "afc-folder"], ["--data"]),
        (["run", "afc-folder", "--data", "nowhere"], ["nowhere", "--data"]),
        (["run", "afc-cifar100-b50-s10"], ["engram prepare cifar100"]),
        (["run", "afc-cifar100-b50-s10", "--data", "cifar.tar.gz"], ["cifar.tar.gz"]),
        (["resume", "nowhere"], ["nowhere"]),
        (["report", "nowhere"], ["nowhere"]),
        (["report"], ["needs DIR"]),
        (["list", "recipe"], ["did you mean 'recipes'?"]),
        (["prepare", "cifar10"], ["did you mean 'cifar100'?"]),
        (["demo", "--seed", "-1"], ["seed", "-1"]),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_a_wrong_input_gets_one_sentence(
    arguments: list[str], words: list[str], engram: Engram, tmp_path: Path
) -> None:
    assert_refused(engram(*arguments), *words)
    assert list(tmp_path.iterdir()) == []


# Wrong images.


def test_truncated_archive(engram: Engram, tmp_path: Path) -> None:
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        info = tarfile.TarInfo("cifar-100-python/train")
        content = np.random.default_rng(0).bytes(100_000)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    archive.write_bytes(archive.read_bytes()[:50_000])
    assert_refused(engram("run", "afc-cifar100-b50-s10", "--data", archive), str(archive))


def test_corrupt_image_is_named_and_can_be_skipped(engram: Engram, mutable_photos: Path) -> None:
    (mutable_photos / "bee" / "03.png").write_bytes(b"\x89PNG\r\n\x1a\n not really")
    run = ("run", "afc-folder", "--data", mutable_photos, *SMALL)
    assert_refused(engram(*run), "bee/03.png", "--skip-bad")
    outcome = engram(*run, "--skip-bad", "--stop-after-stage", "0")
    assert outcome.status == 0
    assert "warning: 1 unreadable images were skipped: bee/03.png" in outcome.out


def test_empty_class_folder(engram: Engram, mutable_photos: Path) -> None:
    (mutable_photos / "gnu").mkdir()
    assert_refused(engram("run", "afc-folder", "--data", mutable_photos), "gnu", "no image")


def test_class_in_test_but_not_in_train(engram: Engram, tmp_path: Path) -> None:
    make_photos(tmp_path / "p" / "train", ("ant", "bee"), count=3)
    make_photos(tmp_path / "p" / "test", ("ant", "bee", "cat"), count=2)
    assert_refused(engram("run", "afc-folder", "--data", tmp_path / "p"), "cat", "not in")


def test_mixed_sizes_are_refused_or_resized(engram: Engram, mutable_photos: Path) -> None:
    Image.new("RGB", (20, 24)).save(mutable_photos / "cat" / "00.png")
    run = ("run", "afc-folder", "--data", mutable_photos, "--dry-run")
    assert_refused(engram(*run), "20x24", "16x16", "--image-size")
    outcome = engram(*run, "--image-size", "12")
    assert outcome.status == 0
    assert "12x12" in outcome.out


# Wrong run directories.


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def break_checkpoint(place: Path) -> None:
    file = place / "checkpoint" / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-200] ^= 0xFF
    file.write_bytes(content)


def cut_checkpoint(place: Path) -> None:
    file = place / "checkpoint" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def cut_manifest(place: Path) -> None:
    file = place / "run.json"
    file.write_text(file.read_text()[:300])


def change_config(place: Path) -> None:
    config = json.loads((place / "run.json").read_text())["config"]
    edit_json(place / "run.json", config=config | {"seed": 77})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda place: edit_json(place / "run.json", format=99, engram="9.0"), ["9.0", "format 99"]),
        (cut_manifest, ["run.json", "half-written or damaged"]),
        (lambda place: (place / "run.json").unlink(), ["no run.json"]),
        (break_checkpoint, ["checkpoint", "damaged"]),
        (cut_checkpoint, ["checkpoint", "damaged"]),
        (change_config, ["changed after the run began"]),
        (lambda place: edit_json(place / "run.json", config_hash="0" * 16), ["configuration"]),
        (
            lambda place: edit_json(place / "run.json", stage_sizes=None),
            ["run.json cannot be used: stage_sizes should be a list, got None"],
        ),
    ],
    ids=["other version", "half-written", "no manifest", "flipped byte", "cut off", "edited", "other recipe", "null"],
)
def test_resume_refuses_a_damaged_directory_and_does_not_change_it(
    spoil: Callable[[Path], object], words: list[str], engram: Engram, stopped_copy: Path
) -> None:
    spoil(stopped_copy)
    before = contents(stopped_copy)
    assert_refused(engram("resume", stopped_copy), *words)
    assert contents(stopped_copy) == before


def test_resume_refuses_a_stage_that_does_not_exist(engram: Engram, stopped_copy: Path) -> None:
    before = contents(stopped_copy)
    assert_refused(engram("resume", stopped_copy, "--stop-after-stage", "3"), "the run has 3 stages, 0 (the base) to 2")
    assert contents(stopped_copy) == before


def test_resume_refuses_other_images(engram: Engram, stopped_copy: Path, mutable_photos: Path) -> None:
    Image.new("RGB", (16, 16)).save(mutable_photos / "cat" / "00.png")
    assert_refused(engram("resume", stopped_copy, "--data", mutable_photos), "not those", "--data")
    assert_refused(engram("resume", stopped_copy, "--data", "nowhere"), "nowhere")


def test_a_used_directory_is_never_overwritten(
    engram: Engram, photos: Path, stopped_copy: Path, tmp_path: Path
) -> None:
    before = contents(stopped_copy)
    run = ("run", "afc-folder", "--data", photos, *SMALL)
    assert_refused(engram(*run, "--out", stopped_copy), "not empty", "engram resume", "--out")
    assert_refused(engram("demo", "--out", stopped_copy), "not empty", "--out")
    assert contents(stopped_copy) == before
    (tmp_path / "file").write_text("mine")
    assert_refused(engram(*run, "--out", tmp_path / "file"), "exists and is a file", "--out")
    assert_refused(engram(*run, "--out", tmp_path / "file" / "run"), "file")
    assert (tmp_path / "file").read_text() == "mine"


@contextmanager
def unprivileged() -> Iterator[None]:
    """Act as a user other than root, because root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission_to_write(engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    run = ("run", "naive-mini-b10-s5", "--out", locked / "run")
    assert engram(*run, "--dry-run").status == 0
    # That user may not be allowed to read the package either: everything but the images is loaded by now.
    store = read_mini()
    monkeypatch.setattr("engram.cli.commands.run.read_images", lambda *_, **__: store)
    with unprivileged():
        outcome = engram(*run)
    assert_refused(outcome, "cannot write", "permission")
    assert list(locked.iterdir()) == []


def test_full_disk_loses_nothing(
    engram: Engram, stopped_copy: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(stopped_copy)

    def no_room(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_room)
        outcome = engram("resume", stopped_copy, "--quiet")
    assert_refused(outcome, "the disk is full", "intact")
    after = contents(stopped_copy)
    assert {name: after[name] for name in before if name != "events.jsonl"} == {
        name: before[name] for name in before if name != "events.jsonl"
    }
    assert engram("resume", stopped_copy, "--quiet").status == 0
    assert timeless(stopped_copy) == timeless(finished)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (MemoryError(), 2, "not enough memory"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2, "the disk is full"),
        (ZeroDivisionError("oh\nno"), 1, "in fail); run again with ENGRAM_DEBUG=1"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_an_unexpected_error_is_one_line(
    error: BaseException,
    status: int,
    words: str,
    engram: Engram,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.delenv("ENGRAM_DEBUG", raising=False)
    monkeypatch.setattr("engram.cli.main._leave_pipe", lambda: 141)
    monkeypatch.setattr("engram.cli.commands.list_all.list_command", fail)
    outcome = engram("list")
    assert outcome.status == status
    assert words in outcome.err
    assert outcome.err.count("\n") == (1 if words else 0)
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    assert ("Traceback" in engram("list").err) == (status in (1, 2))


LITTLE = "import resource; resource.setrlimit(resource.RLIMIT_AS, (300 << 20,) * 2)"


@pytest.mark.parametrize(("broken", "limited"), [(LITTLE, True), ("import sys; sys.modules['torch'] = None", False)])
def test_a_library_that_cannot_be_loaded_is_one_sentence(broken: str, limited: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"{broken}\nfrom engram.__main__ import program\nprogram()", "list"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2 if limited else 1, "")
    assert done.stderr.startswith("engram: a library cannot be loaded: ")
    assert done.stderr.count("\n") == 1
    assert ("315 MB of memory: raise that limit ('ulimit -v')" in done.stderr) == limited


@pytest.mark.parametrize(
    ("broken", "words"), [("sys.modules['engram.cli.main'] = None", "engram.cli.main"), ("main.main = fail", "memory")]
)
def test_a_program_that_cannot_start_says_so_in_one_sentence(broken: str, words: str, tmp_path: Path) -> None:
    code = "import sys\nfrom engram.cli import main\ndef fail(): raise MemoryError\n"
    code += f"{broken}\nfrom engram.__main__ import program\nprogram()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("engram: cannot start: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


# Names that try to control the terminal.

HOSTILE = ("a\x1b]0;title\x07", "b\x1b[31m", "c\nc", "d\u202ed")


def assert_safe(outcome: Outcome) -> None:
    for text in (outcome.out, outcome.err):
        assert all(character.isprintable() or character in "\t\n" for character in text), repr(text)


def test_names_cannot_control_the_terminal(engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = make_photos(tmp_path / "photos", HOSTILE)
    for arguments in (
        ("run", "afc-folder", "--data", photos, "--dry-run"),
        ("run", "afc-folder", "--data", photos, "--dry-run", "--out", tmp_path / HOSTILE[0]),
        ("run", f"afc-{HOSTILE[1]}"),
        ("run", "afc-folder", "--data", photos, f"--{HOSTILE[0]}"),
        ("resume", HOSTILE[2]),
        ("report", HOSTILE[3]),
        ("info", HOSTILE[0]),
        ("list", "runs", HOSTILE[0]),
    ):
        assert_safe(engram(*arguments))
    place = fake_run(tmp_path / "runs" / HOSTILE[0], stage_sizes=(3, 2), images_per_class=5, epochs=1)
    for name in ("run.json", "result.json"):
        edit_json(Path(place) / name, recipe=HOSTILE[2])
    for width in ("200", "60"):
        monkeypatch.setenv("COLUMNS", width)
        shown = engram("list", "runs")
        assert_safe(shown)
        assert r"a\x1b]0;title\x07" in shown.out.replace("\n", "")
    assert json.loads(engram("list", "runs", "--json").out)[0]["recipe"] == HOSTILE[2]


def test_names_of_classes_cannot_control_the_terminal(engram: Engram, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", HOSTILE)
    learned = engram("learn", "model", photos, "--epochs", "1", "--by-class")
    assert learned.status == 0
    assert "learned a\\x1b]0;title\\x07" in learned.out
    for outcome in (
        learned,
        engram("info", "model"),
        engram("predict", "model", photos),
        engram("evaluate", "model", photos),
        engram("rename", "model", HOSTILE[1], "e\x1b[2J"),
        engram("remove", "model", HOSTILE[2], HOSTILE[3]),
    ):
        assert outcome.status == 0, outcome
        assert_safe(outcome)


# Runs.


def test_run_prints_stages_summary_and_the_next_command(engram: Engram, photos: Path, tmp_path: Path) -> None:
    outcome = engram("run", "afc-folder", "--data", photos, *SMALL, "--seed", "2", "--order", "seed:3")
    (place,) = Path("runs").iterdir()
    assert re.fullmatch(r"afc-folder-train.epochs-1-.*-[0-9a-f]{8}-orderseed-3-seed2", place.name)
    assert (outcome.status, outcome.err) == (0, "")
    assert "\x1b" not in outcome.out
    assert "base: 3 classes, cnn " in outcome.out
    assert "stage 2 of 2: 6 classes, cnn " in outcome.out
    for measure in ("average incremental accuracy", "final accuracy", "forgetting", "backward transfer"):
        assert measure in outcome.out
    assert outcome.out.rstrip().endswith(f"\nnext: engram report {place}")
    manifest = json.loads((tmp_path / place / "run.json").read_text())
    assert manifest["command"].startswith("engram run afc-folder --data ")
    assert manifest["config"]["order"] == "seed:3"
    assert manifest["config"]["settings"]["finetune"]["batch_size"] == 16
    result = json.loads((tmp_path / place / "result.json").read_text())
    assert len(result["stages"]) == 3
    assert result["recipe"] == manifest["recipe"] == manifest["card"]["Recipe"]
    assert result["recipe"].startswith("afc-folder (train.epochs=1, ")
    assert "increment=2" in result["recipe"]


@pytest.mark.parametrize(("method", "phases"), [("geodl", {"train"}), ("gdumb", {"train", "rehearse"})])
def test_the_batch_size_applies_to_the_phases_of_the_method(engram: Engram, method: str, phases: set[str]) -> None:
    outcome = engram("run", f"{method}-mini-b10-s5", "--batch-size", "9", "--dry-run", "--json")
    assert outcome.status == 0
    settings = json.loads(outcome.out)["config"]["settings"]
    tables = {name: value for name, value in settings.items() if isinstance(value, dict)}
    sizes = {name: value["batch_size"] for name, value in tables.items() if "batch_size" in value}
    assert sizes == dict.fromkeys(phases, 9)


def test_flags_reach_the_configuration(engram: Engram, photos: Path) -> None:
    outcome = engram(
        *("run", "afc-folder", "--data", photos, "--dry-run", "--json", "--base", "4", "--increment", "2"),
        *("--seed", "5", "--epochs", "7", "--finetune-epochs", "3", "--batch-size", "9", "--lr", "0.2"),
        *("--memory", "total=60", "--selection", "random", "--variant", "paper", "--lambda-disc", "1.5"),
        *("--backbone", "resnet10", "--device", "cpu", "--precision", "float32", "--test-fraction", "0.25"),
        *("--set", "settings.importance_samples=10", "--set", "augmentation.pad=2", "--order", "natural"),
    )
    assert outcome.status == 0
    plan = json.loads(outcome.out)
    config, settings = plan["config"], plan["config"]["settings"]
    assert config["data"]["path"] == str(photos.resolve())
    assert config["data"]["test_fraction"] == 0.25
    assert (config["base"], config["increment"], config["seed"], config["order"]) == (4, 2, 5, "natural")
    assert config["memory"] == {"budget": "total", "size": 60, "selection": "random"}
    assert (config["backbone"], config["device"], config["precision"]) == ("resnet10", "cpu", "float32")
    assert config["augmentation"]["pad"] == 2
    assert (settings["train"]["epochs"], settings["train"]["batch_size"], settings["train"]["lr"]) == (7, 9, 0.2)
    assert (settings["finetune"]["epochs"], settings["finetune"]["batch_size"]) == (3, 9)
    assert (settings["variant"], settings["lambda_disc"], settings["importance_samples"]) == ("paper", 1.5, 10)
    assert [stage["num_seen"] for stage in plan["stages"]] == [4, 6]
    assert plan["card"]["Recipe"] == config["recipe"]
    assert sorted(config["recipe"].removeprefix("afc-folder (").removesuffix(")").split(", ")) == [
        *("backbone=resnet10", "base=4", "finetune.batch_size=9", "finetune.epochs=3", "importance_samples=10"),
        *("increment=2", "lambda_disc=1.5", "memory=total=60", "pad=2", "selection=random", "test_fraction=0.25"),
        *("train.batch_size=9", "train.epochs=7", "train.lr=0.2", "variant=paper"),
    ]
    phases = [phase for stage in plan["stages"] for phase in stage["phases"]]
    assert plan["total_steps"] == sum(phase["epochs"] * phase["steps"] for phase in phases)


@pytest.mark.parametrize(
    ("name", "flags", "named", "place"),
    [
        (
            "afc-mini-b10-s5",
            "--base 3 --increment 1",
            " (base=3, increment=1)",
            "afc-mini-b10-s5-base-3-increment-1-order1-seed1",
        ),
        ("afc-mini-b10-s5", "--increment 2 --memory per_class=5", "", "afc-mini-b10-s5-order1-seed1"),
        (
            "afc-mini-b10-s5",
            "--memory per_class=10",
            " (memory=per_class=10)",
            "afc-mini-b10-s5-memory-per_class-10-order1-seed1",
        ),
        (
            "afc-mini-b10-s5",
            "--set memory=per_class=3 --set memory.selection=random",
            " (memory=per_class=3, selection=random)",
            "afc-mini-b10-s5-memory-per_class-3-selection-random-order1-seed1",
        ),
        ("afc-mini-b10-s5", "--order 2 --seed 4 --device cpu --precision float32", "", "afc-mini-b10-s5-order2-seed4"),
        (
            "afc-mini-b10-s5",
            "--set augmentation.flip=False --set settings.train.clip=none",
            " (train.clip=none, flip=false)",
            "afc-mini-b10-s5-train.clip-none-flip-false-order1-seed1",
        ),
        ("afc-folder", "--data photos", "", "afc-folder-order1-seed1"),
        ("afc-mini-b10-s5", "--data photos", " (data.name=folder)", "afc-mini-b10-s5-data.name-folder-order1-seed1"),
    ],
    ids=lambda value: value or "as it is",
)
def test_the_name_of_a_changed_recipe_lists_the_changes(
    name: str, flags: str, named: str, place: str, engram: Engram, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    options = parse(["run", name, *flags.split()])[1]
    config = configure(options, name)
    assert config.recipe == name + named
    assert directory_name(config) == place


def test_runs_of_a_sweep_have_different_names() -> None:
    """Also with negative numbers, and with more changes than fit into a name."""
    flags = {f"--set settings.lambda_disc={value}" for value in ("0.5", "5", "50")}
    flags |= {f"--set settings.train.lr={value}" for value in ("0.1", "0.01")}
    many = "--epochs 3 --finetune-epochs 2 --batch-size 16 --base 4 --increment 2 --lr"
    flags |= {f"{many} {value}" for value in ("0.2", "0.3")}
    places = {
        directory_name(configure(parse(["run", "afc-mini-b10-s5", *text.split()])[1], "afc-mini-b10-s5"))
        for text in flags
    }
    assert len(places) == len(flags)
    assert all(len(place) < 120 and re.fullmatch(r"[\w.-]+", place) for place in places)
    signs = [replace(recipe("afc-mini-b10-s5"), recipe=f"afc-mini-b10-s5 (x={value})") for value in (1, -1)]
    assert directory_name(signs[0]) != directory_name(signs[1])


def test_dry_run_shows_card_and_plan_and_writes_nothing(engram: Engram, tmp_path: Path) -> None:
    outcome = engram("run", "afc-mini-b10-s5", "--dry-run")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    for label, text in Session(recipe("afc-mini-b10-s5"), read_mini()).card().items():
        assert any(line.startswith(label) and text in line for line in lines)
    base = next(line for line in lines if " base " in line)
    assert "2,500" in base
    assert "+" in base, "ten names are shortened"
    assert "nothing was written" in lines[-1]
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_cifar100_needs_no_images(engram: Engram, tmp_path: Path) -> None:
    outcome = engram("run", "afc-cifar100-b50-s10", "--dry-run")
    assert outcome.status == 0, outcome
    assert outcome.err == "engram: cifar100 is not here yet; 'engram prepare cifar100' downloads it\n"
    assert "cifar100: 100 classes, 50000 training and 10000 test images, 32x32" in outcome.out
    assert any(line.split()[:1] == ["base"] and " 25,000 " in line for line in outcome.out.splitlines())
    plan = json.loads(engram("run", "afc-cifar100-b50-s10", "--dry-run", "--json").out)
    assert [(stage["images"], stage["exemplars"]) for stage in plan["stages"][:2]] == [(25_000, 0), (3_500, 1_000)]
    assert sorted(name for stage in plan["stages"] for name in stage["new_classes"]) == list(OFFICIAL_NAMES)
    several = engram("run", "afc-cifar100-b50-s10", "--seeds", "1,2", "--dry-run")
    assert (several.status, several.err) == (0, outcome.err)
    assert list(tmp_path.iterdir()) == []
    assert_refused(engram("run", "afc-cifar100-b50-s10"), "engram prepare cifar100")
    assert_refused(engram("run", "afc-cifar100-b50-s10", "--dry-run", "--data", "nowhere"), "nowhere")


def test_a_second_run_describes_the_first(
    engram: Engram, photos: Path, finished: Path, stopped: Path, tmp_path: Path
) -> None:
    run = ("run", "afc-folder", "--data", photos, "--base", "2", *SMALL)
    assert engram(*run, "--dry-run").err == ""
    place = Path("runs") / directory_name(configure(parse([*map(str, run)])[1], "afc-folder"))
    shutil.copytree(finished, tmp_path / place)
    for orders in ((), ("--orders", "1")):
        said = engram(*run, *orders, "--dry-run").err
        assert said == f"engram: the run in {place} is finished; this one goes to {place}-2\n"
    assert "the same command starts a second one in a new directory; to continue the first, use" in " ".join(
        engram("run", "--help").out.split()
    )
    assert_refused(engram(*run, "--dry-run", "--memory", "total=1"), "a memory of 1")  # and not where it would go
    shutil.copytree(stopped, tmp_path / f"{place}-2")
    said = f"engram: the run in {place}-2 stopped after stage 1 ('engram resume {place}-2' continues it); "
    third = engram(*run)
    assert (third.status, third.err) == (0, f"{said}this one goes to {place}-3\n")
    assert (tmp_path / f"{place}-3" / "result.json").exists()


def test_json_is_one_event_per_line(engram: Engram, photos: Path, tmp_path: Path) -> None:
    outcome = engram("run", "replay-folder", "--data", photos, *SMALL, "--json", "--out", "here")
    events = outcome.events()
    assert events[0]["event"] == "run_started"
    assert sum(event["event"] == "stage_finished" for event in events) == 3
    assert events[-1]["event"] == "run_finished"
    assert events[-1]["result"] == json.loads((tmp_path / "here" / "result.json").read_text())


def test_resume_continues_and_then_has_nothing_to_do(engram: Engram, stopped_copy: Path, finished: Path) -> None:
    outcome = engram("resume", stopped_copy)
    assert outcome.status == 0
    assert outcome.out.startswith("continuing afc-folder (train.epochs=1, ")
    assert "): base and 2 stages" in outcome.out.partition("\n")[0]
    assert "stage 2 of 2: 6 classes" in outcome.out
    assert "stage 1 of 2" not in outcome.out
    assert timeless(stopped_copy) == timeless(finished)
    (stopped_copy / "result.json").write_text('{"stages": [')  # it is written again from the checkpoint
    assert engram("resume", stopped_copy).status == 0
    assert timeless(stopped_copy) == timeless(finished)
    before = contents(stopped_copy)
    again = engram("resume", stopped_copy)
    assert again.status == 0
    assert "finished already" in again.out
    assert json.loads(engram("resume", stopped_copy, "--json").out)["event"] == "run_finished"
    assert contents(stopped_copy) == before


def test_stopping_after_a_stage_prints_how_to_continue(engram: Engram, stopped_copy: Path, photos: Path) -> None:
    outcome = engram("run", "naive-folder", "--data", photos, "--backbone", "resnet10", "--epochs", "1", "--quiet")
    assert outcome.status == 0
    assert outcome.out.count("\n") == 1
    assert outcome.out.startswith("naive-folder (train.epochs=1, backbone=resnet10): average cnn ")
    outcome = engram("resume", stopped_copy, "--stop-after-stage", "1")
    assert outcome.status == 0
    assert f"stopped after stage 1 of 2; to continue:\nengram resume {stopped_copy}\n" in outcome.out


def test_ctrl_c_saves_and_resume_ends_with_the_same_result(engram: Engram, photos: Path, tmp_path: Path) -> None:
    run = ["run", "afc-folder", "--data", photos, "--base", "2", *SMALL, "--epochs", "6", "--threads", "1", "--json"]
    process = start(*run, "--out", "cut", cwd=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "epoch_finished" and event["stage"] == 1:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "engram: saving... (Ctrl-C again to quit at once)\n"
    assert [json.loads(line)["event"] for line in out.splitlines()][-2:] == ["checkpointed", "stopped"]
    for rest in (["resume", "cut", "--threads", "1"], [*run, "--out", "whole"]):
        done = engram(*rest)
        assert (done.status, done.err) == (0, "")
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


def test_a_second_ctrl_c_reports_whether_something_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.cli.signals.AGAIN_SECONDS", 0)
    before = signal.getsignal(signal.SIGINT)

    def events() -> Iterator[Event]:
        yield RunStarted("afc-folder", "afc", str(tmp_path), 3, {}, False)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    def quit_twice() -> None:
        follow_run(events(), make_console(), Interrupt(announce=False), RunningFlags(quiet=True), tmp_path)

    with pytest.raises(KeyboardInterrupt, match="quit at once; nothing was saved yet"):
        quit_twice()
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(KeyboardInterrupt, match=f"'engram resume {tmp_path}' continues from the last checkpoint"):
        quit_twice()
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_the_program_exits_prints_no_traceback() -> None:
    program = (
        "import atexit, os, signal, time\n"
        "import engram.__main__ as program\n"
        "import engram.cli.main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "engram.cli.main.main = lambda: {}\n"
        "atexit.register(lambda: {})\n"
        "program.program()\n"
    )
    ctrl_c = "(os.kill(os.getpid(), signal.SIGINT), time.sleep(5))"
    for text, status in ((program.format(130, ctrl_c), -signal.SIGINT), (program.format(ctrl_c, None), 130)):
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.stderr, ended.returncode) == ("", status)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    with start("--version", cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


# The other commands.

SHIPPED = [
    *("afc", "bic", "channel", "der", "eeil", "ewc", "gap", "gdumb", "geodl", "gradcam", "gram", "icarl", "joint"),
    *("lwf", "lwm", "mas", "mnemonics", "naive", "pixels", "pod", "podnet", "podnet-dde", "replay", "si", "ssil"),
    *("ucir", "ucir-dde", "uniform", "wa"),
]


def test_list_recipes_methods_datasets_backbones(engram: Engram, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = engram("list", "recipes")
    assert shown.status == 0
    assert shown.out.index("afc-cifar100-b50-s10") < shown.out.index("afc-mini-b10-s5") < shown.out.index("afc-folder")
    names = [row["recipe"] for row in json.loads(engram("list", "recipes", "--json").out)]
    assert all(name in shown.out for name in names)
    monkeypatch.setenv("COLUMNS", "100")
    overview = engram("list").out
    assert overview.count("\n") <= 30, "it fits a screen"
    assert "METHOD-mini-b10-sN: 10 classes, then N = 10 or 5 stages" in overview
    assert "METHOD-folder: half of the classes, then one class a stage" in overview
    rows = json.loads(engram("list", "--json").out)
    unfolded = {
        row["recipes"].replace("METHOD", method).replace("-sN", f"-s{stages}")
        for row in rows
        for method in row["methods"]
        for stages in row["stages"] or [0]
    }
    assert unfolded == set(names)
    methods = {row["method"]: row for row in json.loads(engram("list", "methods", "--json").out)}
    assert methods["afc"]["paper"] == "Kang, Park, Han, CVPR 2022"
    assert methods["naive"]["memory"] == "none"
    assert re.fullmatch(r"\d\d\.\d\d ± \d\.\d\d \(3\)", methods["afc"]["measured"])
    assert all(methods[name]["embedded"] for name in SHIPPED), "each has a result on the embedded images"
    assert "resnet32" in engram("list", "backbones").out
    assert "cifar100" in engram("list", "datasets").out


def test_a_list_can_be_filtered_by_text(engram: Engram, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [row["recipe"] for row in json.loads(engram("list", "recipes", "--json").out)]
    found = [row["recipe"] for row in json.loads(engram("list", "recipes", "iCaRL-cifar100", "--json").out)]
    assert found == [name for name in every if "icarl-cifar100" in name]
    assert found
    shown = engram("list", "recipes", "cifar100").out
    assert "afc-cifar100-b50-s10" in shown
    assert "mini" not in shown
    names = [row["method"] for row in json.loads(engram("list", "methods", "--json").out)]
    assert names == sorted(names)
    assert "podnet" not in engram("list", "methods", "Kang, Park").out
    assert json.loads(engram("list", "methods", "nothing such", "--json").out) == []
    assert_refused(engram("list", "methods", "nothing such"), "'nothing such'", "'engram list methods' has all")
    monkeypatch.setenv("COLUMNS", "90")
    assert max(map(len, engram("list", "methods").out.splitlines()[:-1])) <= 90
    monkeypatch.setenv("COLUMNS", "much")
    assert max(map(len, engram("list", "methods").out.splitlines()[:-1])) > 90


def test_a_narrow_list_of_methods_breaks_no_words(engram: Engram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = engram("list", "methods").out.splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(" ".join(lines).split())
    for row in json.loads(engram("list", "methods", "--json").out):
        assert f"{row['method']}: {row['title']}" in words
        assert row["paper"] is None or row["paper"] in words


def test_list_runs_shows_damaged_ones_too(engram: Engram, stopped: Path, finished: Path, tmp_path: Path) -> None:
    assert "there is no run in runs" in engram("list", "runs").out
    shutil.copytree(finished, tmp_path / "runs" / "a")
    shutil.copytree(stopped, tmp_path / "runs" / "b")
    cut_manifest(Path(shutil.copytree(stopped, tmp_path / "runs" / "c")))
    shutil.copytree(finished, tmp_path / "runs" / "demo" / "afc")
    (tmp_path / "runs" / "a file").write_text("")
    rows = {row["directory"]: row for row in json.loads(engram("list", "runs", "--json").out)}
    assert list(rows) == ["runs/a", "runs/b", "runs/c", "runs/demo/afc"]
    result = json.loads((finished / "result.json").read_text())
    assert rows["runs/a"]["average"] == result["average_incremental_accuracy"]["cnn"]
    assert (rows["runs/a"]["stages"], rows["runs/a"]["status"]) == ("3/3", "finished")
    assert (rows["runs/b"]["stages"], rows["runs/b"]["status"]) == ("2/3", "stopped after stage 1")
    assert rows["runs/c"]["status"].startswith("damaged: ")
    shown = engram("list", "runs")
    assert shown.status == 0
    assert "stopped after stage 1" in shown.out
    words = " ".join(shown.out.split())
    assert "runs/b afc-folder (train.epochs=1, " in words
    assert "backbone=resnet10), order 1, seed 1, 2/3 stages, stopped after stage 1, average " in words
    shutil.rmtree(tmp_path / "runs" / "c")
    for run in ("a", "b", "demo/afc"):
        edit_json(tmp_path / "runs" / run / "run.json", recipe="afc-folder")
        told = tmp_path / "runs" / run / "result.json"
        told.write_text(json.dumps(json.loads(told.read_text()) | {"recipe": "afc-folder"}))
    assert any(
        line.split()[:5] == ["runs/b", "afc-folder", "1", "1", "2/3"]
        for line in engram("list", "runs").out.splitlines()
    )


def test_report_takes_runs_and_their_parents(engram: Engram, finished: Path, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "both" / "a")
    shutil.copytree(stopped, tmp_path / "both" / "b")
    (tmp_path / "empty").mkdir()
    assert_refused(engram("report", "empty"), "empty", "run.json")
    outcome = engram("report", "both", "--out", "page.html")
    repeat = "engram: left out both/b: both/a has the same configuration, class order and seed\n"
    assert (outcome.status, outcome.err) == (0, repeat), "the same run, stopped early"
    assert Path(outcome.out.strip()).resolve() == (tmp_path / "page.html").resolve()
    assert (tmp_path / "page.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")


# A run whose report has few figures.
PLAIN: dict[str, Any] = {"epochs": 1, "predictors": ("cnn",), "importance": False}


def test_report_on_a_pattern_skips_the_files_of_the_last_report(engram: Engram, tmp_path: Path) -> None:
    for method in ("afc", "naive"):
        fake_run(tmp_path / "runs" / method, method=method, stage_sizes=(3, 2), images_per_class=5, **PLAIN)
    first = engram("report", *sorted((tmp_path / "runs").iterdir()))
    assert (first.status, first.err) == (0, "")
    page = (tmp_path / "runs" / "report.html").read_bytes()
    assert len(list((tmp_path / "runs").iterdir())) == 4
    again = engram("report", *sorted((tmp_path / "runs").iterdir()))
    assert (again.status, again.out, again.err) == (0, first.out, "")
    assert (tmp_path / "runs" / "report.html").read_bytes() == page
    assert_refused(engram("report", tmp_path / "runs" / "report.html"), "no run directory at", "report.html")
    assert_refused(engram("report", tmp_path / "runs" / "report_files"), "not a run directory", "report_files")
    assert_refused(engram("report", *[tmp_path / "runs" / f"report{end}" for end in (".html", "_files")]), "report")
    assert_refused(engram("report", tmp_path / "runs" / "afc", "nowhere"), "no run directory at nowhere")
    assert_refused(engram("report", *[tmp_path / "runs" / "afc"] * 2), "given twice")


def test_report_names_directories_that_it_leaves_out(engram: Engram, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        fake_run(tmp_path / f"runs/{seed}", seed=seed, stage_sizes=(3, 2), images_per_class=5, **PLAIN)
    (tmp_path / "runs/2/result.json").unlink()
    (tmp_path / "runs/base").mkdir()
    outcome = engram("report", "runs/1", "runs/2", "runs/3", "runs/base")
    assert outcome.status == 0
    assert outcome.err == (
        "engram: left out runs/base: it is not a run directory and contains none\n"
        "engram: left out runs/2: it has no finished stage yet\n"
    )
    inside = engram("report", "runs")
    assert inside.status == 0
    assert (tmp_path / inside.out.strip()).samefile(outcome.out.strip())
    assert inside.err == "engram: left out runs/2: it has no finished stage yet\n"
    rows = (tmp_path / "runs/report_files/runs.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert {row.split(",")[3] for row in rows} == {"1", "3"}
    assert_refused(engram("report", "runs/2"), "runs/2", "no finished stage yet")


def test_report_on_the_runs_folder_finds_those_of_a_demo(engram: Engram, tmp_path: Path) -> None:
    for method in ("replay", "afc"):
        fake_run(tmp_path / "runs/demo" / method, method=method, stage_sizes=(3, 2), images_per_class=5, **PLAIN)
    outcome = engram("report", "runs")
    assert (outcome.status, outcome.out) == (0, "runs/report.html\n")
    rows = (tmp_path / "runs/report_files/runs.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert len(rows) >= 2


def test_doctor_finds_no_problem_here(engram: Engram, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = engram("doctor")
    assert outcome.status == 0
    assert "checksums match" in outcome.out
    assert "warning cifar100" in outcome.out
    assert "engram prepare cifar100" in outcome.out
    findings = {finding["what"]: finding for finding in json.loads(engram("doctor", "--json").out)}
    assert findings["torch"]["status"] == "ok"
    assert all(finding["status"] in ("ok", "warning") for finding in findings.values())


@pytest.mark.parametrize(
    ("bf16", "capability", "said"),
    [
        (True, (9, 0), "with bf16"),
        (True, (7, 9), "and slower: they are for GPUs of compute capability 8.0 and later"),
        (False, (7, 5), "without bf16"),
    ],
)
def test_doctor_describes_the_gpu(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, capability: tuple[int, int], said: str
) -> None:
    properties = SimpleNamespace(name="a GPU", total_memory=16e9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr("engram.kernels.availability._capability", lambda device: capability)
    monkeypatch.setattr("engram.kernels.availability._has_triton", lambda: True)
    finding = check_torch()
    assert finding.status == ("ok" if bf16 else "warning")
    assert finding.found.endswith(said)


def test_doctor_reports_what_is_broken(engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "data"
    home.mkdir()
    (home / "cifar-100-python.tar.gz").write_bytes(b"not an archive")
    monkeypatch.setenv("ENGRAM_DATA", str(home))
    monkeypatch.setattr("PIL.features.check", lambda feature: False)
    outcome = engram("doctor")
    assert outcome.status == 1
    assert "problem cifar100" in outcome.out
    assert "problem images" in outcome.out


def test_doctor_reports_a_torch_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.99: no such file')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "engram", "doctor"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "problem torch" in done.stdout
    assert "libcudart.so.99" in done.stdout


def test_commands_that_need_no_torch_do_not_load_it(tmp_path: Path) -> None:
    code = "import sys, engram.cli.commands.{0}; assert 'torch' not in sys.modules"
    for name in ("write_pages", "setup"):
        subprocess.run([sys.executable, "-c", code.format(name)], cwd=tmp_path, check=True)


def test_prepare_downloads_checks_and_prints_the_path(
    engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    store = ImageStore.from_arrays(rng.integers(0, 255, (8, 8, 8, 3), dtype=np.uint8), np.arange(8) % 2)

    def fetch(folder: Path, report: Callable[[int, int | None], None]) -> Path:
        report(5_000_000, 10_000_000)
        return folder / "archive"

    monkeypatch.setattr("engram.data.sources.download.fetch_cifar100", fetch)
    monkeypatch.setattr("engram.data.sources.cifar.read_cifar100", lambda path: store)
    monkeypatch.setattr("engram.cli.commands.setup.PLAIN_SECONDS", 0)
    outcome = engram("prepare", "cifar100", "--out", tmp_path / "there")
    assert outcome.status == 0
    assert "cifar100: 5 MB (50%)" in outcome.out
    assert f"{tmp_path / 'there' / 'archive'}: 2 classes, 6 training and 2 test images" in outcome.out
    assert f"ENGRAM_DATA to {tmp_path / 'there'}" in outcome.out


def test_demo_compares_four_methods_and_writes_the_report(
    engram: Engram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quick(name: str) -> Any:
        return recipe(name).with_settings(train__epochs=1, finetune__epochs=1)

    whole = read_mini()
    parts = ((part.images[::50, ::2, ::2], part.class_ids[::50]) for part in (whole.train, whole.test))
    few = ImageStore.from_arrays(*chain(*parts), class_names=whole.class_names, name="mini")
    monkeypatch.setattr("engram.cli.commands.demo.load_store", lambda data: few)
    monkeypatch.setattr("engram.cli.commands.demo.recipe", quick)
    monkeypatch.setattr("engram.cli.commands.demo.FINETUNE_EPOCHS", 2)
    outcome = engram("demo", "--seed", "3")
    assert (outcome.status, outcome.err) == (0, "")
    results = {
        method: json.loads((tmp_path / "runs/demo" / method / "result.json").read_text()) for method in DEMO_METHODS
    }
    assert {(result["seed"], result["order"]) for result in results.values()} == {(3, 3)}
    tuned = [method for method, result in results.items() if "finetune.epochs=2" in result["recipe"]]
    assert tuned == ["replay", "afc"], "those with a memory"
    last = [f"{results[method]['final_accuracy']['cnn']:.1f}" for method in DEMO_METHODS]
    assert any(line.split() == ["5", "20", *last] for line in outcome.out.splitlines())
    average = {method: results[method]["average_incremental_accuracy"]["cnn"] for method in DEMO_METHODS}
    gap = round(average["bedrock"], 1) - round(average["afc"], 1)
    claim = "are level" if abs(gap) < 0.5 else f"{abs(gap):.1f} points {'ahead of' if gap > 0 else 'behind'} afc"
    assert claim in outcome.out
    assert f"keeps {recipe('afc-mini-b10-s5').memory.size} images of each old class" in outcome.out
    assert outcome.out.rstrip().endswith("report: runs/demo/report.html")
    assert (tmp_path / "runs/demo/report.html").stat().st_size > 10_000
    monkeypatch.setattr("engram.cli.commands.demo._run_all", lambda *given: 130)
    assert engram("demo").err == "engram: the demo in runs/demo is finished; this one goes to runs/demo-2\n"
    (tmp_path / "runs/demo/report.html").unlink()
    assert "the demo in runs/demo was stopped; " in engram("demo").err


@pytest.mark.parametrize("name", ["models", "model_changes", "runs"])
def test_descriptions_of_options_are_on_one_line_of_the_source(name: str) -> None:
    """tyro would keep the line breaks of others; they are an `arg(help=...)`."""
    module = ast.parse(Path(cli_options.__path__[0], f"{name}.py").read_text())
    classes = [each for each in module.body if isinstance(each, ast.ClassDef)]
    assert classes
    for field, text in chain.from_iterable(pairwise(each.body) for each in classes):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert text.lineno == text.end_lineno, ast.unparse(field.target)
