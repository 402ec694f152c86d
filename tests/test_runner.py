"""Runs: events in order, the contract of result.json, files, and what happens when things go wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from conftest import make_config, make_store
from engram import EngramError, ImageStore, RunConfig, read_mini, recipe, resume, run, run_together, train
from engram.cli import text
from engram.core import events
from engram.core.events import (
    Checkpointed,
    EpochFinished,
    PhaseStarted,
    Progress,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Warned,
)
from engram.data.sources.load import DataConfig, load_store
from engram.engine import NonFiniteLoss
from engram.experiment.runner import settle
from engram.experiment.session import Session
from engram.methods.lwf import LwM
from engram.reproduce.records import protocol_key
from helpers import learn_stage, tiny_config, tiny_session


def test_result_is_the_contract(config: RunConfig, store: ImageStore, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    returned = train(config, store, directory)
    result = json.loads((directory / "result.json").read_text())
    assert result == returned
    assert list(result) == [
        *("engram", "recipe", "method", "dataset", "order", "seed", "precision", "stages"),
        *(
            "average_incremental_accuracy",
            "final_accuracy",
            "backward_transfer",
            "forgetting",
            "average_task_accuracy",
            "final_task_accuracy",
        ),
        *("seconds", "seconds_by"),
    ]
    assert result["order"] == 1
    assert result["dataset"] == "arrays"
    assert list(result["seconds_by"]) == ["train", "importance", "exemplars", "evaluate"]
    assert [stage["classes"] for stage in result["stages"]] == [2, 4, 6]
    for number, stage in enumerate(result["stages"]):
        assert list(stage) == ["stage", "classes", "accuracy", "seconds", "accuracy_by_stage", "task_accuracy"]
        assert set(stage["accuracy"]) == set(stage["task_accuracy"]) == {"cnn", "nme"}
        # The accuracy over the classes seen is the mean over stages of equal size.
        for predictor, by_stage in stage["accuracy_by_stage"].items():
            assert len(by_stage) == number + 1
            assert np.mean(by_stage) == pytest.approx(stage["accuracy"][predictor])
    matrix = [stage["accuracy_by_stage"]["cnn"] for stage in result["stages"]]
    transfer = ((matrix[2][0] - matrix[0][0]) + (matrix[2][1] - matrix[1][1])) / 2
    assert result["backward_transfer"]["cnn"] == pytest.approx(transfer)
    assert result["seconds"] == pytest.approx(sum(result["seconds_by"].values()))


def test_stage_files_hold_what_the_accuracy_was_computed_from(
    config: RunConfig, store: ImageStore, tmp_path: Path
) -> None:
    result = train(config, store, tmp_path / "run")
    for stage in result["stages"]:
        arrays = load_file(tmp_path / "run" / "stages" / f"{stage['stage']:03d}.safetensors")
        for predictor in ("cnn", "nme"):
            right = arrays["targets"] == arrays[f"predictions.{predictor}"]
            assert 100 * right.mean() == pytest.approx(stage["accuracy"][predictor])
        assert [arrays[f"importance.{i}"].shape for i in range(4)] == [(16,), (32,), (64,), (64,)]
        assert all(arrays[f"importance.{i}"].mean() == pytest.approx(1, rel=1e-4) for i in range(4))


def test_events_tell_the_story_in_order(config: RunConfig, store: ImageStore, tmp_path: Path) -> None:
    events = list(run(config, store, tmp_path / "run"))
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunFinished)
    stages = [event.stage for event in events if isinstance(event, (StageStarted, StageFinished))]
    assert stages == [0, 0, 1, 1, 2, 2]
    epochs = [(e.stage, e.phase, e.epoch) for e in events if isinstance(e, EpochFinished)]
    base = [(0, "main", 1), (0, "main", 2)]
    later = [(s, phase, e) for s in (1, 2) for phase, n in (("main", 2), ("balance", 1)) for e in range(1, n + 1)]
    assert epochs == base + later
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    logged = [event.name for event in events if event.name not in ("progress", "working")]
    assert [line["event"] for line in lines] == logged
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == sorted(done)
    assert all(0 < share <= 1 for share in done)


def test_run_without_a_directory_writes_nothing(
    config: RunConfig, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(config, store)
    assert list(tmp_path.iterdir()) == []


def test_old_runs_are_never_overwritten(config: RunConfig, store: ImageStore, tmp_path: Path) -> None:
    train(config, store, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(EngramError, match=r"already exists and is not empty; .* another directory$") as caught:
        train(config, store, tmp_path / "run")
    assert "--out" not in str(caught.value), "which is the command's, and the command asks before"
    assert {path: path.read_bytes() for path in before} == before


def test_same_seed_same_numbers_other_seed_others(store: ImageStore) -> None:
    def curve(seed: int) -> list[dict[str, list[float]]]:
        return [stage["accuracy_by_stage"] for stage in train(make_config(seed=seed), store)["stages"]]

    once = curve(3)
    assert curve(3) == once
    assert curve(4) != once


def test_non_finite_loss_names_the_place_and_keeps_the_checkpoint(store: ImageStore, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    list(run(make_config(), store, directory, stop_after_stage=0))
    kept = (directory / "checkpoint" / "state.safetensors").read_bytes()

    # The next stage's discrepancy is made infinite by an importance that is.
    from engram.methods import afc

    original = afc.read_importance

    def poisoned(step: afc.Step) -> list[afc.Tensor]:
        return [importance * float("inf") for importance in original(step)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(afc, "read_importance", poisoned)
        with pytest.raises(
            NonFiniteLoss,
            match=r"stage 1, phase main, epoch 1, step 1 of \d+ \(classification = .*discrepancy = (inf|nan)"
            r".* look at how 'discrepancy' is computed \(the logits of classes not yet seen are minus infinity\)",
        ):
            list(resume(directory, store, checkpoint_minutes=0))
    assert (directory / "checkpoint" / "state.safetensors").read_bytes() == kept
    assert isinstance(list(resume(directory, store))[-1], RunFinished)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """The result of a run that nothing went wrong in."""
    return dict(train(make_config(), make_store()))


@pytest.mark.parametrize("writes", [0, 1, 4, 9])
def test_full_disk_loses_nothing(
    writes: int,
    config: RunConfig,
    store: ImageStore,
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After so many files the disk is full; the run says so, and with room again goes on to the same result."""
    directory = tmp_path / "run"
    real, count = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(EngramError, match="the disk is full"):
        list(run(config, store, directory))
    monkeypatch.undo()
    assert not list(directory.rglob(".*.safetensors.*")), "a half-written file was left"
    if writes == 0:
        assert not directory.exists()
        return
    list(resume(directory, store))
    result = json.loads((directory / "result.json").read_text())
    assert result["average_incremental_accuracy"] == whole["average_incremental_accuracy"]


def test_path_that_cannot_be_written(config: RunConfig, store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngramError, match="cannot write"):
        list(run(config, store, tmp_path / "file" / "run"))


def test_stages_smaller_than_a_batch(store: ImageStore) -> None:
    config = make_config(settings__train__batch_size=500, settings__train__remainder="drop")
    assert len(train(config, store)["stages"]) == 3


def test_one_class_base_is_uniform_importance_with_a_warning(store: ImageStore, tmp_path: Path) -> None:
    events = list(run(make_config(base=1, increment=1), store, tmp_path / "run"))
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert len(warnings) == 1
    assert "have importance 0" in warnings[0]
    first = load_file(tmp_path / "run" / "stages" / "000.safetensors")
    assert all((first[f"importance.{i}"] == 1).all() for i in range(4))
    assert isinstance(events[-1], RunFinished)


def test_plan_is_what_then_happens(config: RunConfig, store: ImageStore) -> None:
    plan = Session(config, store).plan()
    events = list(run(config, store))
    started = [event for event in events if isinstance(event, StageStarted)]
    assert [(p.images, p.exemplars, p.num_seen) for p in plan] == [(e.images, e.exemplars, e.num_seen) for e in started]
    planned = [(stage.stage, phase.name, phase.images, phase.steps) for stage in plan for phase in stage.phases]
    assert planned == [(e.stage, e.phase, e.images, e.steps) for e in events if e.name == "phase_started"]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"base": 7}, "1 to 6 classes"),
        ({"base": 0}, "at least 1"),
        ({"increment": 0}, "at least 1"),
        ({"order": "class a,class b"}, "lacks 4 of the 6"),
        ({"order": "0,1,2,3,4,4"}, "more than once"),
        ({"order": "class a,class b,class c,class d,class e,class x"}, "there is no such class"),
        ({"order": "backwards"}, "none of"),
        ({"settings.train.epochs": -1}, "epochs must be at least 0"),
        ({"settings.lambda_dics": 3}, "did you mean 'settings.lambda_disc'"),
        ({"settings.variant": "papers"}, "must be one of released, paper"),
        ({"backbone": "resnet23"}, "did you mean 'resnet32'"),
        ({"method": "acf"}, "did you mean 'afc'"),
        ({"seed": -1}, "seed"),
        ({"seed": "one"}, "whole number"),
        ({"device": "tpu"}, "must be one of auto, cpu, cuda"),
        ({"precision": "bf16"}, "bf16 is for CUDA"),
        ({"settings.train.lr": "nan"}, "should be a number"),
        ({"predictor": "knn"}, "predicts by cnn, nme"),
    ],
)
def test_wrong_configuration_is_refused_in_a_sentence(change: dict[str, object], match: str, store: ImageStore) -> None:
    def attempt() -> None:
        config = make_config()
        for path, value in change.items():
            config = config.with_value(path, value)
        train(config, store)

    with pytest.raises(EngramError, match=match) as caught:
        attempt()
    assert "\n" not in str(caught.value)


def test_images_are_checked_before_anything_is_trained() -> None:
    with pytest.raises(EngramError, match="at least 8 pixels"):
        train(make_config(), make_store(size=4))
    narrow = ImageStore.from_arrays(np.zeros((12, 9, 7, 3), np.uint8), np.arange(12) % 6)
    with pytest.raises(EngramError, match="at least 8 pixels on each side, got 7x9"):
        train(make_config(), narrow)


def test_infinite_importance_stops_the_run(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram.methods.blocks import losses

    def poisoned(loss: torch.Tensor, maps: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.full((part.shape[1],), float("nan")) for part in maps]

    monkeypatch.setattr(losses, "channel_importance", poisoned)
    with pytest.raises(EngramError, match="importance after stage 0 is not finite"):
        train(make_config(), store)


def test_time_of_the_consumer_is_not_the_runs(store: ImageStore) -> None:
    result = None
    for event in run(make_config(), store):
        if isinstance(event, EpochFinished):
            time.sleep(0.2)
        if isinstance(event, RunFinished):
            result = event.result
    assert result is not None
    plain = train(make_config(), store)
    assert result["seconds"] < plain["seconds"] + 1, "8 epochs at 0.2 s would add 1.6 s"


def test_run_json_names_the_device_that_auto_stood_for(store: ImageStore, tmp_path: Path) -> None:
    train(make_config(device="auto", precision="auto"), store, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    config = manifest["config"]
    assert manifest["hardware"]["threads"] == torch.get_num_threads()
    assert (config["device"], config["precision"]) in (("cpu", "float32"), ("cuda", "bf16"))


def test_normalisation_is_that_of_the_base_stage(store: ImageStore) -> None:
    session = Session(make_config(order="natural"), store)
    base = store.train.images[store.train.class_ids < 2] / 255
    mean, std = session.normalisation
    assert mean == pytest.approx(base.mean(axis=(0, 1, 2)))
    assert std == pytest.approx(base.std(axis=(0, 1, 2)))


def test_arrays_do_not_pass_for_the_recipes_images(tmp_path: Path) -> None:
    config = make_config().with_value("data.name", "mini")
    train(config, make_store(), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["data"]["name"] == "arrays"


def test_held_out_images_do_not_pass_for_the_test_split() -> None:
    config, whole = recipe("afc-mini-b10-s5"), read_mini()
    held = settle(config, whole.holdout(0.2, seed=3))
    assert (held.data.name, held.data.holdout) == ("mini", 0.2)
    assert held.recipe == "afc-mini-b10-s5 (holdout=0.2)"
    assert held.fingerprint() != settle(config, whole).fingerprint()
    assert protocol_key(held) != protocol_key(settle(config, whole))
    asked = config.with_value("data.holdout", "0.2")
    assert settle(asked, load_store(asked.data)) == held
    for other, has in ((whole, "none"), (whole.holdout(0.5, seed=0), "0.5")):  # nor the test split for held-out ones
        with pytest.raises(EngramError, match=rf"held-out share of 0\.2, but the images that were given have {has};"):
            settle(asked, other)
    assert settle(config, make_store().holdout(0.2, seed=0)).data == DataConfig("arrays", holdout=0.2)


def test_a_recipe_changed_in_python_says_so_in_its_name(tmp_path: Path) -> None:
    config = recipe("afc-folder").with_settings(train__epochs=0, finetune__epochs=0).with_value("base", 4)
    result = train(config.with_value("backbone", "resnet10").with_value("seed", 2), make_store(), tmp_path / "run")
    assert result["recipe"] == "afc-folder (train.epochs=0, finetune.epochs=0, base=4, backbone=resnet10)"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"] == result["recipe"]
    plain = settle(recipe("afc-mini-b10-s5").with_value("order", "2"), read_mini())
    assert plain.recipe == "afc-mini-b10-s5"
    again = settle(settle(config, make_store()), make_store())
    assert again.recipe == settle(config, make_store()).recipe
    own = make_config()  # of no recipe
    assert settle(own, make_store()).recipe == own.recipe


@pytest.mark.parametrize("begin", [train, lambda *given: list(run_together([given[0]], *given[1:]))])
def test_the_name_of_a_recipe_is_no_configuration(begin: Any) -> None:
    with pytest.raises(EngramError, match=r"needs a configuration.*got 'afc-mini-b10-s5'"):
        begin("afc-mini-b10-s5", make_store())


def test_the_events_of_a_run_are_all_in_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    told = {
        name: re.findall(r"`(\w+)`", keys) for name, keys in re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    }
    of_lessons = (events.EpochsChosen, events.ImagesRead, events.Learned)
    for kind in events.Event.__subclasses__():
        if kind not in of_lessons and not kind.__module__.startswith("engram.models."):
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
            assert told[name] == [field.name for field in fields(kind)], name


@pytest.mark.parametrize(
    ("method", "told"),
    [("afc", {f"importance.{i}" for i in range(4)}), ("mnemonics", {"exemplars.changed"}), ("lwm", {"head.rows"})],
)
def test_a_stage_keeps_the_tensors_that_its_method_tells_of(
    method: str, told: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LwM, "logged_buffers", ("head.",), raising=False)
    session = tiny_session(tiny_config(method, epochs=1))
    for index in range(2):
        learn_stage(session, index)
    arrays = session.evaluate(1)[2]
    assert {name for name in arrays if name != "targets" and "predictions." not in name} == told


def test_the_work_that_is_displayed_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^\| `working` \| .*`what` \((.*)\) \|$", page, re.MULTILINE)
    assert listed.split(", ") == list(text.WORK)


def test_epochs_count_from_one_in_every_event(tmp_path: Path) -> None:
    events = run(make_config("naive", base=6), make_store(), tmp_path / "run", checkpoint_minutes=0)
    at = [event.epoch for event in events if isinstance(event, (EpochFinished, Checkpointed))]
    steps = 11  # 84 images in batches of 8
    assert at == [epoch for epoch in (1, 2) for _ in range(steps + 1)]


def test_what_a_method_has_to_say_is_said_after_a_stop_too(tmp_path: Path) -> None:
    config = make_config("lwf", base=2, increment=1)
    said = [event.message for event in run(config, make_store()) if isinstance(event, Warned)]
    assert said  # one new class alone teaches it nothing, and it says so
    started: list[int] = []

    def in_stage_one() -> bool:
        return bool(started)

    heard: list[str] = []
    for event in run(config, make_store(), tmp_path / "run", stop=in_stage_one):
        heard += [event.message] if isinstance(event, Warned) else []
        if isinstance(event, PhaseStarted) and event.stage == 1:
            started.append(1)
    for event in resume(tmp_path / "run", make_store()):
        heard += [event.message] if isinstance(event, Warned) else []
    assert heard == said


def test_what_was_said_of_a_stage_is_not_said_again_by_a_resumed_run(tmp_path: Path) -> None:
    config, store = make_config("lwf", base=2, increment=1), make_store()
    events = [*run(config, store, tmp_path / "run", stop_after_stage=1), *resume(tmp_path / "run", store)]
    assert sum(isinstance(event, Warned) for event in events) == 1


def test_a_run_that_is_refused_leaves_no_directory_behind(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match="cache"):
        list(run(make_config(), make_store(), tmp_path / "run", cache="somewhere"))  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "run").exists()
