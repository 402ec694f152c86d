"""Ridge: the head is the closed-form solution over all images seen, however they were divided into stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engram.core.errors import EngramError
from engram.core.events import EpochFinished, RunFinished, StageFinished
from engram.data.memory import MemoryConfig
from engram.data.store import ImageStore
from engram.experiment.runner import resume, run
from engram.experiment.session import Session
from engram.methods.ridge import PRODUCTS, SUMS, RidgeSettings, ridge_weights
from helpers import last_state, learn_stage, tiny_config, tiny_session, toy_store

CLASSES, BASE = 7, 2


def learned(store: ImageStore, increment: int, gamma: float = 1.0, mirror: bool = True, exemplars: int = 0) -> Session:
    memory = MemoryConfig(size=exemplars) if exemplars else MemoryConfig("none", 0)
    config = tiny_config("ridge", base=BASE, increment=increment, memory=memory)
    session = tiny_session(config.with_settings(gamma=gamma, mirror=mirror), store)
    for index in range(len(session.stream)):
        learn_stage(session, index)
    return session


def slow_solution(session: Session, gamma: float, mirror: bool) -> np.ndarray:
    """One image after the other: A = sum x x^T and B = sum x y^T, then (A + gamma I)^-1 B; rows are classes."""
    train, network, engine = session.store.train, session.learner.network, session.engine
    products, targets = np.zeros(()), np.zeros(())
    for image, label in zip(train.images, train.class_ids, strict=True):
        for mirrored in (False, True) if mirror else (False,):
            x = engine.features(network, torch.from_numpy(image[None]), mirrored).double().numpy()[0]
            x = np.append(x, 1.0)
            products = products + np.outer(x, x)
            targets = targets + np.outer(x, np.eye(CLASSES)[label])
    return (np.linalg.inv(products + gamma * np.eye(len(products))) @ targets).T


@pytest.mark.parametrize(("gamma", "mirror"), [(1.0, True), (0.2, False)])
def test_the_head_is_the_solution_over_all_images(gamma: float, mirror: bool) -> None:
    session = learned(toy_store(CLASSES), 2, gamma, mirror)
    slow = slow_solution(session, gamma, mirror)
    head = session.learner.network.head.state_dict()
    np.testing.assert_allclose(head["weight"].numpy(), slow[:, :-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head["bias"].numpy(), slow[:, -1], rtol=1e-4, atol=1e-5)


def test_how_classes_are_divided_into_stages_makes_no_difference() -> None:
    store = toy_store(CLASSES)
    one, five = learned(store, 1).learner, learned(store, 5).learner
    assert torch.equal(
        one.network.state_dict()["backbone.conv.weight"], five.network.state_dict()["backbone.conv.weight"]
    )
    solutions = [ridge_weights(each.buffers[PRODUCTS], each.buffers[SUMS], 1.0) for each in (one, five)]
    for ours, theirs in (
        solutions,
        (one.network.get_parameter("head.weight"), five.network.get_parameter("head.weight")),
    ):
        assert float((ours - theirs).detach().norm()) <= 1e-6 * float(theirs.detach().norm())


def test_exemplars_are_not_counted_again() -> None:
    store = toy_store(CLASSES)
    without, with_some = learned(store, 2).learner, learned(store, 2, exemplars=3).learner
    assert len(with_some.memory) == 3 * CLASSES
    assert torch.equal(without.buffers[PRODUCTS], with_some.buffers[PRODUCTS])
    assert float(with_some.buffers[SUMS][:, -1].sum()) == 2 * len(store.train.class_ids), (
        "each image and its mirror image"
    )


def test_the_backbone_and_its_running_statistics_do_not_change_after_the_base() -> None:
    session = tiny_session(tiny_config("ridge"))
    learn_stage(session, 0)
    before = {name: value.clone() for name, value in session.learner.network.backbone.state_dict().items()}
    learn_stage(session, 1)
    for name, value in session.learner.network.backbone.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_run_stopped_between_stages_without_a_phase_resumes_exactly(tmp_path: Path) -> None:
    config, store = tiny_config("ridge"), toy_store()
    events = list(run(config, store, tmp_path / "whole"))
    assert {event.stage for event in events if isinstance(event, EpochFinished)} == {0}
    halted = run(config, store, tmp_path / "halted")
    for event in halted:
        if isinstance(event, StageFinished) and event.stage == 1:
            halted.close()
            break
    assert isinstance(list(resume(tmp_path / "halted", store))[-1], RunFinished)
    whole, resumed = last_state(tmp_path / "whole"), last_state(tmp_path / "halted")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_removing_a_class_leaves_the_rows_of_the_others() -> None:
    learner = learned(toy_store(CLASSES), 2).learner
    sums, weight = learner.buffers[SUMS].clone(), learner.network.get_parameter("head.weight").detach().clone()
    learner.drop([1], (SUMS,))
    kept = [0, *range(2, CLASSES)]
    assert torch.equal(learner.buffers[SUMS][: CLASSES - 1], sums[kept])
    assert torch.equal(learner.network.get_parameter("head.weight").detach()[: CLASSES - 1], weight[kept])


def test_limits() -> None:
    with pytest.raises(EngramError, match="gamma must be above 0"):
        RidgeSettings(gamma=0.0)
