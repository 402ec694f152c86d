"""Protocols: uneven stages, B0 recipes, class orders of other software, accuracy with the stage known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engram import EngramError, RunConfig, recipe
from engram.cli.options.overrides import split_increments
from engram.core import metrics
from engram.data.stream import Stream, class_order, describe_order
from engram.experiment.recipes import apply_changes, named_by_recipe
from engram.experiment.run_config import describe_stages, directory_name
from engram.experiment.runner import train
from engram.report.groups import load_runs, make_groups
from engram.report.page import write_report
from engram.report.wording import facts
from engram.runs.reader import config_hash, read_manifest, read_result
from tests.helpers import tiny_config, tiny_session, toy_store

NAMES = [f"c{i}" for i in range(20)]


def test_uneven_stages_have_the_sizes_that_were_given() -> None:
    stream = Stream.build(range(50), 10, (10, 5, 5, 20))
    assert stream.sizes == (10, 10, 5, 5, 20)
    assert list(stream.new_labels(4)) == list(range(30, 50))
    assert Stream.build(range(7), 2, 2).sizes == (2, 2, 2, 1)


@pytest.mark.parametrize(
    ("increments", "message"),
    [
        ((3, 2, 4), "add up to 9 classes, but 10 of the 20 classes come after the base of 10"),
        ((20,), "add up to 20 classes, but 10 of"),
        ((5, 0, 5), "at least 1 class"),
        ((), "at least 1 class"),
    ],
)
def test_increments_that_do_not_add_up_are_refused(increments: tuple[int, ...], message: str) -> None:
    with pytest.raises(EngramError, match=message):
        Stream.build(range(20), 10, increments)


@pytest.mark.parametrize("increments", [(2, 0), (-1,), ()])
def test_a_configuration_refuses_an_empty_stage(increments: tuple[int, ...]) -> None:
    with pytest.raises(EngramError, match="increment must be at least 1 class"):
        replace(tiny_config(), increment=increments)


@pytest.mark.parametrize("text", ["3,,4", "a", "3;4", "-1,4", "1.5,2", ""])
def test_increments_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(EngramError, match="--increments takes whole numbers"):
        split_increments(text)
    assert split_increments("10, 5,5") == (10, 5, 5)


def test_uneven_stages_are_in_the_name_and_the_card_and_survive_saving() -> None:
    original = recipe("afc-mini-b10-s5")
    config = named_by_recipe(apply_changes(original, ["increment=3,2,5"]))
    assert config.increment == (3, 2, 5)
    assert config.recipe == "afc-mini-b10-s5 (increment=3,2,5)"
    assert directory_name(config) == "afc-mini-b10-s5-increment-3-2-5-order1-seed1"
    assert RunConfig.from_plain(json.loads(json.dumps(config.to_plain()))) == config
    assert original.to_plain()["increment"] == 2
    assert describe_stages((3, 2, 5)) == "3, of 3, 2 and 5 classes"
    assert [describe_stages(sizes) for sizes in ((), (2, 2), (2, 2, 1))] == ["none", "2 of 2", "3 of 2 (the last of 1)"]


def test_the_hash_of_an_earlier_configuration_is_the_same() -> None:
    """As it was saved before stages could be uneven."""
    plain = recipe("afc-mini-b10-s5").to_plain()
    assert set(plain) == {
        *("method", "settings", "data", "base", "increment", "order", "seed", "memory", "backbone", "augmentation"),
        *("predictor", "device", "precision", "recipe"),
    }
    assert RunConfig.from_plain(plain).fingerprint() == config_hash(plain)


@pytest.mark.parametrize(("stages", "classes"), [(5, 20), (10, 10), (20, 5)])
def test_b0_recipes_have_stages_of_equal_size(stages: int, classes: int) -> None:
    config = recipe(f"afc-cifar100-b0-s{stages}")
    assert isinstance(config.increment, int)
    assert config.base is not None
    assert Stream.build(range(100), config.base, config.increment).sizes == (classes,) * stages
    assert str(config.memory) == "total=2000"
    assert config.memory.selection == "herding"
    assert [str(recipe(f"{name}-cifar100-b0-s{stages}").memory) for name in ("naive", "joint", "lwf")] == [
        *("none", "all", "none")
    ]
    assert recipe(f"er-ace-cifar100-b0-s{stages}").memory.selection == "random"


def test_numpys_order_is_that_of_its_legacy_generator() -> None:
    hundred = class_order("numpy:1993", "cifar100", [str(i) for i in range(100)])
    assert hundred[:5] == (68, 56, 78, 8, 23)  # as PyCIL prints it
    assert sorted(hundred) == list(range(100))
    assert class_order("numpy:1", "mini", NAMES) != class_order("numpy:2", "mini", NAMES)
    assert describe_order("numpy:1993", "cifar100") == "NumPy's permutation with seed 1993"


@pytest.mark.parametrize("order", ["numpy:", "numpy:x", "numpy:-1", "numpy", "numpy:1.5", f"numpy:{2**32}"])
def test_orders_that_numpy_does_not_have_are_refused(order: str) -> None:
    with pytest.raises(EngramError, match="class order"):
        class_order(order, "mini", NAMES)


def test_the_best_class_of_the_own_stage_is_found() -> None:
    random, sizes = np.random.default_rng(0), (3, 1, 2)
    scores, targets = random.normal(size=(40, 6)), random.integers(0, 6, 40)
    stage_of = [0, 0, 0, 1, 2, 2]
    slow = []
    for row, target in zip(scores, targets, strict=True):
        allowed = [label for label in range(6) if stage_of[label] == stage_of[target]]
        slow.append(max(allowed, key=lambda label: row[label]))
    assert metrics.best_of_own_stage(scores, targets, sizes).tolist() == slow
    scores[:, 3:] = -np.inf  # classes that have not come yet
    known = metrics.best_of_own_stage(scores[:3], np.array([0, 1, 2]), (3,))
    assert known.tolist() == scores[:3, :3].argmax(axis=1).tolist()


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with stages of 2, 1 and 3 classes."""
    directory = tmp_path_factory.mktemp("uneven") / "run"
    train(tiny_config(epochs=1, increment=(1, 3)), toy_store(), directory)
    return directory


def test_a_run_knows_its_accuracy_with_the_stage_known(uneven: Path) -> None:
    result = json.loads((uneven / "result.json").read_text())
    for number, stage in enumerate(result["stages"]):
        arrays = load_file(uneven / "stages" / f"{number:03d}.safetensors")
        for name in ("cnn", "nme"):
            known = arrays[f"task_predictions.{name}"]
            assert known.dtype == np.int16
            own = {label: which for which, labels in enumerate(([0, 1], [2], [3, 4, 5])) for label in labels}
            assert [own[label] for label in known.tolist()] == [own[label] for label in arrays["targets"].tolist()]
            assert stage["task_accuracy"][name] == pytest.approx(100 * (known == arrays["targets"]).mean())
            assert stage["task_accuracy"][name] >= stage["accuracy"][name]
            # A prediction that is right among all classes is right among fewer.
            right = arrays[f"predictions.{name}"] == arrays["targets"]
            assert (known == arrays["targets"])[right].all()
    for name in ("cnn", "nme"):
        values = [stage["task_accuracy"][name] for stage in result["stages"]]
        assert result["average_task_accuracy"][name] == pytest.approx(np.mean(values))
        assert result["final_task_accuracy"][name] == values[-1]


def _copy(source: Path, target: Path) -> Path:
    for file in source.rglob("*"):
        if file.is_file() and file.name != ".lock":
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    return target


def _refusal(directory: Path) -> str:
    with pytest.raises(EngramError) as refused:
        read_result(directory, read_manifest(directory))
    return str(refused.value)


def test_changed_task_numbers_are_refused(uneven: Path, tmp_path: Path) -> None:
    run = _copy(uneven, tmp_path / "run")
    file, stage = run / "result.json", run / "stages" / "002.safetensors"
    text, arrays = file.read_text(), load_file(stage)
    result = json.loads(text)
    result["final_task_accuracy"]["cnn"] += 1
    file.write_text(json.dumps(result))
    assert "final_task_accuracy" in _refusal(run)
    result = json.loads(text)
    del result["average_task_accuracy"]
    file.write_text(json.dumps(result))
    assert "average_task_accuracy" in _refusal(run)
    result = json.loads(text)
    del result["stages"][2]["task_accuracy"]["nme"]
    file.write_text(json.dumps(result))
    assert "task_accuracy should have the predictors" in _refusal(run)
    file.write_text(text)
    save_file({name: value for name, value in arrays.items() if name != "task_predictions.cnn"}, stage)
    assert "task_predictions.cnn should be a list" in _refusal(run)
    save_file({**arrays, "task_predictions.cnn": np.zeros_like(arrays["targets"])}, stage)
    assert "a label of another stage than its image" in _refusal(run)
    others = np.array([1, 0, 2, 4, 5, 3], dtype=np.int16)  # wrong, except for the only class of its stage
    save_file({**arrays, "task_predictions.cnn": others[arrays["targets"]]}, stage)
    assert "its cnn predictions within stages are 16.67 % right" in _refusal(run)
    save_file(arrays, stage)
    assert read_result(run, read_manifest(run)).final_task_accuracy


def test_a_run_of_an_earlier_version_opens_without_task_numbers(uneven: Path, tmp_path: Path) -> None:
    run = _copy(uneven, tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    for key in metrics.TASK_METRICS:
        del result[key]
    for number, stage in enumerate(result["stages"]):
        del stage["task_accuracy"]
        file = run / "stages" / f"{number:03d}.safetensors"
        save_file({name: value for name, value in load_file(file).items() if not name.startswith("task_")}, file)
    (run / "result.json").write_text(json.dumps(result))
    found = read_result(run, read_manifest(run))
    assert found.average_task_accuracy == {}
    assert "stage<br>known" not in write_report(run).read_text()


def test_the_report_shows_uneven_stages_and_the_task_accuracy(uneven: Path, tmp_path: Path) -> None:
    groups = make_groups(load_runs([uneven]))
    assert "2 base classes, then 2 stages of 1 and 3 classes" in facts(groups)
    page = write_report(_copy(uneven, tmp_path / "run")).read_text()
    value = groups[0].metric("final_task_accuracy", "cnn")
    assert value is not None
    assert "Final, stage<br>known, %" in page
    assert f"<td>{value.mean:.2f}</td>" in page


def test_a_stage_plan_follows_uneven_stages() -> None:
    plans = tiny_session(tiny_config(increment=(1, 3))).plan()
    assert [(len(plan.new_classes), plan.images, plan.exemplars) for plan in plans] == [
        *((2, 24, 0), (1, 18, 6), (3, 45, 9))
    ]
