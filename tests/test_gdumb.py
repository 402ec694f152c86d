"""GDumb: a memory chosen blindly, a restart from the base weights, nothing learned but from the memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engram import recipe, run
from engram.contract import Step, Training
from engram.contract.exemplars import choose_exemplars
from engram.core.events import BaseReused
from engram.data.memory import MemoryConfig
from engram.experiment.base_cache import StageCache
from engram.experiment.session import Session
from engram.methods.blocks.batches import CutMix, Mixed
from engram.methods.gdumb import NormalisedHead, classify
from engram.nn.network import Output
from helpers import learn_stage, tiny_config, tiny_session, toy_store, train_phase

REHEARSE = Training(epochs=2, batch_size=4, lr=0.05, remainder="keep")


def session_of(**changes: object) -> Session:
    config = tiny_config("gdumb").with_settings(rehearse=REHEARSE)
    return tiny_session(dataclasses.replace(config, **changes))


def backbone_of(session: Session) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in session.learner.network.backbone.state_dict().items()}


# The head


def test_normalised_scores_are_their_formula_in_training_and_in_evaluation() -> None:
    random = np.random.default_rng(0)
    head = NormalisedHead(4, 3).double()
    head.grow(3, torch.Generator().manual_seed(0))
    weight, gain, shift = random.normal(size=(3, 4)), random.normal(size=3), random.normal(size=3)
    with torch.no_grad():
        for parameter, value in ((head.weight, weight), (head.gain, gain), (head.shift, shift)):
            parameter.copy_(torch.tensor(value))
    embedding = random.normal(size=(6, 4))
    raw = [[sum(w * x for w, x in zip(row, each, strict=True)) for row in weight] for each in embedding]
    raw = np.array(raw)
    mean, variance = raw.sum(axis=0) / 6, ((raw - raw.sum(axis=0) / 6) ** 2).sum(axis=0) / 6
    trained = head(torch.tensor(embedding)).detach().numpy()
    np.testing.assert_allclose(trained, (raw - mean) / np.sqrt(variance + 1e-5) * gain + shift, rtol=1e-10)
    # The running values move a tenth of the way, the variance by its unbiased estimate.
    running, spread = 0.1 * mean, 0.9 + 0.1 * variance * 6 / 5
    evaluated = head.eval()(torch.tensor(embedding)).detach().numpy()
    np.testing.assert_allclose(evaluated, (raw - running) / np.sqrt(spread + 1e-5) * gain + shift, rtol=1e-10)


def test_one_sample_is_taken_by_the_running_values() -> None:
    head = NormalisedHead(4, 3)
    head.grow(2, torch.Generator().manual_seed(0))
    one = torch.ones(1, 4)
    trained = head(one)
    assert torch.equal(trained, head.eval()(one))


def test_a_fresh_head_forgets_the_running_values_and_a_larger_one_keeps_them() -> None:
    head = NormalisedHead(4, 2)
    head.grow(2, torch.Generator().manual_seed(0))
    head(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    before = head.mean.clone()
    assert before.any()
    head.reserve(5)
    assert torch.equal(head.mean[:2], before)
    assert head.variance[2:].tolist() == [1, 1, 1]
    head.initialise(torch.Generator().manual_seed(2))
    assert not head.mean.any()
    assert head.variance.tolist() == [1] * 5
    assert head.gain[:2].tolist() == [1, 1]


# What a stage does


def test_the_loss_is_cross_entropy_over_the_classes_seen() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, -torch.inf], [0.1, 0.2, 0.3, -torch.inf]], dtype=torch.float64)
    logits.requires_grad_()
    output = Output((), torch.zeros(2, 1), logits, logits, torch.ones(()))
    terms = classify(Step(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.bool), output, None, {}, {}))
    rows = logits.detach().numpy()[:, :3]
    expected = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(rows, (1, 2), strict=True)]
    assert terms["classification"].item() == pytest.approx(np.mean(expected))
    terms["classification"].backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_mixed_image_counts_with_both_labels_by_its_shares(share: float) -> None:
    random = np.random.default_rng(1)
    scores = np.c_[random.normal(size=(5, 3)), np.full(5, -np.inf)]
    logits = torch.tensor(scores, requires_grad=True)
    output = Output((), torch.zeros(5, 1), logits, logits, torch.ones(()))
    own, other = [0, 1, 2, 1, 0], [2, 1, 0, 0, 1]
    mixed = Mixed(torch.tensor(other), torch.tensor(share, dtype=torch.float64))
    step = Step(torch.tensor(own), torch.zeros(5, dtype=torch.bool), output, None, {}, {}, extras=(mixed,))
    terms = classify(step)
    expected = 0.0
    for row, a, b in zip(scores, own, other, strict=True):
        total = np.log(np.exp(row[:3]).sum())
        expected += (share * (total - row[a]) + (1 - share) * (total - row[b])) / 5
    assert terms["classification"].item() == pytest.approx(expected)
    terms["classification"].backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_images_are_mixed_in_every_stage_unless_it_is_turned_off() -> None:
    for probability in (0.5, 0.0):
        session = tiny_session(tiny_config("gdumb").with_settings(rehearse=REHEARSE, cutmix__probability=probability))
        for index in range(2):
            stage = session.stage(index)
            (phase,) = session.method.phases(session.learner, stage, session.engine)
            assert phase.extensions == ((CutMix(0.5),) if probability else ())
            learn_stage(session, index)


def test_every_stage_starts_from_the_base_weights_with_a_new_head() -> None:
    session = session_of()
    learn_stage(session, 0)
    base = backbone_of(session)
    weights: list[Tensor] = []
    for index in (1, 2):
        stage = session.stage(index)
        learned = session.learner.network.head.get_parameter("weight").detach()[:2].clone()
        session.method.grow(session.learner, stage, session.engine)
        assert not torch.isin(session.learner.network.head.get_parameter("weight")[:2], learned).any()
        for name, value in backbone_of(session).items():
            assert torch.equal(value, base[name]), f"{name} at stage {index}, running statistics included"
        weights.append(session.learner.network.head.get_parameter("weight").detach()[:2].clone())
        (phase,) = session.method.phases(session.learner, stage, session.engine)
        train_phase(session, stage, phase)
        for name in ("conv.weight", "bn.running_mean"):
            assert not torch.equal(backbone_of(session)[name], base[name]), "everything trains"
        assert not torch.equal(session.learner.network.head.get_parameter("weight")[:2], weights[-1])
        session.method.finish(session.learner, stage, session.engine)
        session.learner.memory.update(
            stage.pool, choose_exemplars(session.learner, stage, session.engine), stage.num_seen
        )
    assert not torch.equal(weights[0], weights[1]), "the rows of the first classes too are new"


@pytest.mark.parametrize("memory", [MemoryConfig(size=3, selection="random"), MemoryConfig("total", 13, "random")])
def test_later_stages_see_the_memory_alone_and_it_is_what_is_kept(memory: MemoryConfig) -> None:
    session = session_of(memory=memory)
    for index in range(3):
        stage = session.stage(index)
        session.method.grow(session.learner, stage, session.engine)
        (phase,) = session.method.phases(session.learner, stage, session.engine)
        rows = phase.rows()
        assert len(rows) == phase.images
        assert not phase.teacher
        train_phase(session, stage, phase)
        session.method.finish(session.learner, stage, session.engine)
        session.learner.memory.update(
            stage.pool, choose_exemplars(session.learner, stage, session.engine), stage.num_seen
        )
        kept = session.learner.memory.samples()
        assert kept is not None
        if index == 0:
            assert len(rows) == len(stage.pool)
        else:
            assert sorted(stage.pool.sources[rows].tolist()) == sorted(kept.sources.tolist())
            quota = memory.per_class(stage.num_seen)
            assert torch.bincount(stage.pool.labels[rows]).tolist() == [quota] * stage.num_seen


def test_a_last_batch_of_one_image_trains() -> None:
    session = session_of(memory=MemoryConfig(size=3, selection="random"))
    learn_stage(session, 0)
    stage = session.stage(1)  # 12 images of the memory
    session.method.grow(session.learner, stage, session.engine)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    train_phase(session, stage, dataclasses.replace(phase, training=dataclasses.replace(REHEARSE, batch_size=11)))
    assert all(value.isfinite().all() for value in session.learner.network.parameters())


def test_one_class_a_stage_trains() -> None:
    session = session_of(base=1, increment=1)
    for index in range(3):
        learn_stage(session, index)  # refuses a loss that is not finite
    assert session.learner.num_classes == 3


# Sharing the base, recipes


def test_the_base_is_shared_whatever_the_later_stages_do(tmp_path: Path) -> None:
    config = tiny_config("gdumb").with_settings(rehearse=REHEARSE)
    other = config.with_settings(rehearse__epochs=1)
    cache = StageCache(tmp_path)
    list(run(config, toy_store(), cache=cache))
    shared = list(run(other, toy_store(), cache=cache))
    assert any(isinstance(event, BaseReused) for event in shared)
    alone = list(run(other, toy_store()))
    assert shared[-1].result["final_accuracy"] == alone[-1].result["final_accuracy"]  # pyright: ignore[reportAttributeAccessIssue]


def test_recipes_choose_the_memory_blindly_and_end_their_cycles() -> None:
    for name in ("gdumb-cifar100-b50-s10", "gdumb-mini-b10-s5", "gdumb-folder"):
        config = recipe(name)
        assert config.memory.selection == "random"
        assert config.settings.rehearse == Training(  # pyright: ignore[reportAttributeAccessIssue]
            32, 16, lr=0.05, schedule="restarts", factor=0.01, weight_decay=1e-6, clip=None, clip_norm=10.0
        )
    epochs = [recipe(f"gdumb-{name}").settings.train.epochs for name in ("cifar100-b50-s5", "mini-b10-s5")]  # pyright: ignore[reportAttributeAccessIssue]
    assert epochs == [256, 16]
    assert recipe("afc-cifar100-b50-s10").memory.selection == "herding"
