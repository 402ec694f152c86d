"""BiC: what is held back stays unseen; the correction is fitted alone, changes predictions, goes with the teacher."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engram.contract import Phase, Training
from engram.contract.schedules import learning_rates
from engram.core.errors import EngramError
from engram.data.memory import MemoryConfig
from engram.data.stage import Stage
from engram.experiment.session import Session
from engram.methods.bic import BiC, BiCSettings, CorrectedHead, balanced_validation, held_back
from helpers import learn_stage, predict, tiny_config, tiny_session, toy_store, train_phase
from test_distillation import case_of, slow_binary, slow_parts

STORE = toy_store(per_class=24)


def bic_session(memory: int = 12, epochs: int = 3, increment: int = 2, corrections: int = 20) -> Session:
    config = tiny_config("bic", epochs=epochs, increment=increment, memory=MemoryConfig(size=memory))
    return tiny_session(config.with_settings(correction__epochs=corrections), STORE)


def head_of(session: Session) -> CorrectedHead:
    head = session.learner.network.head
    assert isinstance(head, CorrectedHead)
    return head


def phases_of(session: Session, index: int) -> tuple[Stage, list[Phase]]:
    stage = session.stage(index)
    session.method.grow(session.learner, stage, session.engine)
    return stage, session.method.phases(session.learner, stage, session.engine)


@pytest.mark.parametrize(("memory", "held"), [(2, 1), (3, 1), (12, 2), (20, 2)])
def test_a_tenth_of_the_exemplars_is_held_back_and_never_trained_on(memory: int, held: int) -> None:
    session = bic_session(memory, epochs=1, corrections=1)
    trained: set[int] = set()
    validated: set[int] = set()
    for index in range(3):
        stage = session.stage(index)
        phases = session.method.phases(session.learner, stage, session.engine)
        trained |= set(stage.pool.sources[phases[0].rows()].tolist())
        if index:
            rows = phases[1].rows()
            assert len(rows) == phases[1].images
            counts = torch.bincount(stage.pool.labels[rows])
            assert counts.tolist() == [held] * stage.num_seen, "balanced over old and new classes"
            validated |= set(stage.pool.sources[rows].tolist())
        learn_stage(session, index)
        assert len(session.learner.memory) == memory * stage.num_seen
    assert len(validated) == 6 * held, "the same images of a class at every stage"
    assert not trained & validated
    assert len(trained) == 6 * (24 - held)


def test_a_memory_that_shrinks_keeps_the_share_that_is_held_back() -> None:
    memory = MemoryConfig(budget="total", size=72)  # 36, 18 and 12 a class
    session = tiny_session(
        tiny_config("bic", epochs=1, memory=memory).with_settings(correction__epochs=1), toy_store(per_class=40)
    )
    settings = session.method.settings
    assert isinstance(settings, BiCSettings)
    for index in range(2):
        learn_stage(session, index)
    stage = session.stage(2)
    held = held_back(settings, session.learner, stage)
    assert [len(held[label]) for label in range(6)] == [2, 2, 2, 2, 2, 2]
    assert torch.bincount(stage.pool.labels[balanced_validation(held)]).tolist() == [2] * 6


def test_the_correction_sees_as_many_images_of_each_class_that_has_any() -> None:
    held = {0: torch.tensor([3, 4, 5]), 1: torch.tensor([6, 7]), 2: torch.tensor([], dtype=torch.int64)}
    assert balanced_validation(held).tolist() == [3, 4, 6, 7]


def test_the_correction_is_trained_alone_on_images_as_they_are() -> None:
    session = bic_session()
    learn_stage(session, 0)
    stage, (main, correct) = phases_of(session, 1)
    assert (correct.augment, correct.frozen, correct.teacher) == (False, True, False)
    network = session.learner.network
    train_phase(session, stage, main)
    assert head_of(session).correction.tolist() == [1, 0]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    train_phase(session, stage, correct, 1)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.correction"}


@pytest.mark.parametrize("increment", [1, 2])
def test_the_correction_is_the_best_there_is(increment: int) -> None:
    """Where it ends, no small change of factor or offset lowers cross-entropy plus penalty, by the formula."""
    session = bic_session(increment=increment, corrections=200)
    learn_stage(session, 0)
    stage, (main, correct) = phases_of(session, 1)
    train_phase(session, stage, main)
    _, raw = session.engine.infer(session.learner.network, stage.pool.images[correct.rows()])
    train_phase(session, stage, correct, 1)
    labels, seen = stage.pool.labels[correct.rows()].tolist(), stage.num_seen

    def objective(factor: float, offset: float) -> float:
        total = 0.0
        for row, label in zip(raw.double().tolist(), labels, strict=True):
            scores = [score if c < stage.num_old else factor * score + offset for c, score in enumerate(row[:seen])]
            top = max(scores)
            total += math.log(sum(math.exp(score - top) for score in scores)) + top - scores[label]
        penalty = 0.1 * offset**2 / 2 + (0.1 * (factor - 1) ** 2 / 2 if increment == 1 else 0)
        return total / len(labels) + penalty

    factor, offset = head_of(session).correction.tolist()
    assert (factor, offset) != (1, 0)
    assert objective(factor, offset) < objective(1, 0)
    for there in ((0.05, 0), (-0.05, 0), (0, 0.05), (0, -0.05)):
        assert objective(factor, offset) < objective(factor + there[0], offset + there[1]) + 1e-6


def test_the_correction_changes_the_predictions_of_the_newest_classes_scores_alone() -> None:
    session = bic_session()
    for index in range(3):
        learn_stage(session, index)
    head = head_of(session)
    assert head.corrected.tolist() == [False] * 4 + [True] * 2, "one pair of numbers, for the newest classes"
    images = torch.from_numpy(STORE.test.images)
    _, scores = session.engine.infer(session.learner.network, images)
    fitted = predict(session, images)["cnn"]
    assert (fitted == scores.argmax(dim=1).numpy()).all()
    with torch.no_grad():
        head.correction.copy_(torch.tensor([0.0, -1e3]))
    _, others = session.engine.infer(session.learner.network, images)
    assert torch.equal(others[:, :4], scores[:, :4])
    assert not (others[:, 4:] == scores[:, 4:]).any()
    assert predict(session, images)["cnn"].max() < 4


def test_the_next_stage_is_taught_by_the_corrected_scores_and_starts_without_a_correction() -> None:
    session = bic_session()
    for index in range(2):
        learn_stage(session, index)
    images = torch.from_numpy(STORE.test.images)
    _, corrected = session.engine.infer(session.learner.network, images)
    factor, offset = head_of(session).correction.tolist()
    phases_of(session, 2)
    _, taught = session.engine.infer(session.learner.teacher, images)
    assert torch.equal(taught[:, :4], corrected[:, :4])
    _, student = session.engine.infer(session.learner.network, images)
    torch.testing.assert_close(factor * student[:, 2:4] + offset, taught[:, 2:4])
    torch.testing.assert_close(student[:, :2], taught[:, :2])


@pytest.mark.parametrize("seed", range(3))
def test_losses_are_their_formulas(seed: int) -> None:
    case = case_of(seed)
    classified, distilled = slow_parts(case, 2.0)
    method = BiC(BiCSettings())
    step, scores = case.step(weights={"classification": 0.25, "distillation": 0.75})
    terms = method.loss(step)
    assert float(terms["classification"].detach()) == pytest.approx(0.25 * classified, rel=1e-6)
    assert float(terms["distillation"].detach()) == pytest.approx(0.75 * distilled, rel=1e-6)

    step, scores = case.step(weights={"offset": 0.1, "factor": 0.3})
    correction = torch.tensor([0.5, 2.0], requires_grad=True)
    step = replace(step, student=step.student._replace(extras={"correction": correction}))
    terms = method.correct(step)
    assert float(terms["classification"].detach()) == pytest.approx(classified, rel=1e-6)
    assert float(terms["penalty"].detach()) == pytest.approx(0.1 * 2.0**2 / 2 + 0.3 * 0.5**2 / 2, rel=1e-6)
    (gradient,) = torch.autograd.grad(terms["penalty"], correction)
    assert gradient.tolist() == pytest.approx([0.3 * -0.5, 0.1 * 2.0])
    assert scores.requires_grad


@pytest.mark.parametrize("seed", range(3))
def test_the_distillation_of_sigmoids_is_its_formula(seed: int) -> None:
    case = case_of(seed)
    classified, _ = slow_parts(case, 2.0)
    step, scores = case.step()
    terms = BiC(BiCSettings(distillation="sigmoid")).loss(step)
    wanted = [
        slow_binary(ours[column] / 2, 1 / (1 + math.exp(-theirs[column] / 2)))
        for ours, theirs in zip(case.student, case.teacher, strict=True)
        for column in range(5)
    ]
    assert float(terms["classification"].detach()) == pytest.approx(classified, rel=1e-6)
    assert float(terms["distillation"].detach()) == pytest.approx(sum(wanted) / len(wanted), rel=1e-6)
    (gradient,) = torch.autograd.grad(terms["distillation"], scores)
    assert (gradient[:, :5] != 0).all()
    assert (gradient[:, 5:] == 0).all()


def test_the_factor_is_held_only_where_one_class_is_new() -> None:
    for increment, factor in ((1, 0.1), (2, 0.0)):
        session = bic_session(increment=increment)
        learn_stage(session, 0)
        _, (_, correct) = phases_of(session, 1)
        assert dict(correct.weights) == {"offset": 0.1, "factor": factor}


def test_a_memory_of_one_exemplar_a_class_is_refused() -> None:
    with pytest.raises(EngramError, match="in stage 1 no old class has two; use a larger memory"):
        bic_session(memory=1).plan()


@pytest.mark.parametrize("change", [{"validation": 0.0}, {"validation": 0.7}, {"penalty": -1.0}, {"temperature": 0.0}])
def test_settings_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(EngramError, match=f"{name} must be"):
        tiny_config("bic").with_settings(**change)


def test_a_distillation_that_there_is_not_is_refused() -> None:
    with pytest.raises(EngramError, match="distillation must be one of softmax, sigmoid, got 'sigmoids'"):
        tiny_config("bic").with_settings(distillation="sigmoids")


def test_its_schedules_are_those_of_the_method() -> None:
    def rates(training: Training, *epochs: int) -> list[float]:
        return [round(float(learning_rates(training, 1)[epoch]), 6) for epoch in epochs]

    settings = BiCSettings()
    assert rates(settings.train, 99, 100, 149, 150, 199, 200) == [0.1, 0.01, 0.01, 0.001, 0.001, 0.0001]
    assert rates(settings.correction, 59, 60, 119, 120, 159, 160) == [0.1, 0.01, 0.01, 0.001, 0.001, 0.0001]
    assert settings.correction.weight_decay == 0
