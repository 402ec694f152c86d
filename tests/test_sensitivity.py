"""How much each parameter matters to single images: the fast way against slow loops."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engram.engine.sensitivity
from engram.contract import Step
from engram.core.errors import EngramError
from engram.data.augment import Augmentation
from engram.data.memory import MemoryConfig
from engram.data.stage import Stage
from engram.experiment.session import Session
from engram.methods.penalty import EWC, MAS, EWCSettings, MeasuredSettings, draw_labels
from engram.nn.heads import LSCHead
from engram.nn.network import Network
from helpers import buffers_of, learn_stage, parameters_of, tiny_config, tiny_session

squared_length = MAS(MeasuredSettings()).measure

SHARPNESS = 1.5  # of the proxies' similarities


def trained(**changes: Any) -> tuple[Session, Stage]:
    """A session two stages on, and the second of them; its norms' statistics are not those of any batch."""
    session = tiny_session(tiny_config("ewc", memory=MemoryConfig(size=3), **changes))
    return session, [learn_stage(session, index) for index in range(2)][-1]


def gradients_of(network: Network, stage: Stage, row: int, kind: str) -> dict[str, Tensor]:
    """One image's gradient of the log-likelihood of its true or top label, or of the squared length of its scores."""
    image, head = (stage.pool.pixels[row].double() / 255).permute(2, 0, 1)[None], network.head
    maps, _ = network.backbone((image - network.mean) / network.std)
    scores = head.get_parameter("weight") @ maps[-1].relu().mean(dim=(2, 3))[0] + head.get_parameter("bias")
    scores = scores[: stage.num_seen]
    if kind == "length":
        value = sum(score**2 for score in scores)
    else:
        label = int(stage.pool.labels[row]) if kind == "true" else int(scores.argmax())
        value = scores[label] - torch.log(sum((torch.exp(score) for score in scores), torch.zeros(())))
    assert isinstance(value, Tensor)
    named = dict(network.named_parameters())
    return dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))


def slow_sensitivity(network: Network, stage: Stage, kind: str) -> dict[str, Tensor]:
    """In float64, image by image: the mean squared gradient, or the mean absolute one of the length."""
    network = copy.deepcopy(network).double().eval()
    totals = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    for row in range(len(stage.pool)):
        for name, gradient in gradients_of(network, stage, row, kind).items():
            totals[name] += gradient.abs() if kind == "length" else gradient**2
    return {name: total / len(stage.pool) for name, total in totals.items()}


@pytest.mark.parametrize("kind", ["true", "predicted", "length"])
def test_the_sensitivity_is_that_of_single_images(kind: str) -> None:
    session, stage = trained()
    learner, engine = session.learner, session.engine
    if kind == "length":
        ours = engine.sensitivity(learner, stage, stage.all_rows, squared_length, power=1)
    else:
        ours = engine.sensitivity(learner, stage, stage.all_rows, EWC(EWCSettings(label=kind)).measure, 2)  # pyright: ignore[reportArgumentType]
    theirs = slow_sensitivity(learner.network, stage, kind)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.any(), name
        scale = float(value.max())
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-3, atol=1e-5 * scale, msg=name)


def test_what_passes_cannot_sum_is_refused() -> None:
    session, stage = trained()
    learner, engine, rows = session.learner, session.engine, stage.all_rows
    with pytest.raises(EngramError, match=r"one value per image, .*it returned a tensor of the shape \(\)"):
        engine.sensitivity(learner, stage, rows, lambda step, draws: squared_length(step, draws).mean(), power=1)
    with pytest.raises(EngramError, match=r"visit of a sweep must return a list of tensors.*it returned a dict"):
        engine.sweep(learner, stage, rows, lambda step: {"total": step.labels.sum()}, 4)  # pyright: ignore


def test_a_norm_that_hardly_varies_counts_as_it_runs() -> None:
    """Of a channel whose running variance is as small as the norm's own epsilon, both are in what the norm sees."""
    session, stage = trained()
    learner = session.learner
    norm = next(module for module in learner.network.modules() if isinstance(module, nn.BatchNorm2d))
    assert norm.running_var is not None
    norm.running_var.fill_(norm.eps)
    ours = session.engine.sensitivity(learner, stage, stage.all_rows, squared_length, power=1)
    for name, value in slow_sensitivity(learner.network, stage, "length").items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-3, atol=1e-5 * float(value.max()), msg=name)


def cosines_to_score(cosines: Tensor, similarity: str) -> Tensor:
    """A class's score from the cosines of its proxies."""
    values = [SHARPNESS**2 * (2 * (cosine - 1) if similarity == "distance" else cosine) for cosine in cosines]
    total = sum((torch.exp(value) for value in values), torch.zeros(()))
    return sum((torch.exp(value) / total * value for value in values), torch.zeros(()))


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("head", ["distance", "cosine", "plain"])
def test_heads_that_compare_directions_have_a_sensitivity_too(head: str, power: Any) -> None:
    """Scores and scale as an objective may use them, each image by itself in float64."""
    session = tiny_session(tiny_config("ucir" if head == "plain" else "afc"))
    stage = [learn_stage(session, index) for index in range(2)][-1]
    if isinstance(session.learner.network.head, LSCHead):
        session.learner.network.head.similarity = head
        session.learner.network.head.sharpness = SHARPNESS

    def objective(step: Step, numbers: Tensor) -> Tensor:
        del numbers
        said = step.student
        return -F.cross_entropy(said.logits, step.labels, reduction="none") + said.scale * said.embedding[:, 0]

    ours = session.engine.sensitivity(session.learner, stage, stage.all_rows, objective, power)
    network = copy.deepcopy(session.learner.network).double().eval()
    named = dict(network.named_parameters())
    theirs = {name: torch.zeros_like(value) for name, value in named.items()}
    for row in range(len(stage.pool)):
        image = (stage.pool.pixels[row].double() / 255).permute(2, 0, 1)[None]
        embedding = network.backbone((image - network.mean) / network.std)[1][0]
        proxies = named["head.weight"][: stage.num_seen]
        scores = []
        for weight in proxies:
            cosines = [
                p @ embedding / (p.square().sum() * embedding.square().sum()).sqrt()
                for p in weight.view(-1, weight.shape[-1])
            ]
            scores.append(cosines[0] if head == "plain" else cosines_to_score(torch.stack(cosines), head))
        logits = [named["head.scale"] * score for score in scores]
        value = logits[int(stage.pool.labels[row])] - torch.log(
            torch.stack([torch.exp(logit) for logit in logits]).sum()
        )
        value = value + named["head.scale"] * embedding[0]
        gradients = torch.autograd.grad(value, list(named.values()))
        for name, gradient in zip(named, gradients, strict=True):
            theirs[name] += gradient.abs() ** power / len(stage.pool)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.any(), name
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-3, atol=1e-5 * float(value.max()), msg=name)


def test_an_objective_without_the_scale_does_not_need_it() -> None:
    session = tiny_session(tiny_config("afc"))
    stage = learn_stage(session, 0)

    def objective(step: Step, numbers: Tensor) -> Tensor:
        return step.student.embedding.square().sum(dim=1) + numbers * 0

    ours = session.engine.sensitivity(session.learner, stage, stage.all_rows, objective, 2)
    assert not ours["head.scale"].any()
    assert not ours["head.weight"].any()
    assert ours["backbone.conv.weight"].any()


@pytest.mark.parametrize(
    ("method", "what"), [("der", "ExpandingHead"), ("bic", "CorrectedHead"), ("ucir-dde", "effect")]
)
def test_a_network_without_rules_is_refused_and_left_as_it_was(method: str, what: str) -> None:
    session = tiny_session(tiny_config(method))
    stage, network = learn_stage(session, 0), session.learner.network.train()
    with pytest.raises(EngramError, match=f"computed for Conv2d, .*LSCHead, but not for {what}; a method"):
        session.engine.sensitivity(session.learner, stage, stage.all_rows, squared_length, power=1)
    assert network.training


@pytest.mark.parametrize("label", ["true", "sampled"])
def test_the_sensitivity_does_not_depend_on_the_batches(label: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, stage = trained()

    def fisher(images: int) -> dict[str, Tensor]:
        monkeypatch.setitem(engram.engine.sensitivity.PIXELS, "cpu", images * 8 * 8)
        log_likelihood = EWC(EWCSettings(label=label)).measure
        return session.engine.sensitivity(session.learner, stage, stage.all_rows, log_likelihood, power=2)

    whole = fisher(1000)
    for images in (1, 7):
        for name, value in fisher(images).items():
            torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-6 * float(whole[name].max()), msg=name)


def test_of_images_that_are_not_seen_whole_the_centre_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    session, stage = trained(augmentation=Augmentation(pad=0, view=0.5))
    edge = stage.pool.images.shape[1] // 4
    cut = stage.pool.pixels[:, edge:-edge, edge:-edge]
    assert tuple(cut.shape[1:3]) == session.engine.image_size
    monkeypatch.setitem(engram.engine.sensitivity.PIXELS, "cpu", 5 * cut.shape[1] * cut.shape[2])
    batches: list[int] = []

    def objective(step: Step, numbers: Tensor) -> Tensor:
        batches.append(len(numbers))
        return squared_length(step, numbers)

    ours = session.engine.sensitivity(session.learner, stage, stage.all_rows, objective, power=1)
    assert max(batches) == 5, "as many images as their centres leave room for"
    seen = replace(stage, pool=replace(stage.pool, images=cut))
    for name, value in slow_sensitivity(session.learner.network, seen, "length").items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-3, atol=1e-5 * float(value.max()), msg=name)


def test_labels_are_drawn_anew_in_each_stage() -> None:
    session, stage = trained()
    drawn: list[Tensor] = []

    def objective(step: Step, numbers: Tensor) -> Tensor:
        drawn.append(numbers)
        return squared_length(step, numbers)

    for index in (1, 1, 2):
        session.engine.sensitivity(session.learner, replace(stage, index=index), stage.all_rows, objective, power=1)
    first, again, other = drawn
    assert torch.equal(first, again)
    assert not torch.isin(first, other).any()


def test_the_square_of_the_mean_gradient_is_something_else() -> None:
    """What public code computes shrinks as the batch grows; the mean of the squares does not."""
    session, stage = trained()
    learner = session.learner
    fisher = session.engine.sensitivity(learner, stage, stage.all_rows, EWC(EWCSettings(label="true")).measure, power=2)
    network = copy.deepcopy(learner.network).double().eval()
    rows = range(len(stage.pool))
    name = "backbone.conv.weight"
    mean = torch.stack([gradients_of(network, stage, row, "true")[name] for row in rows]).mean(dim=0)
    assert float(mean.square().sum()) < 0.5 * float(fisher[name].sum())


def test_the_sensitivity_leaves_everything_as_it_was() -> None:
    session, stage = trained()
    network = session.learner.network
    parameters, buffers = parameters_of(network), buffers_of(network)
    gradients = {name: value.grad.clone() for name, value in network.named_parameters() if value.grad is not None}
    for _ in range(2):
        session.engine.sensitivity(session.learner, stage, stage.all_rows, squared_length, power=1)
    assert not network.training
    assert gradients.keys() == parameters.keys()
    for name, value in network.named_parameters():
        assert torch.equal(value, parameters[name])
        assert value.grad is not None
        assert torch.equal(value.grad, gradients[name])
        assert value.requires_grad
    for name, value in network.named_buffers():
        assert torch.equal(value, buffers[name])
    assert not any(module._forward_hooks for module in network.modules())


def test_labels_are_drawn_as_the_prediction_says() -> None:
    random = np.random.default_rng(0)
    logits, columns = torch.tensor(random.normal(size=(4, 6))), torch.tensor([True, True, True, True, False, False])
    logits[:, 4:] = -torch.inf
    numbers = torch.tensor(random.random((500, 4)))
    counts = torch.zeros(4, 6)
    for row in numbers:
        labels = draw_labels(logits, columns, row)
        for b in range(4):
            shares = torch.exp(logits[b, :4]) / torch.exp(logits[b, :4]).sum()
            label = 0
            while float(shares[: label + 1].sum()) <= float(row[b]):
                label += 1
            assert int(labels[b]) == label
            counts[b, label] += 1
    torch.testing.assert_close(counts[:, :4] / 500, logits[:, :4].softmax(dim=1).float(), rtol=0, atol=0.07)
    top = torch.full((4,), 1 - 2**-24)
    assert int(draw_labels(logits.float(), columns, top).max()) == 3, "never a class that has not come"


def test_the_number_0_draws_the_first_class_that_has_a_share() -> None:
    columns = torch.tensor([False, False, True, True])
    assert draw_labels(torch.zeros(2, 4), columns, torch.zeros(2)).tolist() == [2, 2]
