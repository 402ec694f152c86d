"""Several runs side by side: each comes to what it comes to alone, whatever happens to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import conftest
from engram import EngramError, ImageStore, RunConfig, run, run_together
from engram.core.checkpoint import read_data
from engram.core.events import (
    BaseAwaited,
    BaseReused,
    EpochFinished,
    Event,
    RunBusy,
    RunFailed,
    RunFinished,
    RunSkipped,
    StageFinished,
    Stopped,
    Warned,
)
from engram.experiment.base_cache import StageCache, user_cache
from engram.experiment.parallel import Member, Workers, fast_switching, plan_members
from engram.experiment.run_config import directory_name
from engram.experiment.runner import resume
from engram.methods.blocks.lsc import LSCMethod
from engram.runs.directory import CHECKPOINT, RunDirectory
from helpers import timeless


def make_store(seed: int = 0) -> ImageStore:
    return conftest.make_store(train=8, seed=seed)


def make_config(method: str = "afc", **changes: object) -> RunConfig:
    return conftest.make_config(method, **{"settings__train__epochs": 2, **changes})


def configs() -> dict[str, RunConfig]:
    """Three runs: two methods with the same base stage, and one with another seed."""
    return {"afc": make_config("afc"), "replay": make_config("replay"), "other": make_config("afc", seed=2)}


def outcome(directory: Path) -> tuple[dict[str, Any], list[bytes]]:
    """All that a run came to, but for times."""
    return timeless(directory), [path.read_bytes() for path in sorted((directory / "stages").iterdir())]


def of(events: list[tuple[str, Event]], run: str) -> list[Event]:
    return [event for name, event in events if name == run]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same three runs, one after the other, each by itself."""
    parent = tmp_path_factory.mktemp("alone")
    for name, config in configs().items():
        list(run(config, make_store(), parent / name))
    return parent


@pytest.fixture
def two_threads() -> Iterator[None]:
    """More than one thread in a step, so that their number shows in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shared", [True, False], ids=["cache", "no cache"])
def test_runs_side_by_side_are_those_alone(shared: bool, alone: Path, tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "cache") if shared else None
    events = list(run_together(configs(), make_store(), tmp_path / "runs", at_once=3, cache=cache))
    for name in configs():
        assert isinstance(of(events, name)[-1], RunFinished)
        assert outcome(tmp_path / "runs" / name) == outcome(alone / name)
    begun = [next(i for i, (name, _) in enumerate(events) if name == run) for run in configs()]
    ended = [
        next(i for i, (name, e) in enumerate(events) if name == run and e.name == "run_finished") for run in configs()
    ]
    assert max(begun) < min(ended), "they overlap"


def test_number_of_cpu_threads_is_the_callers(two_threads: None, tmp_path: Path) -> None:
    named = {name: make_config("naive", seed=seed, settings__train__epochs=1) for name, seed in (("a", 1), ("b", 2))}
    list(run(named["a"], make_store(), tmp_path / "alone"))
    list(run_together(named, make_store(), tmp_path / "runs", at_once=2))
    for name in ("a", "b"):
        assert json.loads((tmp_path / "runs" / name / "run.json").read_text())["hardware"]["threads"] == 2
    assert outcome(tmp_path / "runs" / "a") == outcome(tmp_path / "alone")
    assert torch.get_num_threads() == 2


def test_each_runs_events_are_in_order_and_in_its_file(tmp_path: Path) -> None:
    events = list(run_together(configs(), make_store(), tmp_path, at_once=3))
    for name in configs():
        lines = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        logged = [event.name for event in of(events, name) if event.name not in ("progress", "working")]
        assert [line["event"] for line in lines] == logged


def test_never_more_than_at_once_and_one_on_a_cpu(tmp_path: Path) -> None:
    members = plan_members(configs(), make_store(), tmp_path)
    assert Workers(members).at_once == 1
    for at_once in (1, 2):
        active: set[str] = set()
        most = 0
        for name, event in run_together(configs(), make_store(), at_once=at_once):
            active.add(name)
            most = max(most, len(active))
            if isinstance(event, RunFinished):
                active.remove(name)
        assert most == at_once


def test_longest_first_but_one_of_each_base_stage(tmp_path: Path) -> None:
    named = {
        "short": make_config("naive", seed=2),
        "afc": make_config("afc"),
        "replay": make_config("replay"),
    }
    cache = StageCache(tmp_path / "cache")
    order = list(dict.fromkeys(name for name, _ in run_together(named, make_store(), at_once=1, cache=cache)))
    assert order == ["afc", "replay", "short"], "the base stage of afc is done when replay begins"
    started: list[str] = []
    events = run_together(named, make_store(), at_once=2, cache=StageCache(tmp_path / "other"))
    for name, event in events:
        if event.name == "run_started":
            started.append(name)
    assert set(started[:2]) == {"afc", "short"}, "replay would have to wait for the base stage of afc"


# What is done, incomplete, or something else.


def test_the_same_again_skips_what_is_done_and_goes_on_with_the_rest(alone: Path, tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    list(run(configs()["replay"], make_store(), parent / "replay"))
    stopping = threading.Event()
    for _, event in run_together(configs(), make_store(), parent, at_once=1, stop=stopping.is_set):
        if isinstance(event, StageFinished):
            stopping.set()
    members = plan_members(configs(), make_store(), parent)
    states = {member.name: member.progress.state for member in members}
    assert states == {"afc": "incomplete", "replay": "done", "other": "new"}
    assert 0 < members[0].progress.finished < 3
    assert members[0].work < members[2].work == members[2].total_work
    assert members[1].work == members[1].steps == 0
    second = list(run_together(configs(), make_store(), parent, at_once=2))
    for name in configs():
        done = states[name] == "done"
        assert isinstance(of(second, name)[-1], RunSkipped if done else RunFinished)
        assert outcome(parent / name) == outcome(alone / name)
    third = list(run_together(configs(), make_store(), parent))
    assert [event.name for _, event in third] == ["run_skipped"] * 3
    results = {name: event.result for name, event in third if isinstance(event, RunSkipped)}
    assert results == {name: json.loads((parent / name / "result.json").read_text()) for name in configs()}


@pytest.mark.parametrize("steps", [1, 3])
def test_what_was_trained_of_a_stage_is_not_left(steps: int, tmp_path: Path) -> None:
    """A checkpoint inside the base stage counts to the step."""
    (whole,) = plan_members({"afc": configs()["afc"]}, make_store(), tmp_path)
    asked = iter(range(steps))
    list(run(configs()["afc"], make_store(), tmp_path / "afc", stop=lambda: next(asked) == steps - 1))
    (left,) = plan_members({"afc": configs()["afc"]}, make_store(), tmp_path)
    assert (left.progress.state, left.progress.finished) == ("incomplete", 0)
    assert left.steps == whole.steps - steps
    assert 0 < whole.work - left.work < whole.base_work
    assert left.doing is not None
    assert left.doing.startswith("main, epoch ")


@pytest.mark.parametrize(
    "change",
    [
        {"phase": {}},
        {"phase": 3},
        {"phase": {"number": 99, "epoch": 0, "step": 1}},
        {"phase": {"number": -1, "epoch": 0, "step": 1}},
        {"phase": {"number": 0, "epoch": 99, "step": 1}},
        {"records": None},
    ],
    ids=str,
)
def test_a_place_that_is_none_in_the_plan_counts_as_none(change: dict[str, object], tmp_path: Path) -> None:
    (whole,) = plan_members({"afc": configs()["afc"]}, make_store(), tmp_path)
    asked = iter(range(2))
    list(run(configs()["afc"], make_store(), tmp_path / "afc", stop=lambda: next(asked) == 1))
    file = tmp_path / "afc" / CHECKPOINT
    with safe_open(str(file), framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
    save_file(tensors, file, {"engram": json.dumps(read_data(file) | change)})
    (left,) = plan_members({"afc": configs()["afc"]}, make_store(), tmp_path)
    assert (left.progress.state, left.doing, left.steps, left.work) == ("incomplete", None, whole.steps, whole.work)


def test_what_is_in_the_way_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def refused(match: str, named: dict[str, RunConfig] | list[RunConfig], parent: Path = tmp_path) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(EngramError, match=match) as caught:
            list(run_together(named, make_store(), parent))
        assert "\n" not in str(caught.value)
        assert sorted(tmp_path.rglob("*")) == before

    list(run(make_config(seed=5), make_store(), tmp_path / "other", stop_after_stage=0))
    refused(r"other holds a run with other settings \(seed is 5 there and 2 here\)", configs())
    list(run(make_config(), make_store(seed=1), tmp_path / "replay", stop_after_stage=0))
    refused("replay holds a run of other images", {"a": make_config(), "replay": make_config()})
    (tmp_path / "stuff").mkdir()
    (tmp_path / "stuff" / "mine.txt").write_text("mine")
    refused("stuff holds something that is not a run", {"a": make_config(), "stuff": make_config()})
    (tmp_path / "file").write_text("mine")
    refused("no run directory at .*file", {"a": make_config(), "file": make_config()})
    refused("file is a file", configs(), tmp_path / "file")
    refused("other is itself a run", configs(), tmp_path / "other")
    refused("two of the runs are named custom-order1-seed1 and are the same", [make_config(), make_config()])
    refused("and differ in settings", [make_config(), make_config(base=3)])
    refused("no run to do", {})
    for name in ("", "a/b", "..", ".lock"):
        refused("cannot be the name of a run", {name: make_config()})
    refused("1 to 6 classes", {"a": make_config(), "b": make_config(base=7)})
    with pytest.raises(EngramError, match="runs at a time must be at least 1"):
        list(run_together(configs(), make_store(), tmp_path / "new", at_once=0))
    with pytest.raises(EngramError, match="runs at a time must be at most 30, got 31"):
        list(run_together(configs(), make_store(), tmp_path / "new", at_once=31))


def test_names_are_made_of_recipe_order_and_seed(tmp_path: Path) -> None:
    several = [make_config("naive", seed=seed, order=order) for seed in (1, 2) for order in ("1", "seed:3")]
    members = plan_members(several, make_store(), tmp_path)
    names = ["custom-order1-seed1", "custom-orderseed-3-seed1", "custom-order1-seed2", "custom-orderseed-3-seed2"]
    assert [member.name for member in members] == names == [directory_name(config) for config in several]
    assert [member.directory for member in members] == [tmp_path / name for name in names]
    assert list(tmp_path.iterdir()) == []


def test_litter_of_a_run_killed_at_its_start_is_no_run(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "afc").mkdir()
    (tmp_path / "afc" / ".lock").touch()
    (tmp_path / "afc" / ".run.json.abc.part").write_text("half")
    list(run_together({"afc": make_config("afc")}, make_store(), tmp_path))
    assert outcome(tmp_path / "afc") == outcome(alone / "afc")
    assert not (tmp_path / "afc" / ".run.json.abc.part").exists()


# When things go wrong.


def test_a_failing_run_leaves_the_others_alone(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LSCMethod.grow

    def grow(self: LSCMethod, learner: Any, stage: Any, engine: Any) -> None:
        if learner.seed == 2 and stage.index == 1:
            raise ZeroDivisionError("of\nall things")
        original(self, learner, stage, engine)

    monkeypatch.setattr(LSCMethod, "grow", grow)
    events = list(run_together(configs(), make_store(), tmp_path, at_once=3))
    failed = of(events, "other")[-1]
    assert isinstance(failed, RunFailed)
    assert failed.unexpected
    assert failed.message.startswith(f"unexpected error: ZeroDivisionError: of all things ({__file__}, line ")
    assert failed.traceback is not None
    assert "in grow" in failed.traceback
    kept = (tmp_path / "other" / "error.txt").read_text()
    assert "in grow" in kept
    assert kept.rstrip().endswith("all things")
    for name in ("afc", "replay"):
        assert outcome(tmp_path / name) == outcome(alone / name)
    monkeypatch.undo()
    list(run_together(configs(), make_store(), tmp_path))
    assert outcome(tmp_path / "other") == outcome(alone / "other")
    assert not (tmp_path / "other" / "error.txt").exists(), "it is of no interest any more"


def test_a_run_that_another_process_does_is_left_to_it(alone: Path, tmp_path: Path) -> None:
    list(run(configs()["afc"], make_store(), tmp_path / "afc", stop_after_stage=0))
    held = RunDirectory.open(tmp_path / "afc", {})
    events = list(run_together(configs(), make_store(), tmp_path, at_once=2))
    assert of(events, "afc") == [RunBusy(str(tmp_path / "afc"))]
    assert not (tmp_path / "afc" / "error.txt").exists()
    for name in ("replay", "other"):
        assert outcome(tmp_path / name) == outcome(alone / name)
    held.close()
    list(run_together(configs(), make_store(), tmp_path))
    assert outcome(tmp_path / "afc") == outcome(alone / "afc")


def test_a_run_that_another_process_did_while_this_one_started_is_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its progress is read before the images and the network are made, and another process may be done by then."""
    named, reads = {"naive": make_config("naive")}, []
    workers = Workers(plan_members(named, make_store(), tmp_path), at_once=1)
    read = Member.read_progress

    def read_first(member: Member) -> Any:
        found = read(member)
        if not reads:
            list(run(named["naive"], make_store(), tmp_path / "naive"))
        reads.append(found.state)
        return found

    monkeypatch.setattr(Member, "read_progress", read_first)
    (event,) = [event for _, event in workers.events()]
    assert isinstance(event, RunSkipped)
    assert reads == ["new", "done"]


def test_runs_are_spread_over_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: which one each run would get."""
    chosen: list[int] = []

    @contextmanager
    def stream(workers: Workers, member: Member) -> Iterator[None]:
        chosen.append(workers._places[member.name])
        yield

    monkeypatch.setattr(Workers, "_stream", stream)
    members = plan_members({str(seed): replace(make_config("naive"), seed=seed) for seed in range(5)}, make_store())
    assert [event for _, event in Workers(members, at_once=4, gpus=(3, 5)).events()]
    assert sorted(chosen[:4]) == [3, 3, 5, 5]
    assert set(chosen) == {3, 5}
    with pytest.raises(EngramError, match="at most 60, got 61"):
        Workers(members, at_once=61, gpus=(3, 5))


def test_what_another_process_did_meanwhile_is_seen(tmp_path: Path) -> None:
    named = {"afc": make_config("afc"), "naive": make_config("naive")}
    workers = Workers(plan_members(named, make_store(), tmp_path), at_once=1)
    list(run(named["naive"], make_store(), tmp_path / "naive"))
    events = list(workers.events())
    assert [event.name for event in of(events, "naive")] == ["run_skipped"]
    assert isinstance(of(events, "afc")[-1], RunFinished)


def test_stop_reaches_every_run_and_nothing_new_is_begun(tmp_path: Path) -> None:
    stopping = threading.Event()
    events: list[tuple[str, Event]] = []
    for name, event in run_together(configs(), make_store(), tmp_path, at_once=2, stop=stopping.is_set):
        events.append((name, event))
        if isinstance(event, StageFinished):
            stopping.set()
    ended = [(name, event) for name, event in events if isinstance(event, Stopped)]
    begun = {name for name, _ in events}
    assert len(begun) == 2
    assert {name for name, _ in ended} == begun
    assert not (tmp_path / (set(configs()) - begun).pop()).exists()


def test_closing_the_generator_has_every_run_save_itself(alone: Path, tmp_path: Path) -> None:
    events = run_together(configs(), make_store(), tmp_path, at_once=3, cache=False)
    while next(events)[1].name != "epoch_finished":
        pass
    before = threading.active_count()
    events.close()
    assert threading.active_count() < before
    for name in configs():
        assert (tmp_path / name / "checkpoint" / "state.safetensors").exists()
    list(run_together(configs(), make_store(), tmp_path))
    for name in configs():
        assert outcome(tmp_path / name) == outcome(alone / name)


# A set of runs that checkpoint after every step, and die without warning at the given event of all of theirs.
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_together import configs, make_store
from engram import run_together
from engram.experiment.base_cache import StageCache
how = dict(at_once=3, checkpoint_minutes=0, cache=StageCache({cache!r}))
events = run_together(configs(), make_store(), {directory!r}, **how)
for number, _ in enumerate(events):
    if number == {event}:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("event", [30, 110])
def test_killed_and_done_again_is_as_never_killed(event: int, alone: Path, tmp_path: Path) -> None:
    cache, tests = StageCache(tmp_path / "cache"), str(Path(__file__).parent)
    code = SCRIPT.format(tests=tests, directory=str(tmp_path / "runs"), cache=str(cache.folder), event=event)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "runs").glob("*/run.json"))) <= 3
    events = list(run_together(configs(), make_store(), tmp_path / "runs", at_once=3, cache=cache))
    assert not any(isinstance(event, RunFailed) for _, event in events)
    for name in configs():
        assert outcome(tmp_path / "runs" / name) == outcome(alone / name)
    assert len(cache.entries()) == 2
    assert not list(cache.folder.glob("*.lock")), "what the kill left is gone"


# The base stage that several share.


def base_epochs(events: list[tuple[str, Event]]) -> set[str]:
    """The runs that trained their base stage."""
    return {name for name, event in events if isinstance(event, EpochFinished) and event.stage == 0}


def test_a_shared_base_stage_is_trained_once(alone: Path, tmp_path: Path) -> None:
    named = {name: make_config(name) for name in ("afc", "replay", "uniform", "naive")}
    cache = StageCache(tmp_path / "cache")
    events = list(run_together(named, make_store(), tmp_path / "runs", at_once=4, cache=cache))
    trained = base_epochs(events)
    assert len(trained) == 1
    others = set(named) - trained
    assert {name for name, event in events if isinstance(event, BaseReused)} == others
    awaited = {name: event.holder for name, event in events if isinstance(event, BaseAwaited)}
    assert awaited
    assert set(awaited) <= others
    assert set(awaited.values()) <= {str(tmp_path / "runs" / name) for name in trained} | {"another run"}
    for name in ("afc", "replay"):
        assert outcome(tmp_path / "runs" / name) == outcome(alone / name)
    assert not list(cache.folder.glob("*.lock"))
    without = list(run_together(named, make_store(), at_once=4, cache=False))
    assert base_epochs(without) == set(named)
    assert not any(isinstance(event, BaseAwaited) for _, event in without)


def test_base_stages_are_shared_as_on_the_command_line_if_nobody_says(tmp_path: Path) -> None:
    named = {name: make_config(name) for name in ("afc", "replay")}
    assert len(base_epochs(list(run_together(named, make_store())))) == 1
    (entry,) = user_cache().entries()
    assert entry.path.is_relative_to(os.environ["ENGRAM_DATA"])
    assert not base_epochs(list(run_together(named, make_store(), tmp_path)))
    assert not base_epochs([("afc", event) for event in run(named["afc"], make_store(), cache=True)])
    assert base_epochs([("afc", event) for event in run(named["afc"], make_store(), cache=False)])
    with pytest.raises(EngramError, match="cache should be True, False or a StageCache, got 'folder'"):
        list(run_together(named, make_store(), cache="folder"))  # pyright: ignore[reportArgumentType]


def test_if_the_trainer_fails_the_next_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LSCMethod.grow
    failed: list[str] = []

    def grow(self: LSCMethod, learner: Any, stage: Any, engine: Any) -> None:
        if stage.index == 0 and not failed:
            failed.append(threading.current_thread().name)
            time.sleep(0.3)  # until the others wait
            raise EngramError("no luck")
        original(self, learner, stage, engine)

    named = {name: make_config(name) for name in ("afc", "replay", "uniform")}
    monkeypatch.setattr(LSCMethod, "grow", grow)
    cache = StageCache(tmp_path / "cache")
    events = list(run_together(named, make_store(), at_once=3, cache=cache))
    assert {name for name, event in events if isinstance(event, RunFailed)} == set(failed)
    assert len(base_epochs(events)) == 1
    assert base_epochs(events).isdisjoint(failed)
    assert sum(isinstance(event, RunFinished) for _, event in events) == 2


def test_a_run_that_waits_stops_when_asked(tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "cache")
    member = plan_members({"afc": make_config()}, make_store(), tmp_path / "runs")[0]
    assert member.base_key is not None
    claim = cache.claim(member.base_key, "runs/somebody")
    assert claim is not None
    stopping = threading.Event()
    workers = Workers([member], cache=cache, stop=stopping.is_set)
    last: Event | None = None
    asked = 0.0
    for _, last in workers.events():
        if isinstance(last, BaseAwaited):
            assert last.holder == "runs/somebody"
            asked = time.monotonic()
            stopping.set()
    assert isinstance(last, Stopped)
    assert time.monotonic() - asked < 1
    claim.close()
    last = list(resume(tmp_path / "runs" / "afc", make_store(), cache=cache))[-1]
    assert isinstance(last, RunFinished)


def test_two_runs_by_turns_in_one_thread_do_not_wait_for_each_other(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    first, second = (run(make_config(method), make_store(), cache=cache) for method in ("afc", "replay"))
    events = [event for pair in zip(first, second, strict=False) for event in pair]
    assert sum(isinstance(event, EpochFinished) and event.stage == 0 for event in events) == 4
    assert not any(isinstance(event, BaseAwaited) for event in events)


def test_a_cache_that_cannot_be_locked_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("engram.core.io.fcntl.flock", flock)
    cache = StageCache(tmp_path / "cache")
    events = list(run(make_config(), make_store(), cache=cache))
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert any(
        "the base stage is trained by this run" in message and "No locks available" in message for message in warnings
    )
    assert isinstance(events[-1], RunFinished)
    assert len(cache.entries()) == 1


def test_one_claim_at_a_time_and_no_lock_files_left(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    first = cache.claim("k", "me")
    assert first is not None
    assert cache.claim("k", "you") is None
    assert cache.holder("k") == "me"
    other = cache.claim("another", "you")
    assert other is not None
    (tmp_path / "dead.lock").write_text("killed long ago")
    cache.save("k", {"x": torch.zeros(3)})
    assert {path.name for path in tmp_path.glob("*.lock")} == {"k.lock", "another.lock"}, "held ones stay"
    first.close()
    again = cache.claim("k", "you")
    assert again is not None
    assert cache.holder("k") == "you"
    again.close()
    other.close()
    assert not list(tmp_path.glob("*.lock"))
    assert cache.holder("k") == "another run"
    assert [entry.key for entry in cache.entries()] == ["k"]


def test_many_threads_after_one_claim(tmp_path: Path) -> None:
    """The file is removed while others are between opening and locking it: still one has it at a time."""
    cache, holders, overlaps, turns = StageCache(tmp_path), [], [], []

    def contend() -> None:
        deadline = time.monotonic() + 20
        for _ in range(30):
            while (claim := cache.claim("k", "me")) is None:
                assert time.monotonic() < deadline
            holders.append(1)
            overlaps.append(len(holders))
            holders.pop()
            turns.append(1)
            claim.close()

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(turns) == 120
    assert set(overlaps) == {1}


@pytest.mark.parametrize("other", ["float32", "bf16"])
def test_tf32_is_not_run_beside_anything_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    named = {name: make_config(device="cuda", precision=name) for name in (other, "tf32")}
    with pytest.raises(EngramError, match=f"tf32 and {other} cannot run at the same time"):
        list(run_together(named, make_store(), tmp_path))
    assert not any(tmp_path.iterdir())


def test_the_last_context_restores_the_switch_interval() -> None:
    before = sys.getswitchinterval()
    first, second = fast_switching(), fast_switching()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() < before
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < before
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_quitting_at_once_leaves_no_run_behind(tmp_path: Path) -> None:
    named = configs()
    events = run_together(named, make_store(), tmp_path, at_once=2)
    next(events)
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    deadline = time.monotonic() + 20
    while any(thread.name in named for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(thread.name in named for thread in threading.enumerate())
    again = [event for _, event in run_together(named, make_store(), tmp_path, at_once=2)]
    assert sum(isinstance(event, RunFinished) for event in again) == len(named)
