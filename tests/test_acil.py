"""ACIL and DS-AL: regressions on random features are those over all images seen, in any order and any stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engram.core.errors import EngramError
from engram.core.events import RunFinished, StageFinished
from engram.data.memory import MemoryConfig
from engram.data.stage import Stage
from engram.data.store import ImageStore
from engram.experiment.recipes import recipe
from engram.experiment.runner import resume, run
from engram.experiment.session import Session
from engram.methods.acil import ACILSettings, DSALSettings, RandomFeaturesHead
from engram.methods.blocks.closed_form import pack_symmetric, ridge_weights, unpack_symmetric
from engram.models.edit import remove_class
from engram.models.onnx_export import export_onnx
from engram.models.store.codec import open_model
from helpers import last_state, learn_stage, tiny_config, tiny_session, toy_store
from model_helpers import NAMES, learn, make, memory_of, pictures, tiny

CLASSES, BASE, GAMMA = 7, 2, 0.1
both = pytest.mark.parametrize("method", ["acil", "ds-al"])


def learned(method: str, store: ImageStore, increment: int = 2, exemplars: int = 0, **settings: float) -> Session:
    memory = MemoryConfig(size=exemplars) if exemplars else MemoryConfig("none", 0)
    config = tiny_config(method, base=BASE, increment=increment, memory=memory)
    session = tiny_session(config.with_settings(**settings), store)
    for index in range(len(session.stream)):
        learn_stage(session, index)
    return session


def projected(session: Session) -> tuple[np.ndarray, np.ndarray]:
    """x R of every training image, one after the other, and the labels; the class order is the natural one."""
    train, head = session.store.train, session.learner.network.head
    assert isinstance(head, RandomFeaturesHead)
    assert head.projection is not None
    features = [
        session.engine.features(session.learner.network, torch.from_numpy(image[None])) for image in train.images
    ]
    return torch.cat(features).double().numpy() @ head.projection.double().numpy(), train.class_ids


def solution(session: Session, stream: str = "main", gamma: float = GAMMA) -> np.ndarray:
    """The weights of a stream (M, K), in float64, from the sums that the learner keeps."""
    buffers = session.learner.buffers
    sums = buffers[f"{stream}.B"]
    return ridge_weights(unpack_symmetric(buffers[f"{stream}.A"], sums.shape[1]), sums, gamma).T.numpy()


class Recursion:
    """Recursive least squares, one batch after the other: W <- W + P H^T (Y - H W), with P updated first."""

    def __init__(self, width: int, gamma: float) -> None:
        self.inverse = np.eye(width) / gamma
        self.weight = np.zeros((width, CLASSES))

    def add(self, hidden: np.ndarray, targets: np.ndarray) -> None:
        inverse = self.inverse
        middle = np.linalg.inv(np.eye(len(hidden)) + hidden @ inverse @ hidden.T)
        self.inverse = inverse - inverse @ hidden.T @ middle @ hidden @ inverse
        self.weight = self.weight + self.inverse @ hidden.T @ (targets - hidden @ self.weight)


def relu(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 0)


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()


def test_the_head_is_the_solution_over_all_images() -> None:
    session = learned("acil", toy_store(CLASSES), gamma=0.3)
    inputs, labels = projected(session)
    products, sums = np.zeros(()), np.zeros(())
    for row, label in zip(inputs, labels, strict=True):
        products = products + np.outer(relu(row), relu(row))
        sums = sums + np.outer(relu(row), np.eye(CLASSES)[label])
    slow = np.linalg.inv(products + 0.3 * np.eye(len(products))) @ sums
    assert_close(solution(session, gamma=0.3), slow)
    head = session.learner.network.head
    np.testing.assert_allclose(head.get_parameter("weight").detach().numpy(), slow.T, rtol=1e-4, atol=1e-5)
    assert dict(head.named_parameters()).keys() == {"weight"}, "no bias"
    images = torch.from_numpy(session.store.train.images)
    scores = session.engine.infer(session.learner.network, images)[1].numpy()
    np.testing.assert_allclose(scores, relu(inputs) @ slow, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("batch", "shuffled"), [(1, False), (5, True), (1000, False)])
def test_the_recursion_of_the_paper_gives_the_same_weights(batch: int, shuffled: bool) -> None:
    session = learned("acil", toy_store(CLASSES), increment=3)
    inputs, labels = projected(session)
    order = np.random.default_rng(3).permutation(len(labels)) if shuffled else np.arange(len(labels))
    slow = Recursion(inputs.shape[1], GAMMA)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        slow.add(relu(inputs[rows]), np.eye(CLASSES)[labels[rows]])
    assert_close(solution(session), slow.weight)


def test_how_classes_are_divided_into_stages_makes_no_difference() -> None:
    store = toy_store(CLASSES)
    one, five = learned("acil", store, increment=1), learned("acil", store, increment=5)
    assert_close(solution(one), solution(five))
    ours, theirs = (each.learner.network.head.state_dict() for each in (one, five))
    assert torch.equal(ours["projection"], theirs["projection"])
    assert torch.allclose(ours["weight"], theirs["weight"], rtol=1e-4, atol=1e-6)


def recursive_streams(session: Session, batch: int | None) -> list[np.ndarray]:
    """Both weights by the recursion of the public code, which goes from batch to batch; None: a stage is one batch."""
    inputs, labels = projected(session)
    main, second = Recursion(inputs.shape[1], GAMMA), Recursion(inputs.shape[1], 0.2)
    for index in range(len(session.stream)):
        new = session.stream.new_labels(index)
        rows = np.flatnonzero(np.isin(labels, list(new)))
        for part in np.array_split(rows, 1 if batch is None else len(rows) // batch):
            targets = np.eye(CLASSES)[labels[part]]
            main.add(relu(inputs[part]), targets)
            residual = targets - relu(inputs[part]) @ main.weight
            residual[:, [label for label in range(CLASSES) if label not in new]] = 0
            second.add(np.tanh(inputs[part]), residual)
    return [main.weight, second.weight]


def test_the_second_stream_learns_what_the_first_leaves_over_of_new_classes() -> None:
    session = learned("ds-al", toy_store(CLASSES), gamma_compensation=0.2, ratio=0.7)
    inputs, labels = projected(session)
    # Stage by stage, with the sums written out.
    products, sums, outer, left = np.zeros(()), np.zeros(()), np.zeros(()), np.zeros(())
    main, second = np.zeros(()), np.zeros(())
    for index in range(len(session.stream)):
        new = session.stream.new_labels(index)
        rows = [row for row, label in enumerate(labels) if label in new]
        for row in rows:
            products = products + np.outer(relu(inputs[row]), relu(inputs[row]))
            sums = sums + np.outer(relu(inputs[row]), np.eye(CLASSES)[labels[row]])
        main = np.linalg.inv(products + GAMMA * np.eye(len(products))) @ sums
        for row in rows:
            error = np.eye(CLASSES)[labels[row]] - relu(inputs[row]) @ main
            error = np.array([error[label] if label in new else 0 for label in range(CLASSES)])
            outer = outer + np.outer(np.tanh(inputs[row]), np.tanh(inputs[row]))
            left = left + np.outer(np.tanh(inputs[row]), error)
        second = np.linalg.inv(outer + 0.2 * np.eye(len(outer))) @ left
    assert_close(solution(session), main)
    assert_close(solution(session, "compensation", 0.2), second)
    scores = session.engine.infer(session.learner.network, torch.from_numpy(session.store.train.images))[1].numpy()
    expected = relu(inputs) @ main + 0.7 * np.tanh(inputs) @ second
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-4)


def test_the_second_stream_is_that_of_the_public_code_where_a_stage_is_one_batch() -> None:
    session = learned("ds-al", toy_store(CLASSES), gamma_compensation=0.2)
    main, second = recursive_streams(session, None)
    assert_close(solution(session), main)
    assert_close(solution(session, "compensation", 0.2), second)
    main, interleaved = recursive_streams(session, 4)
    assert_close(solution(session), main)
    assert np.abs(interleaved - second).max() > 0.01 * np.abs(second).max(), "there, the batches make a difference"


def test_without_the_second_stream_it_is_acil() -> None:
    store = toy_store(CLASSES)
    images = torch.from_numpy(store.test.images)
    ours, theirs = learned("ds-al", store, ratio=0.0), learned("acil", store)
    scores = [each.engine.infer(each.learner.network, images)[1] for each in (ours, theirs)]
    assert torch.equal(*scores)


def test_random_features_come_of_the_seed_and_never_change() -> None:
    def projection(session: Session) -> torch.Tensor:
        return session.learner.network.head.get_buffer("projection").clone()

    session = tiny_session(tiny_config("acil"))
    assert "head.projection" not in session.learner.network.state_dict(), "the base stage is that of the family"
    learn_stage(session, 0)
    first = projection(session)
    learn_stage(session, 1)
    assert torch.equal(projection(session), first)
    dim, width = first.shape
    assert width == 32
    assert float(first.abs().max()) <= dim**-0.5
    assert abs(float(first.std()) - (3 * dim) ** -0.5) < 0.05 * dim**-0.5
    other = tiny_session(tiny_config("acil", seed=2))
    learn_stage(other, 0)
    assert not torch.allclose(projection(other), first, atol=1e-3)


@both
def test_exemplars_are_not_counted_again(method: str) -> None:
    store = toy_store(CLASSES)
    without, with_some = learned(method, store).learner, learned(method, store, exemplars=3).learner
    assert len(with_some.memory) == 3 * CLASSES
    for name, value in without.buffers.items():
        assert torch.equal(value, with_some.buffers[name]), name


def test_only_half_of_a_symmetric_matrix_is_kept() -> None:
    values = torch.randn(5, 5, dtype=torch.float64)
    matrix = values + values.T
    packed = pack_symmetric(matrix)
    assert packed.shape == (15,)
    assert torch.equal(unpack_symmetric(packed, 5), matrix)
    buffers = learned("ds-al", toy_store(3), increment=1).learner.buffers
    assert {name: tuple(value.shape) for name, value in buffers.items()} == {
        f"{stream}.{name}": shape
        for stream in ("main", "compensation")
        for name, shape in (("A", (32 * 33 // 2,)), ("B", (3, 32)))
    }
    assert {value.dtype for value in buffers.values()} == {torch.float64}


@both
def test_a_run_stopped_between_stages_resumes_exactly(method: str, tmp_path: Path) -> None:
    config, store = tiny_config(method), toy_store()
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


@both
def test_after_a_removal_the_other_classes_are_solved_as_before(method: str) -> None:
    session = learned(method, toy_store(CLASSES))
    before, kept = solution(session), [0, *range(2, CLASSES)]
    session.learner.drop([1], session.method.class_buffers)
    after = solution(session)
    assert_close(after[:, : CLASSES - 1], before[:, kept])
    assert not after[:, CLASSES - 1].any()


@both
def test_a_model_learns_after_a_removal(method: str, tmp_path: Path) -> None:
    path = make(tmp_path / "m", NAMES[:3], NAMES[3:4], config=tiny(method, epochs=10, memory=memory_of(method)))
    remove_class(path, NAMES[1])
    learn(path, NAMES[4:5])
    model = open_model(path, "cpu", "float32")[0]
    left = [NAMES[0], *NAMES[2:5]]
    assert model.labels == left
    images, labels = pictures(left, 6, seed=4)
    found = model.probabilities(images).argmax(axis=1)
    assert np.mean([left[place] == label for place, label in zip(found, labels, strict=True)]) > 0.7


def test_a_model_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    path = make(tmp_path / "m", NAMES[:3], config=tiny("ds-al", epochs=1, memory=memory_of("ds-al")))
    assert export_onnx(open_model(path, "cpu", "float32")[0], tmp_path / "model.onnx").difference <= 1e-4


@both
def test_small_data_sets_have_fewer_random_features(method: str) -> None:
    widths = {name: recipe(f"{method}-{name}").settings for name in ("cifar100-b50-s10", "mini-b10-s5", "folder")}
    assert {name: settings.width for name, settings in widths.items()} == {  # pyright: ignore[reportAttributeAccessIssue]
        "cifar100-b50-s10": 8192,
        "mini-b10-s5": 1024,
        "folder": 1024,
    }


def test_sums_that_do_not_fit_into_memory_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.core.memory_limits.free_memory", lambda: 8 * 10**9)
    session = tiny_session(tiny_config("acil").with_settings(width=20000))
    with pytest.raises(EngramError, match=r"20000 random features need 16.0 GB of memory.*give a smaller width"):
        session.plan()
    tiny_session(tiny_config("acil").with_settings(width=8192)).plan()


def test_a_regression_without_a_solution_is_explained() -> None:
    with pytest.raises(EngramError, match=r"no solution in float64 with gamma=1e-30; give a larger gamma"):
        ridge_weights(torch.ones(3, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64), 1e-30)


def test_features_that_are_not_finite_are_refused() -> None:
    session = tiny_session(tiny_config("acil"))

    def spoil(stage: Stage) -> None:
        next(session.learner.network.backbone.parameters()).data.fill_(torch.nan)

    with pytest.raises(EngramError, match="features after stage 0 are not finite; try a lower learning rate"):
        learn_stage(session, 0, spoil)


def test_limits() -> None:
    with pytest.raises(EngramError, match="gamma must be above 0"):
        ACILSettings(gamma=0.0)
    with pytest.raises(EngramError, match="width must be at least 1"):
        ACILSettings(width=0)
    with pytest.raises(EngramError, match="ratio must be at least 0"):
        DSALSettings(ratio=-0.1)
