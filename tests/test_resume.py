"""A run that is killed and resumed ends with exactly the numbers of one that never was."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from conftest import make_config, make_store
from engram import EngramError, resume, run
from engram.core.checkpoint import Checkpoint, load_checkpoint, read_data, save_checkpoint
from engram.core.events import RunFinished, Stopped, Warned
from engram.core.io import TEMPORARY, lock, remove_temporaries, write_bytes
from engram.engine.loop import PhaseLoop
from engram.engine.loss_history import Epoch
from engram.experiment.members import progress_of
from engram.experiment.runner import settle
from engram.runs import directory as rundir
from engram.runs.directory import RunDirectory
from engram.runs.reader import config_hash, read_manifest, read_progress
from helpers import timeless

# Before any checkpoint; in the base stage, a later main phase, its balanced phase; between stages. A run of which less
# progress is told has only 59 events.
KILLED_AT = (1, 13, 31, 47, 52)
# Runs that checkpoint after every step. Each of the first is killed without warning at its event; the last goes on.
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from conftest import make_config, make_store
from engram import run
def follow(last):
    for number, _ in enumerate(run(make_config(), make_store(), f"{root}/{{last}}", checkpoint_minutes=0)):
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
for event in {events}:
    child = os.fork()
    if not child:
        follow(event)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
follow(-1)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, by the event at which each was killed; that of -1 was killed from outside."""
    root = tmp_path_factory.mktemp("killed")
    code = SCRIPT.format(tests=str(Path(__file__).parent), root=root, events=KILLED_AT)
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while not (root / "-1" / "checkpoint" / "state.safetensors").exists() and time.monotonic() < deadline:
        assert process.poll() is None, "a run was not killed, or failed"
        time.sleep(0.01)
    time.sleep(random.random())
    process.kill()
    process.wait()
    return root


def finish(directory: Path) -> dict[str, Any]:
    """The result of resuming, without its times."""
    for _ in resume(directory, make_store()):
        pass
    return timeless(directory)


def epochs(directory: Path) -> list[tuple[Any, ...]]:
    """The epochs that were logged, in their order, without their times."""
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    told = [line for line in lines if line["event"] == "epoch_finished"]
    return [(line["stage"], line["phase"], line["epoch"], line["lr"], tuple(line["terms"].items())) for line in told]


def stop_after(steps: int) -> Callable[[], bool]:
    """Asks a run to stop after so many steps."""
    counter = itertools.count(1)
    return lambda: next(counter) == steps


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "whole"
    for _ in run(make_config(), make_store(), directory):
        pass
    return directory


@pytest.fixture(scope="module")
def stopped_early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, stopped after its base stage; tests copy it."""
    directory = tmp_path_factory.mktemp("runs") / "stopped"
    list(run(make_config(), make_store(), directory, stop_after_stage=0))
    return directory


@pytest.mark.parametrize("event", KILLED_AT)
def test_killed_run_resumes_to_the_same_result(event: int, killed: Path, uninterrupted: Path) -> None:
    directory = killed / str(event)
    assert not (directory / "result.json").exists() or len(timeless(directory)["stages"]) < 3
    assert finish(directory) == timeless(uninterrupted)
    assert list(dict.fromkeys(epochs(directory))) == epochs(uninterrupted)  # some twice, and then alike
    for stage in ("000", "001", "002"):
        theirs = (uninterrupted / "stages" / f"{stage}.safetensors").read_bytes()
        assert (directory / "stages" / f"{stage}.safetensors").read_bytes() == theirs


def test_run_killed_from_outside_at_a_random_moment(killed: Path, uninterrupted: Path) -> None:
    assert finish(killed / "-1") == timeless(uninterrupted)


@pytest.mark.parametrize("steps", [3, 8, 13, 19])  # in the middle of an epoch, at its end, in the balanced phase
def test_the_epoch_it_was_stopped_in_is_logged_whole(steps: int, tmp_path: Path, uninterrupted: Path) -> None:
    directory = tmp_path / "run"
    assert isinstance(list(run(make_config(), make_store(), directory, stop=stop_after(steps)))[-1], Stopped)
    assert isinstance(list(resume(directory, make_store(), stop=stop_after(2)))[-1], Stopped)
    assert finish(directory) == timeless(uninterrupted)
    assert epochs(directory) == epochs(uninterrupted)


def test_a_checkpoint_without_the_terms_of_its_epoch_resumes(tmp_path: Path, uninterrupted: Path) -> None:
    directory = tmp_path / "run"
    list(run(make_config(), make_store(), directory, stop=stop_after(3)))
    path = directory / "checkpoint" / "state.safetensors"
    state = load_checkpoint(path)
    tensors = {name: value for name, value in state.tensors.items() if name != "phase.terms"}
    assert len(tensors) == len(state.tensors) - 1
    save_checkpoint(path, Checkpoint(tensors, state.data))
    assert finish(directory) == timeless(uninterrupted)
    assert [epoch[:4] for epoch in epochs(directory)] == [epoch[:4] for epoch in epochs(uninterrupted)]


def test_an_epoch_that_the_device_is_behind_with_is_logged_before_a_checkpoint(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = PhaseLoop.finished

    def behind(loop: PhaseLoop, wait: bool = False) -> Iterator[Epoch]:
        return finished(loop, wait) if wait else iter(())

    monkeypatch.setattr(PhaseLoop, "finished", behind)
    directory = tmp_path / "run"
    list(run(make_config(), make_store(), directory, stop=stop_after(10)))
    assert finish(directory) == timeless(uninterrupted)
    assert epochs(directory) == epochs(uninterrupted)


def test_resuming_a_finished_run_changes_nothing(uninterrupted: Path) -> None:
    before = timeless(uninterrupted)
    events = list(resume(uninterrupted, make_store()))
    assert isinstance(events[-1], RunFinished)
    assert len(events) == 2
    assert timeless(uninterrupted) == before


@pytest.mark.parametrize("content", ["", '{"stages": [', "[]", '{"stages": 3}'])
def test_a_damaged_result_is_written_anew_from_the_checkpoint(
    uninterrupted: Path, tmp_path: Path, content: str
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted, directory)
    (directory / "result.json").write_text(content)
    assert read_progress(directory, read_manifest(directory)).finished == 0
    assert progress_of(directory, settle(make_config(), make_store()), make_store().fingerprint()).state == "incomplete"
    assert finish(directory) == timeless(uninterrupted)
    assert progress_of(directory, settle(make_config(), make_store()), make_store().fingerprint()).state == "done"


@pytest.mark.parametrize("key", ["average_incremental_accuracy", "final_accuracy", "forgetting", "seconds", "recipe"])
def test_so_is_a_result_that_lacks_something(uninterrupted: Path, tmp_path: Path, key: str) -> None:
    result = json.loads((uninterrupted / "result.json").read_text())
    empty = {} if isinstance(result[key], dict) else None
    directory = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    for damaged in ({name: value for name, value in result.items() if name != key}, result | {key: empty}):
        (directory / "result.json").write_text(json.dumps(damaged))
        assert read_progress(directory, read_manifest(directory)).finished == 0
    assert finish(directory) == timeless(uninterrupted)


def test_stop_after_stage_then_resume(tmp_path: Path, uninterrupted: Path) -> None:
    directory = tmp_path / "run"
    events = list(run(make_config(), make_store(), directory, stop_after_stage=1))
    assert isinstance(events[-1], Stopped)
    assert len(timeless(directory)["stages"]) == 2
    assert finish(directory) == timeless(uninterrupted)


def test_event_cut_off_by_a_kill_does_not_spoil_the_next(stopped_early: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stopped_early, tmp_path / "run"))
    path = directory / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    finish(directory)
    lines = path.read_text().splitlines()
    broken = [line for line in lines if not line.endswith("}")]
    assert len(broken) == 1
    assert json.loads(lines[lines.index(broken[0]) + 1])["event"] == "run_started"


def test_what_a_kill_left_half_written_is_removed(stopped_early: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stopped_early, tmp_path / "run"))
    litter = directory / "checkpoint" / ".state.safetensors.abc.part"
    litter.write_bytes(b"half")
    finish(directory)
    assert not litter.exists()


def test_later_version_with_more_settings_still_resumes(
    stopped_early: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    """A run saved before a setting existed lacks it; its configuration was not tampered with."""
    directory = Path(shutil.copytree(stopped_early, tmp_path / "run"))
    path = directory / "run.json"
    manifest = json.loads(path.read_text())
    assert manifest["config"]["settings"].pop("exemplars_only") is False
    manifest["config_hash"] = config_hash(manifest["config"])
    path.write_text(json.dumps(manifest))
    state = load_checkpoint(directory / "checkpoint" / "state.safetensors")
    data = {**state.data, "config_hash": manifest["config_hash"]}
    save_checkpoint(directory / "checkpoint" / "state.safetensors", Checkpoint(state.tensors, data))
    assert finish(directory) == timeless(uninterrupted)


class TestRefusals:
    @pytest.fixture
    def stopped(self, stopped_early: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(stopped_early, tmp_path / "stopped"))

    def refused(self, directory: Path, match: str) -> None:
        kept = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        with pytest.raises(EngramError, match=match):
            list(resume(directory, make_store()))
        assert {path: path.read_bytes() for path in kept} == kept

    def edit_manifest(self, directory: Path, **changes: Any) -> None:
        path = directory / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def test_no_such_directory(self, tmp_path: Path) -> None:
        with pytest.raises(EngramError, match="no run directory"):
            list(resume(tmp_path / "nothing"))

    def test_not_a_run_directory(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "no run.json")

    def test_another_version(self, stopped: Path) -> None:
        self.edit_manifest(stopped, format=99, engram="7.0.0")
        self.refused(stopped, r"engram 7\.0\.0 in format 99")

    def test_another_recipe(self, stopped: Path) -> None:
        other = make_config("replay")
        self.edit_manifest(stopped, config=other.to_plain(), config_hash=other.fingerprint())
        self.refused(stopped, "belongs to another configuration")

    def test_changed_configuration(self, stopped: Path) -> None:
        self.edit_manifest(stopped, config=make_config(seed=7).to_plain())
        self.refused(stopped, "was changed after the run began")

    @pytest.mark.parametrize(
        ("key", "value"),
        [("config", []), ("config_hash", 7), ("order", "1"), ("stage_sizes", None), ("stage_sizes", 3), ("data", None)],
    )
    def test_manifest_of_another_form(self, stopped: Path, key: str, value: Any) -> None:
        self.edit_manifest(stopped, **{key: value})
        self.refused(stopped, rf"stopped/run\.json cannot be used: {key} should be ")

    def test_images_without_a_fingerprint(self, stopped: Path) -> None:
        data = json.loads((stopped / "run.json").read_text())["data"]
        self.edit_manifest(stopped, data={**data, "fingerprint": ""})
        self.refused(stopped, "not those that the run")
        del data["fingerprint"]
        self.edit_manifest(stopped, data=data)
        self.refused(stopped, r"run\.json cannot be used: data\.fingerprint is missing")

    def test_half_written_manifest(self, stopped: Path) -> None:
        path = stopped / "run.json"
        path.write_bytes(path.read_bytes()[:100])
        self.refused(stopped, r"run\.json cannot be used: it is half-written or damaged")

    def test_misspelt_setting_in_manifest(self, stopped: Path) -> None:
        plain = make_config().to_plain()
        plain["settings"]["lambda_dics"] = plain["settings"].pop("lambda_disc")
        self.edit_manifest(stopped, config=plain, config_hash=config_hash(plain))
        self.refused(stopped, r"do not fit the method afc any more \(there is no setting 'lambda_dics'\)")

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
    def test_damaged_checkpoint(self, stopped: Path, damage: str) -> None:
        path = stopped / "checkpoint" / "state.safetensors"
        content = bytearray(path.read_bytes())
        if damage == "truncated":
            content = content[: len(content) // 2]
        elif damage == "flipped":
            content[-1000] ^= 1
        elif damage == "empty":
            content = bytearray()
        else:
            content = bytearray(b"not a checkpoint at all" * 100)
        path.write_bytes(bytes(content))
        self.refused(stopped, "is damaged")

    def test_lost_checkpoint(self, stopped: Path) -> None:
        (stopped / "checkpoint" / "state.safetensors").unlink()
        self.refused(stopped, "no checkpoint")

    def test_other_class_order(self, stopped: Path) -> None:
        self.edit_manifest(stopped, order={"name": "1", "class_ids": [0, 1, 2, 3, 4, 5]})
        self.refused(stopped, "class order or the stages")

    def test_other_images(self, stopped: Path) -> None:
        with pytest.raises(EngramError, match="not those that the run"):
            list(resume(stopped, make_store(seed=1)))

    def test_two_writers(self, stopped: Path) -> None:
        first = resume(stopped, make_store())
        next(first)
        with pytest.raises(EngramError, match="another process is writing"):
            list(resume(stopped, make_store()))
        first.close()
        assert isinstance(list(resume(stopped, make_store()))[-1], RunFinished)


def test_another_number_of_cpu_threads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, config = make_store(), make_config("naive")
    list(run(config, store, tmp_path / "run", stop_after_stage=0))
    same = list(resume(tmp_path / "run", store, stop_after_stage=0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    other = list(resume(tmp_path / "run", store, stop_after_stage=1))
    assert not any(isinstance(event, Warned) for event in same)
    (told,) = [event.message for event in other if isinstance(event, Warned)]
    assert "run started with 1 CPU thread and continues with 7" in told
    assert told in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_checkpoint_holds_tensors_whatever_their_layout(tmp_path: Path) -> None:
    whole = torch.arange(6.0).view(2, 3)
    tensors = {"whole": whole, "turned": whole.T, "part": whole[0]}
    save_checkpoint(tmp_path / "state", Checkpoint(tensors, {}))
    loaded = load_checkpoint(tmp_path / "state").tensors
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize(("before", "after"), [(b"[2,3]", b"[3,2]"), (b'"F32"', b'"I32"')])
def test_a_checkpoint_whose_tensors_are_read_otherwise_is_damaged(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "state"
    save_checkpoint(path, Checkpoint({"value": torch.arange(6.0).view(2, 3)}, {}))
    content = path.read_bytes()
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))
    with pytest.raises(EngramError, match="its checksum does not match"):
        load_checkpoint(path)


@pytest.mark.parametrize("key", ["data", "digest"])
@pytest.mark.parametrize("value", [2**63, [], None, {}])
def test_a_checkpoint_with_an_entry_of_the_wrong_type_is_damaged(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "state"
    entry = {"format": 2, "digest": "0" * 32, "data": "{}", key: value}
    path.write_bytes(save({"value": torch.ones(2)}, metadata={"engram": json.dumps(entry)}))
    with pytest.raises(EngramError, match=r"checkpoint .* is damaged \(TypeError\); start the run again"):
        load_checkpoint(path)
    assert read_data(path) == {}


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "state", Checkpoint({"value": torch.ones(2)}, {}))
    content = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(content.replace(b'"format\\": 2', b'"format\\": 3'))
    with pytest.raises(EngramError, match="has format 3, and this version reads format 2; use the version"):
        load_checkpoint(tmp_path / "state")


def test_what_is_half_written_goes_once_it_is_old_enough(tmp_path: Path) -> None:
    for name, age in (("new", 0), ("old", 100)):
        path = tmp_path / f".{name}{TEMPORARY}"
        path.touch()
        written = time.time() - age
        os.utime(path, (written, written))
    remove_temporaries(tmp_path, older_than=50)
    assert [path.name for path in tmp_path.iterdir()] == [f".new{TEMPORARY}"]
    remove_temporaries(tmp_path)
    assert not any(tmp_path.iterdir())


def test_files_can_be_read_by_whoever_may_read_new_ones(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_bytes(tmp_path / "written", b"")
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_directory_that_another_process_took_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock_late(path: Path) -> int | None:
        (path.parent / "run.json").write_text("of another process")
        return lock(path)

    monkeypatch.setattr(rundir, "lock", lock_late)
    with pytest.raises(rundir.RunInUse, match="another process has started a run in"):
        RunDirectory.create(tmp_path / "run", {})
    assert (tmp_path / "run" / "run.json").read_text() == "of another process"
    handle = lock(tmp_path / "run" / rundir.LOCK)
    assert handle is not None, "it let go of it"
    with pytest.raises(rundir.RunInUse, match="another process is writing"):
        RunDirectory.create(tmp_path / "run", {})
    os.close(handle)
