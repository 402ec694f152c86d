"""Sharing a trained base stage: found by runs that have the same one, never by any other."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grimp
import pytest
import torch

from conftest import make_config, make_store
from engram import EngramError, RunConfig, resume, run
from engram.contract import Training, method_registry
from engram.core import provenance
from engram.core.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from engram.core.events import BaseReused, EpochFinished, Event, RunFinished, Warned
from engram.core.provenance import _TRAINING, code_digest
from engram.experiment.base_cache import StageCache
from engram.experiment.session import Session
from engram.methods import METHODS
from engram.methods.blocks.lsc import LSCSettings


def key(config: RunConfig, **store: int) -> str:
    found = Session(config, make_store(**store)).base_key()
    assert found is not None
    return found


def events_of(config: RunConfig, cache: StageCache | None) -> list[Event]:
    return list(run(config, make_store(), cache=cache))


def curve(events: list[Event]) -> list[dict[str, list[float]]]:
    last = events[-1]
    assert isinstance(last, RunFinished)
    return [stage["accuracy_by_stage"] for stage in last.result["stages"]]


def test_reused_base_gives_the_same_run(tmp_path: Path) -> None:
    alone = events_of(make_config(), None)
    cache = StageCache(tmp_path)
    first, second = events_of(make_config(), cache), events_of(make_config(), cache)
    assert not any(isinstance(event, BaseReused) for event in first)
    assert sum(isinstance(event, BaseReused) for event in second) == 1
    assert not any(isinstance(event, EpochFinished) and event.stage == 0 for event in second)
    assert curve(alone) == curve(first) == curve(second)


def test_methods_on_one_host_share_their_base(tmp_path: Path) -> None:
    cache = StageCache(tmp_path)
    events_of(make_config("afc"), cache)
    shared = events_of(make_config("podnet"), cache)
    assert any(isinstance(event, BaseReused) for event in shared)
    assert curve(shared) == curve(events_of(make_config("podnet"), None))


def test_which_methods_share_their_base() -> None:
    families = (
        "afc replay naive uniform podnet gap gram pod pixels channel gradcam",
        "ucir mnemonics geodl",
        "ewc mas",
    )
    keys = [{key(make_config(method)) for method in family.split()} for family in families]
    assert [len(each) for each in keys] == [1, 1, 1]
    assert len(set.union(*keys)) == 3


def test_joint_training_shares_nothing() -> None:
    assert Session(make_config("joint"), make_store()).base_key() is None


TRAINING: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 4,
    "lr": 0.01,
    "schedule": "constant",
    "milestones": (0.5,),
    "factor": 0.5,
    "momentum": 0.5,
    "weight_decay": 0.0,
    "clip": None,
    "remainder": "drop",
    "clip_norm": 0.01,
    "optimiser": "adamw",
    "betas": (0.8, 0.9),
    "warmup": 0.5,
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Training)])
def test_every_part_of_the_training_is_in_the_key(name: str) -> None:
    config = make_config()
    assert key(config.with_value(f"settings.train.{name}", TRAINING[name])) != key(config)


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"order": "seed:5"}, {"base": 3}, {"backbone": "resnet32"}, {"augmentation__pad": 2}],
)
def test_what_determines_the_base_changes_the_key(change: dict[str, Any]) -> None:
    assert key(make_config(**change)) != key(make_config())


def test_the_base_classes_are_in_the_key_where_the_normalisation_is_given() -> None:
    """Else they would be there through the normalisation, which is then that of their images."""
    store = dataclasses.replace(make_store(), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    orders = ("0,1,2,3,4,5", "1,0,2,3,4,5", "2,1,0,3,4,5", "0,1,5,4,3,2")
    one, swapped, other, later = (Session(make_config(order=order), store).base_key() for order in orders)
    assert one is not None
    assert len({one, swapped, other}) == 3
    assert one == later
    darker = dataclasses.replace(store, mean=(0.4, 0.4, 0.4))
    assert Session(make_config(order=orders[0]), darker).base_key() != one


def test_the_precision_is_in_the_key() -> None:
    session = Session(make_config(), make_store())
    one = session.base_key()
    session.engine.precision = "tf32"
    assert session.base_key() != one


def test_the_version_of_torch_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    one = key(make_config())
    monkeypatch.setattr(torch, "__version__", "another")
    assert key(make_config()) != one


def test_number_of_cpu_threads_is_in_the_key() -> None:
    before, one = torch.get_num_threads(), key(make_config())
    try:
        torch.set_num_threads(before + 1)
        assert key(make_config()) != one
    finally:
        torch.set_num_threads(before)
    assert key(make_config()) == one


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("experiment/stage_work.py", True),
        ("experiment/session.py", True),
        ("engine/loop.py", True),
        ("cli/display.py", False),
    ],
)
def test_edited_code_changes_the_key(file: str, changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "engram"
    shutil.copytree(Path(provenance.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = key(make_config())
    monkeypatch.setattr(provenance, "__file__", str(copy / "core" / "provenance.py"))
    monkeypatch.setattr(provenance, "_package_code", inspect.unwrap(provenance._package_code))  # without its memory
    assert key(make_config()) == before
    (copy / file).write_text((copy / file).read_text() + "# edited\n")
    assert (key(make_config()) != before) == changes


BASE = """
from engram.methods.blocks.lsc import LSCMethod, LSCSettings

class Base(LSCMethod[LSCSettings]):
    factor = 1
"""
OUTSIDE = """
from outside_base import Base

def my_loss(step):
    return {"mine": 1 * step.student.scores.sum()}

class Outside(Base):
    def phases(self, learner, stage, passes):
        return [phase_with(my_loss)]
"""


def test_a_method_from_elsewhere_shares_until_its_file_or_its_bases_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"outside_base": BASE, "outside_method": OUTSIDE}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    method = importlib.import_module("outside_method").Outside(LSCSettings())
    before = code_digest(method)
    assert before is not None
    assert before == code_digest(method)
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text.replace("1", "2"))  # the helper's factor, outside the class
        assert code_digest(method) not in (before, None), name
        (tmp_path / f"{name}.py").write_text(text)
    assert code_digest(method) == before
    (tmp_path / "outside_base.py").unlink()
    assert code_digest(method) is None


TWINS = """
from dataclasses import replace
import torch.nn.functional as F
from engram.contract import register
from engram.methods.blocks.lsc import LSCMethod, LSCSettings, lsc_phases

@register("one", settings=LSCSettings, title="Trains as its host does")
class One(LSCMethod[LSCSettings]):
    def phases(self, learner, stage, passes):
        return lsc_phases(self.settings, learner, stage, passes)

def entropy(step):
    return {"classification": F.cross_entropy(step.student.logits, step.labels)}

@register("two", settings=LSCSettings, title="Has a base stage of its own")
class Two(LSCMethod[LSCSettings]):
    def phases(self, learner, stage, passes):
        return [replace(phase, loss=entropy) for phase in lsc_phases(self.settings, learner, stage, passes)]
"""


def test_a_method_has_no_base_of_another_unless_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_registry, "METHODS", METHODS.copy())
    (tmp_path / "twins.py").write_text(TWINS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("twins")
    cache = StageCache(tmp_path / "cache")
    one, two, again = (events_of(make_config(name), cache) for name in ("one", "two", "two"))
    assert [sum(isinstance(event, BaseReused) for event in events) for events in (one, two, again)] == [0, 0, 1]
    assert curve(again) == curve(two) == curve(events_of(make_config("two"), None))


def test_a_method_without_a_source_file_shares_nothing() -> None:
    session = Session(make_config(), make_store())
    typed: dict[str, Any] = {"__name__": "typed_in"}
    exec("from engram.methods.afc import AFC\nclass Typed(AFC): pass", typed)
    session.method = typed["Typed"](session.config.settings)
    assert session.base_key() is None


def test_other_images_change_the_key() -> None:
    assert key(make_config(), seed=1) != key(make_config())


def test_later_stages_do_not_change_the_key() -> None:
    natural = make_config(order="natural")
    assert key(natural) == key(make_config(order="natural", increment=1))
    assert key(natural) == key(make_config(order="0,1,5,4,3,2")), (
        "the same base classes, the later ones in another order"
    )


@pytest.fixture(scope="module")
def trained_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    list(run(make_config(), make_store(), cache=StageCache(folder), stop_after_stage=0))
    return folder


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """A function that changes the tensors of an entry, with a checksum that fits."""

    def rewrite(path: Path) -> None:
        checkpoint = load_checkpoint(path)
        change(checkpoint.tensors)
        save_checkpoint(path, checkpoint)

    return rewrite


def swap(path: Path) -> None:
    other = path.with_name("other.safetensors")
    save_checkpoint(other, Checkpoint(load_checkpoint(path).tensors, {"key": "other"}))
    other.replace(path)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
        (swap, "other settings"),
        (change_tensors(lambda tensors: tensors.pop("head.weight")), "such as head.weight"),
        (change_tensors(lambda tensors: tensors.update(more=torch.zeros(3))), "such as more"),
        (change_tensors(lambda tensors: tensors.update({"head.weight": torch.zeros(2)})), "such as head.weight"),
        (link, "not a regular file"),
        (fifo, "not a regular file"),
    ],
    ids=["cut", "swapped", "missing", "more", "shape", "link", "fifo"],
)
def test_an_entry_that_cannot_be_used_is_said_and_trained_anew(
    damage: Callable[[Path], None], said: str, trained_cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained_cache, tmp_path / "cache")
    cache = StageCache(tmp_path / "cache")
    (entry,) = cache.entries()
    before = entry.path.read_bytes()
    damage(entry.path)
    assert len(cache.entries()) == entry.path.is_file() - entry.path.is_symlink(), "others are not listed"
    events = list(run(make_config(), make_store(), cache=cache, stop_after_stage=0))
    (warned,) = (event.message for event in events if isinstance(event, Warned))
    assert warned.startswith("the cached base stage cannot be used, so it is trained again: ")
    assert said in warned
    assert not entry.path.is_symlink()
    assert entry.path.read_bytes() == before, "trained anew, to the same bits, and saved"


def test_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    events = events_of(make_config(), StageCache(tmp_path / "file" / "cache"))
    assert any(isinstance(event, Warned) and "could not be cached" in event.message for event in events)
    assert isinstance(events[-1], RunFinished)


def test_cache_is_bounded_and_drops_the_longest_unused(tmp_path: Path) -> None:
    def tensors(value: float) -> dict[str, torch.Tensor]:
        return {"x": torch.full((1000,), value)}

    cache = StageCache(tmp_path)
    for number, name in enumerate(("a", "b", "c")):
        cache.save(name, tensors(number))
        os.utime(tmp_path / f"{name}.safetensors", (number, number))
    assert cache.load("a") is not None  # now the latest used
    size = cache.entries()[0].size
    StageCache(tmp_path, limit_bytes=3 * size).save("d", tensors(4))
    assert {entry.key for entry in cache.entries()} == {"a", "c", "d"}
    StageCache(tmp_path, limit_bytes=0).save("e", tensors(5))
    assert [entry.key for entry in cache.entries()] == ["e"], "what was just made is kept, whatever its size"
    kept = cache.load("e")
    assert kept is not None
    assert torch.equal(kept["x"], tensors(5)["x"])
    assert cache.trained_by("e") is None, "nobody said who"
    (tmp_path / "e.safetensors").write_bytes(b"{}")
    with pytest.raises(EngramError, match="damaged"):
        cache.load("e")
    assert cache.trained_by("e") is None
    assert cache.trained_by("never saved") is None


def test_a_base_stage_that_goes_on_is_waited_for_and_shared(tmp_path: Path) -> None:
    cache, store, config = StageCache(tmp_path / "cache"), make_store(), make_config("replay")
    list(run(config, store, tmp_path / "run", stop=lambda: True, cache=cache))
    key = Session(config, store).base_key()
    assert key is not None
    assert cache.load(key) is None
    events = resume(tmp_path / "run", store, cache=cache)
    next(event for event in events if isinstance(event, EpochFinished))
    assert cache.claim(key, "another run") is None, "it would train the same"
    assert isinstance(list(events)[-1], RunFinished)
    assert cache.load(key) is not None


def test_the_cache_knows_who_trained_an_entry(tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "cache")
    list(run(make_config(), make_store(), tmp_path / "runs" / "first", cache=cache))
    list(run(make_config(), make_store(), tmp_path / "runs" / "second", cache=cache))
    assert [cache.trained_by(entry.key) for entry in cache.entries()] == ["first"]


def test_what_trains_a_base_stage_is_in_its_key() -> None:
    """A module that training imports is in the digest of the code, or is named here as one that trains nothing."""
    graph = grimp.build_graph("engram")
    roots = ["engram." + name.removesuffix(".py").replace("/", ".") for name in _TRAINING]
    training = ("engram.experiment.session", "engram.experiment.stage_work")
    used = {used for module in training for used in graph.find_upstream_modules(module)}
    others = {name for name in used if not any(name == root or name.startswith(f"{root}.") for root in roots)}
    # What comes of them is in the key.
    values = {"experiment.run_config", "experiment.learner_config", "core.serialize", "core.fields"}
    reading = {f"runs.{name}" for name in ("checked", "directory", "reader", "result", "stored_run")}
    reading |= {f"runs.{name}" for name in ("comparison", "curve_svg", "result_table")}  # how a result is shown
    helpers = {"core.errors", "core.events", "core.io", "core.memory_limits", "core.metrics", "core.provenance"}
    helpers |= {"core.registry", "core.safe_folder", "core.torchrun"}
    helpers |= {"core.state_file"}  # reads pretrained weights, whose digest is in the key
    helpers |= {"experiment.feature_pass"}  # after the training
    helpers |= {"experiment.image_placement"}  # resident and streamed images give the same bits
    assert others == {f"engram.{name}" for name in values | helpers | reading}
