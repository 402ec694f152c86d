"""Blurry streams, classes that come again, reservoirs and online learning."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import EngramError, MemoryConfig, RunConfig, recipe
from engram.cli.options.overrides import configure_all
from engram.cli.parser import parse
from engram.contract import register
from engram.data.arrivals import arrival_stages
from engram.data.memory import RESERVOIR, Memory, reservoir_order
from engram.data.stage import Samples
from engram.data.stream import Stream
from engram.experiment.recipes import online
from engram.experiment.runner import train
from engram.methods import METHODS
from engram.methods.blocks.lsc import LSCMethod, LSCSettings
from engram.methods.ridge import PRODUCTS, SUMS
from engram.models.model_config import ModelConfig
from tests.helpers import (
    assert_resumes_to,
    learn_stage,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
)

RETURNING = sorted(name for name, info in METHODS.items() if info.kind.returning_classes)
UNBALANCED = sorted(name for name, info in METHODS.items() if info.kind.unbalanced_memory)
NONE, SMALL = {"blurry": 0.0, "repeat": 0.0}, MemoryConfig("total", 7, "reservoir")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_each_image_comes_once_and_not_before_its_class(seed: int) -> None:
    """For random streams, shares and numbers of images."""
    random = np.random.default_rng(seed)
    sizes = tuple(random.integers(1, 4, random.integers(2, 7)).tolist())
    stream = Stream(tuple(range(sum(sizes))), sizes)
    labels = random.permutation(np.repeat(np.arange(sum(sizes)), random.integers(len(sizes) + 1, 30, sum(sizes))))
    own = np.repeat(np.arange(len(sizes)), sizes)[labels]
    assert (arrival_stages(labels, stream, seed) == own).all()
    blurry, repeat = float(random.uniform(0.2, 0.9)), float(random.uniform(0.5, 1))
    for shares in (NONE | {"blurry": blurry}, NONE | {"repeat": repeat}):
        stages = arrival_stages(labels, stream, seed, **shares)
        assert (arrival_stages(labels, stream, seed, **shares) == stages).all()
        assert (stages >= own).all()
        assert stages.max() < len(sizes)
        assert {(label, stage) for label, stage in zip(labels, own, strict=True)} <= set(
            zip(labels, stages, strict=True)
        ), "every class comes in its own stage"
    blurred = arrival_stages(labels, stream, seed, blurry=blurry)
    for label in range(sum(sizes)):
        mine, first = blurred[labels == label], own[labels == label][0]
        later = Counter(mine[mine > first].tolist())
        wanted = min(round(blurry * len(mine)), len(mine) - 1) if first < len(sizes) - 1 else 0
        assert later.total() == wanted
        if wanted:
            spread = [later.get(stage, 0) for stage in range(first + 1, len(sizes))]
            assert max(spread) - min(spread) <= 1, "spread evenly"


def test_that_share_of_the_old_classes_comes_again_with_equal_parts() -> None:
    stream, labels = Stream(tuple(range(10)), (4, 2, 2, 2)), np.repeat(np.arange(10), 30)
    stages = arrival_stages(labels, stream, seed=1, repeat=0.5)
    for stage, old in ((1, 4), (2, 6), (3, 8)):
        again = {label for label in labels[stages == stage].tolist() if label < old}
        assert len(again) == round(0.5 * old)
    for label in range(10):
        parts = Counter(stages[labels == label].tolist())
        assert max(parts.values()) - min(parts.values()) <= 1


@pytest.mark.parametrize(
    ("shares", "images", "message"),
    [
        ({"blurry": 0.01}, 12, "no image comes in a later stage with"),
        ({"repeat": 0.01}, 12, "no image comes in a later stage with"),
        ({"repeat": 1.0}, 2, "cannot come in 3 stages"),
    ],
)
def test_shares_that_do_not_fit_the_images_are_refused(shares: dict[str, Any], images: int, message: str) -> None:
    with pytest.raises(EngramError, match=message):
        tiny_session(tiny_config(**shares), toy_store(per_class=images))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blurry": 1.0}, "blurry must be at least 0 and below 1, got 1.0"),
        ({"blurry": -0.1}, "blurry must be at least 0"),
        ({"repeat": 1.5}, "repeat must be at least 0 and at most 1"),
        ({"repeat": "much"}, "repeat should be a number"),
        ({"repeat": 0.5, "blurry": 0.5}, "exclude each other"),
    ],
)
def test_shares_that_are_none_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngramError, match=message):
        tiny_config(**changes)


def test_methods_that_expect_each_class_once_are_refused() -> None:
    with pytest.raises(
        EngramError, match=r"er-ace cannot learn from new images of old classes.*methods that can: .*afc"
    ):
        tiny_config("er-ace", blurry=0.3)
    with pytest.raises(EngramError, match=r"afc needs as many exemplars of every class.*derpp, er-ace, replay$"):
        tiny_config(memory=SMALL)


def test_the_attribute_that_a_method_of_ones_own_lacks_is_named() -> None:
    class Own(LSCMethod[LSCSettings]):
        """Declares nothing."""

    register("own", settings=LSCSettings, title="Own")(Own)
    try:
        for changes, attribute in (({"blurry": 0.3}, "returning_classes"), ({"memory": SMALL}, "unbalanced_memory")):
            with pytest.raises(EngramError, match=f"; if own can, declare {attribute} = True in its class Own"):
                tiny_config("own", **changes)  # pyright: ignore[reportArgumentType]
    finally:
        METHODS.pop("own")


def test_a_share_of_zero_is_not_saved() -> None:
    assert not {"blurry", "repeat"} & tiny_config().to_plain().keys()
    blurred = tiny_config(blurry=0.25)
    assert blurred.to_plain()["blurry"] == 0.25
    assert type(blurred).from_plain(blurred.to_plain()) == blurred
    assert blurred.fingerprint() != tiny_config().fingerprint()
    assert blurred.card(toy_store())["Stream"] == "blurry: 25 % of each class's images come in later stages"
    assert "Stream" not in tiny_config().card(toy_store())


@pytest.mark.parametrize("method", RETURNING)
def test_every_image_is_in_one_pool_as_a_new_one(method: str) -> None:
    """And the plan knows the pools, and the memory keeps its budget."""
    session = tiny_session(tiny_config(method, epochs=1, blurry=0.4), toy_store(num_classes=4))
    seen: list[int] = []
    for index, plan in enumerate(session.plan()):
        stage = learn_stage(session, index)
        new = ~stage.pool.exemplar
        seen += stage.pool.sources[new].tolist()
        assert stage.returning_labels == ([0, 1] if index else [])
        assert (len(stage.pool), int(stage.pool.exemplar.sum())) == (plan.images, plan.exemplars)
        if METHODS[method].memory == "needed":
            assert [len(session.learner.memory.of(label)) for label in range(stage.num_seen)] == [3] * stage.num_seen
    assert sorted(seen) == list(range(len(session.store.train)))
    if METHODS[method].memory == "all":
        kept = session.learner.memory.samples()
        assert kept is not None
        assert sorted(kept.sources.tolist()) == sorted(seen)


def test_exemplars_of_a_class_that_comes_again_are_chosen_anew() -> None:
    session = tiny_session(tiny_config("replay", epochs=1, repeat=1.0, memory=MemoryConfig("per_class", 6, "random")))
    learn_stage(session, 0)
    before = session.learner.memory.of(0).sources.tolist()
    stage = learn_stage(session, 1)
    after = session.learner.memory.of(0).sources.tolist()
    fresh = set(stage.pool.sources[~stage.pool.exemplar].tolist())
    assert len(before) == 4, "a third of 12 images"
    assert len(after) == 6
    assert set(after) & fresh
    assert set(after) <= set(before) | fresh


def test_ridge_adds_the_images_of_classes_that_come_again() -> None:
    """On a backbone that is not trained, all images give the same sums, whenever they come."""
    sums = []
    for repeat in (0.0, 1.0):
        session = tiny_session(tiny_config("ridge", epochs=0, repeat=repeat))
        session.learner.network.mean.fill_(0.5)
        session.learner.network.std.fill_(0.25)
        for index in range(3):
            learn_stage(session, index)
        sums.append([session.learner.buffers[name] for name in (PRODUCTS, SUMS)])
    for once, again in zip(*sums, strict=True):
        torch.testing.assert_close(once, again, rtol=1e-5, atol=1e-4)


def test_runs_with_other_images_in_the_base_stage_do_not_share_it() -> None:
    configs = (tiny_config(), tiny_config(blurry=0.3), tiny_config(repeat=0.5))
    keys = {tiny_session(config).base_key("x") for config in configs}
    assert len(keys) == 3


def test_a_blurry_run_resumes_exactly(tmp_path: Path) -> None:
    config, store = tiny_config("replay", epochs=1, blurry=0.4), toy_store(num_classes=4)
    whole = run_whole(config, store, tmp_path / "whole")
    run_stopped(config, store, tmp_path / "stopped", 2, starts(1))
    assert_resumes_to(whole, tmp_path / "stopped", store)


def test_a_reservoir_is_a_uniform_sample_of_all_images_seen() -> None:
    """Each of 30 images is in a reservoir of 6 in a fifth of 2,000 seeds; step by step or at once is the same."""
    ids, size = torch.arange(100, 130), 6
    counts = np.zeros(30)
    for seed in range(2000):
        at_once = reservoir_order(ids, seed)[:size]
        counts[at_once.numpy()] += 1
        if seed < 50:
            held = ids[:0]
            for part in ids.split(7):
                seen = torch.cat([part, held])
                held = seen[reservoir_order(seen, seed)[:size]]
            assert sorted(held.tolist()) == sorted(ids[at_once].tolist())
    # Five standard deviations of a binomial with 2,000 draws of 0.2.
    assert np.abs(counts - 400).max() < 5 * (2000 * 0.2 * 0.8) ** 0.5


def test_ids_of_any_sign_are_ordered() -> None:
    ids = torch.tensor([-(2**63), -1, 0, 1, 2**63 - 1])
    assert sorted(reservoir_order(ids, 3).tolist()) == [0, 1, 2, 3, 4]
    assert reservoir_order(ids.flip(0), 3).tolist() == [4 - row for row in reservoir_order(ids, 3).tolist()]


@pytest.mark.parametrize("text", ["per_class=5", "all", "none"])
def test_a_reservoir_needs_a_total(text: str) -> None:
    with pytest.raises(EngramError, match=r"a reservoir holds a number of exemplars in total, got .*; use total=N"):
        MemoryConfig.parse(text, "reservoir")


def test_a_reservoir_may_be_smaller_than_the_number_of_classes() -> None:
    MemoryConfig("total", 2, "reservoir").check(5)
    memory, labels = Memory(MemoryConfig("total", 2, "reservoir")), torch.tensor([0, 0, 1])
    images = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
    pool = Samples(images, labels, torch.arange(3), torch.zeros(3, dtype=torch.bool))
    memory.update(pool, {0: torch.tensor([1]), 1: torch.tensor([2])}, 2)
    memory.update(pool, {0: torch.tensor([0, 1])}, 2)
    assert (memory.labels, len(memory)) == ([0], 2)


def test_a_model_of_ones_own_images_has_no_reservoir() -> None:
    with pytest.raises(EngramError, match="a reservoir is for runs"):
        ModelConfig.choose("replay", image_size=16, images=100, memory=SMALL)


@pytest.mark.parametrize("method", UNBALANCED)
def test_methods_learn_online(method: str, tmp_path: Path) -> None:
    """Each image once; the memory is the reservoir of all images seen; a class may have no exemplar."""
    config = replace(tiny_config(method, epochs=3), memory=MemoryConfig("total", 7), recipe="tiny")
    config = online(config, batch_size=4)
    assert config.memory == SMALL
    session = tiny_session(config)
    plans = session.plan()
    for index, plan in enumerate(plans):
        stage = learn_stage(session, index)
        assert (len(stage.pool), int(stage.pool.exemplar.sum())) == (plan.images, plan.exemplars)
        (main,) = (phase for phase in plan.phases if phase.name == "main")
        assert (main.epochs, main.images) == (
            1,
            len(stage.pool) if method == "replay" else plan.images - plan.exemplars,
        )
    rows = torch.from_numpy(np.arange(len(session.store.train)))
    kept = session.learner.memory.samples()
    assert kept is not None
    assert sorted(kept.sources.tolist()) == sorted(reservoir_order(rows, config.seed)[:7].tolist())
    assert len(session.learner.memory.labels) < 6, "of the toy's images, this seed keeps none of some class"
    accuracy, _, arrays = session.evaluate(2)
    assert set(accuracy) == {"cnn", "nme"}
    assert set(arrays["predictions.nme"].tolist()) <= set(session.learner.memory.labels)


def test_an_online_run_resumes_exactly(tmp_path: Path) -> None:
    config, store = replace(tiny_config("derpp", epochs=1), memory=SMALL), toy_store(num_classes=4)
    whole = run_whole(config, store, tmp_path / "whole")
    run_stopped(config, store, tmp_path / "stopped", 2, starts(1))
    assert_resumes_to(whole, tmp_path / "stopped", store)
    assert train(config, store)["stages"][1]["classes"] == 4


def test_online_refuses_a_memory_without_a_total() -> None:
    with pytest.raises(
        EngramError, match=r"online learning keeps a number of exemplars in total.*has the memory per_class=5"
    ):
        online(recipe("er-ace-mini-b10-s5"))
    with pytest.raises(EngramError, match="has the memory all"):
        online(recipe("joint-mini-b10-s5"))
    for name in ("afc-cifar100-b0-s10", "icarl-mini-b10-s5"):
        with pytest.raises(EngramError, match=r"needs as many exemplars of every class.*keep; methods that can: derpp"):
            online(recipe(name))
    assert online(recipe("naive-mini-b10-s5")).memory.budget == "none"


def _configured(*typed: str) -> RunConfig:
    return configure_all(parse(["run", *typed])[1])[0]


def test_flags_of_the_stream() -> None:
    config = _configured("er-ace-mini-b10-s5", "--online", "--memory", "total=60", "--increments", "4,6")
    assert config.memory == MemoryConfig("total", 60, RESERVOIR)
    assert config.increment == (4, 6)
    training = config.settings.train  # pyright: ignore[reportAttributeAccessIssue]
    assert (training.epochs, training.batch_size, training.schedule, training.remainder) == (1, 10, "constant", "keep")
    assert _configured("afc-mini-b10-s5", "--blurry", "0.1").recipe == "afc-mini-b10-s5 (blurry=0.1)"
    assert _configured("afc-mini-b10-s5", "--repeat", "0.2").repeat == 0.2
    sized = _configured("derpp-cifar100-b0-s10", "--online", "--batch-size", "32").settings.train  # pyright: ignore[reportAttributeAccessIssue]
    assert sized.batch_size == 32
    assert _configured("replay-mini-b10-s5", "--selection", "reservoir", "--memory", "total=9").memory.size == 9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--online", "--memory", "total=60", "--epochs", "2"], "--online has epochs 1, got --epochs 2"),
        (["--online", "--memory", "total=60", "--selection", "random"], "--online has selection reservoir"),
        (["--increment", "2", "--increments", "4,6"], "exclude each other"),
        (["--selection", "reservoir"], "use total=N"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(EngramError, match=message):
        _configured("er-ace-mini-b10-s5", *flags)
