"""DER++: stored logits are those of the last step of an image in its own stage, and exemplars stay close to them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engram import IncrementalClassifier, recipe
from engram.contract import ImageStateRows, Output, Step
from engram.core.errors import EngramError
from engram.experiment.session import Session
from engram.methods.derpp import DERPP, STORED, DERPPSettings, stored_distance
from helpers import begin_stage, learn_stage, tiny_config, tiny_session, toy_store, train_phase

OLD, SEEN, CAPACITY = 4, 7, 9


def derpp_session() -> Session:
    return tiny_session(tiny_config("derpp").with_settings(replay=4))


def slow_entropy(scores: np.ndarray, label: int) -> float:
    return math.log(sum(math.exp(score) for score in scores[:SEEN])) - scores[label]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_is_its_formula(seed: int) -> None:
    """Three images of the first stream, two of the second, four new ones; stages of 2, 2 and 3 classes."""
    random = np.random.default_rng(seed)
    scores = np.full((9, CAPACITY), -np.inf)
    scores[:, :SEEN] = random.normal(0, 3, (9, SEEN))
    # Of the base stage, of the second, and one that was never trained on.
    stored = np.full((9, CAPACITY), -np.inf)
    stored[0, :2], stored[1, :4] = random.normal(0, 3, 2), random.normal(0, 3, 4)
    labels = [0, 3, 1, 2, 0, 4, 6, 5, 5]
    arrival = torch.tensor([0, 0, 1, 1, 2, 2, 2] + [2**31] * 2)
    logits, label = torch.tensor(scores, requires_grad=True), torch.tensor(labels)
    rows = torch.arange(9)
    step = Step(
        label,
        label < OLD,
        Output((), torch.zeros(9, 1), logits, logits, torch.ones(())),
        None,
        {},
        {},
        arrival=arrival,
        stage=torch.tensor(2),
        images=ImageStateRows({STORED: torch.tensor(stored)}, rows, rows),
        streams={"logits": slice(0, 3), "labels": slice(3, 5), "main": slice(5, 9)},
    )
    terms = DERPP(DERPPSettings(alpha=0.7, beta=0.4)).loss(step)
    squares = [(scores[0, c] - stored[0, c]) ** 2 for c in range(2)]
    squares += [(scores[1, c] - stored[1, c]) ** 2 for c in range(4)]
    again = [slow_entropy(scores[b], labels[b]) for b in (3, 4)]
    new = [slow_entropy(scores[b], labels[b]) for b in range(5, 9)]
    assert terms["logits"].item() == pytest.approx(0.7 * sum(squares) / 6, rel=1e-9)
    assert terms["replay"].item() == pytest.approx(0.4 * sum(again) / 2, rel=1e-9)
    assert terms["classification"].item() == pytest.approx(sum(new) / 4, rel=1e-9)
    (gradient,) = torch.autograd.grad(terms["logits"], logits, retain_graph=True)
    assert (gradient[0, :2] != 0).all()
    assert (gradient[1, :4] != 0).all()
    assert int((gradient != 0).sum()) == 6
    written, values = step.images.written[STORED]
    assert written.tolist() == [5, 6, 7, 8], "only the new images' logits are stored"
    assert torch.equal(values, logits[5:].detach().float())


def test_images_without_stored_logits_have_no_distance() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    distance = stored_distance(logits, torch.full((2, 3), -torch.inf))
    distance.backward()
    assert float(distance.detach()) == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def train_watched(session: Session, index: int) -> dict[int, Tensor]:
    """Learn a stage; return the logits of each image at its last step in the phase's own stream, by its id."""
    last: dict[int, Tensor] = {}
    stage = begin_stage(session, index)
    (phase,) = session.method.phases(session.learner, stage, session.engine)

    def spy(step: Step) -> dict[str, Tensor]:
        own = step.streams["main"]
        for image, logits in zip(step.images.ids[own].tolist(), step.student.logits[own].detach(), strict=True):
            last[image] = logits.clone()
        return phase.loss(step)

    train_phase(session, stage, replace(phase, loss=spy))
    method, learner, engine = session.method, session.learner, session.engine
    learner.memory.update(stage.pool, method.exemplars(learner, stage, engine), stage.num_seen)
    return last


def test_stored_logits_are_those_of_the_last_step_in_the_images_own_stage() -> None:
    session = derpp_session()
    last: dict[int, Tensor] = {}
    for index in range(3):
        last |= train_watched(session, index)
        memory = session.learner.memory
        assert len(memory) == 6 * (index + 1)
        for label in memory.labels:
            samples = memory.of(label)
            outputs = 2 * (label // 2 + 1)  # that existed in the stage of this class
            for image, stored in zip(samples.sources.tolist(), samples.state[STORED], strict=True):
                assert torch.equal(stored, last[image])
                assert stored[:outputs].isfinite().all()
                assert (stored[outputs:] == -torch.inf).all()


def test_every_batch_has_two_independent_streams_of_exemplars() -> None:
    session = derpp_session()
    learn_stage(session, 0)
    stage = begin_stage(session, 1)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    drawn: dict[str, list[list[int]]] = {"logits": [], "labels": []}

    def spy(step: Step) -> dict[str, Tensor]:
        assert torch.equal(step.exemplar, torch.arange(16) < 8)
        for name, images in drawn.items():
            images.append(step.images.ids[step.streams[name]].tolist())
        return phase.loss(step)

    train_phase(session, stage, replace(phase, loss=spy))
    assert len(drawn["logits"]) == 6
    assert drawn["logits"] != drawn["labels"]


def test_alpha_keeps_the_logits_of_exemplars_close() -> None:
    apart: dict[float, float] = {}
    for alpha in (0.0, 3.0):
        session = tiny_session(tiny_config("derpp", epochs=8).with_settings(replay=6, alpha=alpha, beta=0.0))
        learn_stage(session, 0)
        kept = session.learner.memory.samples()
        assert kept is not None
        learn_stage(session, 1)
        (output,) = session.engine.inference(session.learner.network).outputs(kept.images)
        apart[alpha] = float(stored_distance(output.logits, kept.state[STORED]))
    assert apart[3.0] < apart[0.0] / 2


def stored_of_first_class(classifier: IncrementalClassifier) -> Tensor:
    learner = classifier.model_.learner
    assert learner is not None
    return learner.memory.of(0).state[STORED]


def test_a_model_whose_head_grows_keeps_the_logits_that_were_stored() -> None:
    store = toy_store(5)
    images, labels = store.train.images, store.train.class_ids
    classifier = IncrementalClassifier("derpp", memory=3, epochs=1, backbone="resnet10", device="cpu")
    classifier.fit(images[labels < 2], labels[labels < 2])
    before = stored_of_first_class(classifier)
    assert before.shape == (3, 2)
    for new in ((2, 3), (4,)):
        chosen = np.isin(labels, new)
        classifier.partial_fit(images[chosen], labels[chosen])
    after = stored_of_first_class(classifier)
    assert torch.equal(after[:, :2], before)
    assert after.shape == (3, 5)
    assert (after[:, 2:] == -torch.inf).all()


def test_an_exemplar_keeps_what_a_later_stage_writes() -> None:
    session = derpp_session()
    learn_stage(session, 0)
    stage = begin_stage(session, 1)
    stage.pool.state[STORED][stage.pool.exemplar] = 7.0
    method, learner, engine = session.method, session.learner, session.engine
    learner.memory.update(stage.pool, method.exemplars(learner, stage, engine), stage.num_seen)
    assert (learner.memory.of(0).state[STORED] == 7).all()


def test_it_shares_no_base_stage() -> None:
    assert derpp_session().base_key() is None, "a cached network would come without the logits of its images"


def test_recipes_and_limits() -> None:
    settings = recipe("derpp-cifar100-b50-s10").settings
    assert isinstance(settings, DERPPSettings)
    assert (settings.alpha, settings.beta, settings.replay, settings.train.epochs) == (0.3, 0.5, 32, 160)
    for wrong in ({"alpha": -1.0}, {"beta": -1.0}, {"replay": 0}):
        with pytest.raises(EngramError, match="must be at least"):
            tiny_config("derpp").with_settings(**wrong)
