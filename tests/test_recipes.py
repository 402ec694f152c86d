"""Recipes: every name makes its configuration, the numbers are the paper's, and a new method gets its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from engram import EngramError, MemoryConfig, RunConfig, Training, read_mini, recipe, recipe_names
from engram.contract import MethodInfo, Settings
from engram.core.errors import suggest
from engram.data.augment import Augmentation
from engram.experiment.session import Session
from engram.methods import METHODS
from engram.methods.bounds import Replay


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_whole(name: str) -> None:
    config = recipe(name)
    assert config.recipe == name
    assert name.startswith(config.method)
    again = RunConfig.from_plain(config.to_plain())
    assert again == config
    assert again.fingerprint() == config.fingerprint(), "a 10 that is read back as 10.0 would be another run"
    if "cifar100" in name:
        stages = int(name.rsplit("-s", 1)[1])
        assert isinstance(config.increment, int)
        even = (config.increment, config.increment * stages) == (config.base, 100)
        assert even if "-b0-" in name else (config.base, config.increment * stages) == (50, 50)


def test_whole_numbers_among_floats_are_floats_whoever_wrote_them() -> None:
    """A 1 that was read back as 1.0 would be another run, and could not be resumed."""
    config = recipe("afc-mini-b10-s5")
    settings = replace(config.settings, lambda_disc=4, train=Training(lr=1, milestones=(), clip=3))
    typed = replace(config, settings=settings, augmentation=Augmentation(brightness=0))
    found: Any = typed.settings
    assert [type(value) for value in (found.lambda_disc, found.train.lr, found.train.clip)] == [float] * 3
    assert type(found.train.epochs) is int
    assert type(typed.augmentation.brightness) is float
    assert typed.fingerprint() == RunConfig.from_plain(typed.to_plain()).fingerprint()


def test_mini_recipes_fit_the_embedded_set() -> None:
    store = read_mini()
    for name in recipe_names():
        if "-mini-" in name:
            assert len(recipe(name).stream(store)) - 1 == int(name.rsplit("-s", 1)[1])


@pytest.mark.parametrize("dataset", ["cifar100-b50-s10", "imagenet100-b50-s10"])
def test_images_are_brightened_where_the_methods_own_code_does_so(dataset: str) -> None:
    for method, info in METHODS.items():
        if f"{method}-{dataset}" in recipe_names():
            brightness = recipe(f"{method}-{dataset}").augmentation.brightness
            assert (brightness > 0) == info.brightened
    assert not any(METHODS[name].brightened for name in ("icarl", "bic", "ucir", "mnemonics", "geodl", "gdumb"))
    assert all(METHODS[name].brightened for name in ("afc", "podnet", "podnet-dde", "gap", "replay"))


def test_misspelt_recipe_gets_the_nearest_name() -> None:
    with pytest.raises(EngramError, match="did you mean 'afc-cifar100-b50-s10'"):
        recipe("afc-cifar10-b50-s10")


@pytest.mark.parametrize("written", ["AFC-mini-b10-s5", "afc_mini_b10_s5", "afc mini b10 s5", "AFC-Mini-b10s5"])
def test_a_recipe_that_is_written_otherwise_is_the_one_that_is_meant(written: str) -> None:
    with pytest.raises(EngramError, match=r"did you mean 'afc-mini-b10-s5'\?"):
        recipe(written)


def test_a_name_that_is_like_no_recipe_does_not_get_all_of_them() -> None:
    with pytest.raises(EngramError) as refused:
        recipe("resnet")
    assert len(str(refused.value)) < 220
    with pytest.raises(EngramError, match=r"valid names: afc-cifar100-b0-s10, .*afc-nme-") as refused:
        recipe("AFC")
    assert "podnet" not in str(refused.value)


@pytest.mark.parametrize("method", ["der", "eeil"])
def test_short_recipes_have_room_for_what_the_balanced_phase_must_do(method: str) -> None:
    """A new head, or the first look at classes that weigh the same, is not learned in one batch an epoch."""
    first = Session(recipe(f"{method}-mini-b10-s5").with_value("device", "cpu"), read_mini()).plan()[1]
    (balance,) = (phase for phase in first.phases if phase.name == "balance")
    assert balance.images == 12 * 5
    assert balance.epochs * balance.steps >= 200


def test_names_that_none_is_near_of_are_cut_short() -> None:
    names = [f"class{number:04}" for number in range(1000)]
    assert suggest("x", names).endswith("class0019 and 980 more")
    assert suggest("x", names[:20]).endswith("class0019")


@dataclass(frozen=True)
class OwnSettings(Settings):
    """Settings without a fine-tuning phase."""

    train: Training = field(default_factory=Training)


def test_new_method_has_recipes_and_spoils_none(monkeypatch: pytest.MonkeyPatch) -> None:
    info = MethodInfo(
        name="mine",
        title="Mine",
        paper="",
        memory="needed",
        predictors=("cnn", "nme"),
        settings=OwnSettings,
        kind=Replay,
    )
    monkeypatch.setitem(METHODS, "mine", info)
    own = recipe("mine-mini-b10-s5").settings
    assert isinstance(own, OwnSettings)
    assert own.train.epochs == recipe("afc-mini-b10-s5").settings.train.epochs  # pyright: ignore[reportAttributeAccessIssue]
    assert "mine-cifar100-b50-s25" in recipe_names()


@pytest.mark.parametrize(
    ("name", "changes", "epochs"),
    [
        ("afc", {}, "16 per stage, 10 of balanced fine-tuning"),
        ("afc", {"variant": "paper"}, "16 per stage"),
        ("afc", {"balanced": False}, "16 per stage"),
        ("ucir", {}, "16 per stage"),
        ("bic", {}, "16 per stage, 200 of correction"),
        ("der", {}, "16 per stage, 1 of warm-up, 30 of balanced fine-tuning"),
        ("foster", {}, "16 per stage, 10 of compression"),
        ("memo", {"expand__epochs": 8}, "16 for the base, 8 for each stage after it"),
        ("gdumb", {}, "16 for the base, 32 on the memory for each stage after it"),
    ],
)
def test_the_card_says_what_is_trained(name: str, changes: dict[str, object], epochs: str) -> None:
    config = recipe(f"{name}-mini-b10-s5").with_value("device", "cpu").with_settings(**changes)
    assert Session(config, read_mini()).card()["Epochs"] == epochs


def test_order_and_memory_are_taken_in_python_as_they_are_typed() -> None:
    config = recipe("gdumb-mini-b10-s5")
    assert config.with_value("order", 2) == replace(config, order="2")
    memory = MemoryConfig("per_class", 7, "random")
    assert config.with_value("memory", "per_class=7") == config.with_value("memory", memory)
    assert replace(config, order=2) == config.with_value("order", 2)
    with pytest.raises(EngramError, match="order should be text"):
        config.with_value("order", True)
    with pytest.raises(EngramError, match="memory"):
        config.with_value("memory", "lots")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 1.5}, "seed should be a whole number, got 1.5"),
        ({"base": "5.5"}, "base should be a whole number"),
        ({"memory": "none"}, "memory"),
        ({"data": "mini"}, "data"),
        ({"order": None}, "order should be text"),
    ],
)
def test_what_a_resumed_run_could_not_read_back_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(EngramError, match=words):
        replace(recipe("afc-mini-b10-s5"), **changed)


def test_no_memory_is_one_memory_however_it_is_said() -> None:
    assert MemoryConfig("none") == MemoryConfig("none", 0) == MemoryConfig.parse("none")
    config = recipe("ewc-mini-b10-s5")
    assert config.with_value("memory.budget", "none").fingerprint() == config.with_value("memory", "none").fingerprint()


def test_an_order_is_taken_in_python_as_a_list() -> None:
    config = recipe("afc-folder")
    for listed in ([5, 4, 3], (5, 4, 3), range(5, 2, -1), np.array([5, 4, 3])):
        assert config.with_value("order", listed) == config.with_value("order", "5,4,3")
    assert config.with_value("order", ["fox", "girl"]).order == "fox,girl"
    for listed, told in (([3], "1 in all"), ([], "0 in all"), (["a,b", "c"], "'a,b' in it"), ([1.5, 2], "1.5 in it")):
        with pytest.raises(EngramError, match=f"a list has every class by id, or by a name without commas, got {told}"):
            config.with_value("order", listed)
