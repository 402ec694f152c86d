"""FeTrIL: old classes are imitated by moved features of new ones, and the classifiers are those that are asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.core.errors import EngramError
from engram.core.events import RunFinished, StageFinished
from engram.core.rng import generator
from engram.data.memory import MemoryConfig
from engram.data.store import ImageStore
from engram.experiment.runner import resume, run
from engram.experiment.session import Session
from engram.methods.fetril import (
    MEANS,
    FeTrILSettings,
    UnitInputHead,
    fit_machine,
    fit_machines,
    fit_softmax,
    imitate_old,
    most_similar,
)
from engram.models.onnx_export import export_onnx
from engram.models.store.codec import open_model
from helpers import last_state, learn_stage, tiny_config, tiny_session, toy_store
from model_helpers import NAMES, make, memory_of, tiny

CLASSES = 6
QUICK: dict[str, Any] = {"classifier": "fc", "fit_epochs": 10, "fit_batch": 16}
both = pytest.mark.parametrize("settings", [{"classifier": "svm"}, QUICK], ids=["svm", "fc"])


def learned(store: ImageStore, stages: int = 3, exemplars: int = 0, epochs: int = 2, **settings: Any) -> Session:
    memory = MemoryConfig(size=exemplars) if exemplars else MemoryConfig("none", 0)
    session = tiny_session(tiny_config("fetril", memory=memory, epochs=epochs).with_settings(**settings), store)
    for index in range(stages):
        learn_stage(session, index)
    return session


def blobs(count: int, dim: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features at or above 0 of overlapping classes, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = torch.rand(classes, dim, generator=random)
    return (centres[labels] + 0.5 * torch.randn(count, dim, generator=random)).clamp(min=0), labels


def test_an_old_class_is_imitated_by_the_most_similar_new_one() -> None:
    old, new = torch.tensor([[1.0, 0.1], [0.0, 2.0]]), torch.tensor([[9.0, 0.0], [0.9, 0.8]])
    assert most_similar(old, new, "cosine").tolist() == [0, 1]
    assert most_similar(old, new, "euclidean").tolist() == [1, 1]
    # Two old classes, and three images of each of two new ones.
    features, labels = torch.randn(6, 2), torch.tensor([2, 3, 2, 3, 3, 2])
    means = torch.cat([old, features[labels == 2].mean(0)[None], features[labels == 3].mean(0)[None]])
    imitated, whose = imitate_old(features, labels, means, torch.tensor([3, 2]))
    expected = [
        (features[row] - means[source] + means[label], label)
        for label, source in enumerate((3, 2))
        for row in range(6)
        if labels[row] == source
    ]
    assert whose.tolist() == [label for _, label in expected] == [0, 0, 0, 1, 1, 1]
    assert torch.allclose(imitated, torch.stack([feature for feature, _ in expected]))
    for label in range(2):
        assert torch.allclose(imitated[whose == label].mean(0), means[label], atol=1e-6)


@pytest.mark.parametrize("penalty", [0.05, 1.0, 1e4])
def test_a_machine_is_at_the_minimum_of_its_objective(penalty: float) -> None:
    features, labels = blobs(90, 6, 3)
    inputs, signs = features.double(), torch.where(labels == 1, 1.0, -1.0).double()
    weight = fit_machine(inputs, signs, penalty).numpy()
    slope = weight.copy()
    for row, sign in zip(inputs.numpy(), signs.tolist(), strict=True):
        slope -= 2 * penalty * max(0.0, 1 - sign * float(weight @ row)) * sign * row
    first = np.linalg.norm(2 * penalty * (inputs.numpy().T @ signs.numpy()))
    assert np.linalg.norm(slope) <= 1e-8 * first


def test_the_machines_are_those_of_scikit_learn() -> None:
    svm = pytest.importorskip("sklearn.svm")
    features, labels = blobs(200, 8, 4)
    unit = F.normalize(features.double(), dim=1).numpy()
    for penalty in (1.0, 30.0):
        theirs = svm.LinearSVC(C=penalty, dual=False, tol=1e-9, max_iter=10000).fit(unit, labels.numpy())
        ours = fit_machines(features, labels, 4, penalty).numpy()
        np.testing.assert_allclose(ours[:, :-1], theirs.coef_, atol=1e-5)
        np.testing.assert_allclose(ours[:, -1], theirs.intercept_, atol=1e-5)


def test_the_softmax_layer_is_trained_by_plain_sgd() -> None:
    settings = FeTrILSettings(fit_epochs=3, fit_batch=7, fit_lr=0.1, fit_decay=0.01)
    features, labels = blobs(20, 5, 3)
    ours = fit_softmax(settings, features, labels, 3, seed=4, stage=2).numpy()
    weight = (torch.randn(3, 5, generator=generator(4, "classifier", 2)) / math.sqrt(5)).double().numpy()
    whole = np.concatenate([weight, np.zeros((3, 1))], axis=1)
    inputs = np.concatenate([features.double().numpy(), np.ones((20, 1))], axis=1)
    velocity = np.zeros_like(whole)
    for epoch in range(3):
        rate = 0.1 * (1 + math.cos(math.pi * epoch / 3)) / 2
        order = torch.randperm(20, generator=generator(4, "classifier", 2, epoch)).numpy()
        for start in range(0, 20, 7):
            slope = np.zeros_like(whole)
            rows = order[start : start + 7]
            for row in rows:
                shares = np.exp(whole @ inputs[row])
                slope += np.outer(shares / shares.sum() - np.eye(3)[labels[row]], inputs[row]) / len(rows)
            velocity = 0.9 * velocity + slope + 0.01 * whole
            whole = whole - rate * velocity
    np.testing.assert_allclose(ours, whole, rtol=1e-4, atol=1e-5)


def test_a_stage_is_fitted_to_new_features_and_moved_ones() -> None:
    svm = pytest.importorskip("sklearn.svm")
    store = toy_store(CLASSES)
    session = learned(store, similarity="euclidean")
    engine, network = session.engine, session.learner.network
    features = engine.features(network, torch.from_numpy(store.train.images)).double().numpy()
    own = {label: features[store.train.class_ids == label] for label in range(CLASSES)}
    means = {label: values.mean(axis=0) for label, values in own.items()}
    np.testing.assert_allclose(
        session.learner.buffers[MEANS].numpy(), np.stack([means[label] for label in range(CLASSES)]), rtol=1e-5
    )
    rows, labels = [own[4], own[5]], [4] * 12 + [5] * 12
    for label in range(4):
        nearest = min((4, 5), key=lambda new: float(np.linalg.norm(means[label] - means[new])))
        rows.append(own[nearest] - means[nearest] + means[label])
        labels += [label] * 12
    unit = np.concatenate(rows) / np.linalg.norm(np.concatenate(rows), axis=1, keepdims=True)
    slow = svm.LinearSVC(dual=False, tol=1e-9, max_iter=10000).fit(unit, labels)
    head = network.head.state_dict()
    np.testing.assert_allclose(head["weight"].numpy(), slow.coef_, atol=1e-4)
    np.testing.assert_allclose(head["bias"].numpy(), slow.intercept_, atol=1e-4)
    tested = engine.features(network, torch.from_numpy(store.test.images)).double().numpy()
    scores = engine.infer(network, torch.from_numpy(store.test.images))[1].numpy()
    expected = slow.decision_function(tested / np.linalg.norm(tested, axis=1, keepdims=True))
    np.testing.assert_allclose(scores, expected, atol=1e-3)


def test_the_head_sees_features_of_length_one_in_predictions_only() -> None:
    head, features = UnitInputHead(4, 3), 5 * torch.randn(6, 4)
    torch.nn.init.normal_(head.weight)
    assert torch.equal(head.train()(features), F.linear(features, head.weight, head.bias))
    assert torch.equal(head.eval()(features), F.linear(F.normalize(features, dim=1), head.weight, head.bias))


@both
def test_it_learns(settings: dict[str, Any]) -> None:
    session = learned(toy_store(CLASSES), epochs=12, **settings)
    accuracy, by_stage, _ = session.evaluate(2)
    assert accuracy["cnn"] >= 50, "chance is 17 percent"
    assert min(by_stage["cnn"]) > 0, "no stage is forgotten"


@both
def test_exemplars_are_not_used(settings: dict[str, Any]) -> None:
    store = toy_store(CLASSES)
    without, with_some = learned(store, **settings).learner, learned(store, exemplars=3, **settings).learner
    assert len(with_some.memory) == 3 * CLASSES
    assert torch.equal(without.buffers[MEANS], with_some.buffers[MEANS])
    ours, theirs = without.network.state_dict(), with_some.network.state_dict()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_backbone_and_old_means_stay() -> None:
    session = learned(toy_store(CLASSES), stages=2)
    learner = session.learner
    means = learner.buffers[MEANS].clone()
    before = {name: value.clone() for name, value in learner.network.backbone.state_dict().items()}
    learn_stage(session, 2)
    assert torch.equal(learner.buffers[MEANS][:4], means[:4])
    assert learner.buffers[MEANS][4:].any()
    for name, value in learner.network.backbone.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_run_stopped_between_stages_resumes_exactly(tmp_path: Path) -> None:
    config, store = tiny_config("fetril").with_settings(**QUICK), toy_store()
    assert isinstance(list(run(config, store, tmp_path / "whole"))[-1], RunFinished)
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


def test_a_removed_class_is_not_imitated_again() -> None:
    session = learned(toy_store(CLASSES))
    learner = session.learner
    means, weight = learner.buffers[MEANS].clone(), learner.network.get_parameter("head.weight").detach().clone()
    learner.drop([1], session.method.class_buffers)
    kept = [0, *range(2, CLASSES)]
    assert torch.equal(learner.buffers[MEANS][: CLASSES - 1], means[kept])
    assert not learner.buffers[MEANS][CLASSES - 1].any()
    assert torch.equal(learner.network.get_parameter("head.weight").detach()[: CLASSES - 1], weight[kept])


def test_a_model_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    path = make(tmp_path / "m", NAMES[:3], config=tiny("fetril", epochs=1, memory=memory_of("fetril")))
    assert export_onnx(open_model(path, "cpu", "float32")[0], tmp_path / "model.onnx").difference <= 1e-4


def test_a_classifier_that_cannot_be_fitted_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngramError, match="the classifier fitted after stage 1 is not finite; try a lower fit_lr"):
        fit_softmax(FeTrILSettings(fit_lr=1e30, fit_epochs=3), *blobs(20, 5, 3), 3, seed=1, stage=1)
    monkeypatch.setattr("engram.methods.fetril.NEWTON_STEPS", 1)
    with pytest.raises(EngramError, match=r"with penalty=1 in 1 steps; give a smaller penalty, or classifier=fc"):
        fit_machines(*blobs(20, 5, 3), 3, 1.0)


def test_limits() -> None:
    with pytest.raises(EngramError, match="penalty must be above 0"):
        FeTrILSettings(penalty=0.0)
    with pytest.raises(EngramError, match=r"similarity 'nearest'.*cosine"):
        FeTrILSettings(similarity="nearest")  # pyright: ignore[reportArgumentType]
