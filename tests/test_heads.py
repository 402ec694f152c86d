"""Heads: their scores against plain loops, how they grow, and what a phase may move."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from engram.contract import Phase, Training
from engram.contract.learner import Learner
from engram.data.memory import Memory, MemoryConfig
from engram.methods.bic import CorrectedHead
from engram.methods.blocks.losses import nca_paper, nca_released
from engram.methods.blocks.lsc import Classify, LSCSettings
from engram.methods.gdumb import NormalisedHead
from engram.nn.heads import CosineHead, Head, LinearHead, LSCHead
from engram.nn.network import Network, Part
from engram.nn.resnet import BlockGroup, ResNet
from helpers import (
    buffers_of,
    cpu_engine,
    learn_stage,
    make_stage,
    parameters_of,
    tiny_config,
    tiny_session,
    train_phase,
)

HEADS: dict[str, Callable[[int, int], Head]] = {
    "linear": LinearHead,
    "normalised": NormalisedHead,
    "linear without bias": lambda dim, capacity: LinearHead(dim, capacity, bias=False),
    "cosine": CosineHead,
    "lsc": lambda dim, capacity: LSCHead(dim, capacity, proxies=4),
    "lsc of the paper": lambda dim, capacity: LSCHead(dim, capacity, proxies=4, similarity="cosine"),
    "lsc of NME": lambda dim, capacity: LSCHead(dim, capacity, proxies=4, sharpness=3.0, learned_scale=False),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_network(head: Head, seed: int = 0) -> Network:
    """A network with a backbone of two narrow groups."""
    backbone = ResNet([BlockGroup(4, 1), BlockGroup(8, 1, 2)], seeded(seed))
    return Network(backbone, head, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def slow_lsc_score(feature: np.ndarray, proxies: np.ndarray, sharpness: float, similarity: str) -> float:
    """The score of one class (P, D) for one feature (D,): the softmax-weighted mean of the similarities."""
    length = math.sqrt(sum(float(x) ** 2 for x in feature))
    similarities: list[float] = []
    for proxy in proxies:
        norm = math.sqrt(sum(float(x) ** 2 for x in proxy))
        cosine = sum(float(a) * float(b) for a, b in zip(feature, proxy, strict=True)) / (length * norm)
        similarities.append(2 * sharpness**2 * (cosine - 1) if similarity == "distance" else sharpness**2 * cosine)
    exponentials = [math.exp(value) for value in similarities]
    return sum(e * value for e, value in zip(exponentials, similarities, strict=True)) / sum(exponentials)


# Scores


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sharpness", [1.0, 3.0])
@pytest.mark.parametrize("similarity", ["distance", "cosine"])
def test_lsc_scores_are_their_formula(seed: int, sharpness: float, similarity: str) -> None:
    head = LSCHead(7, 4, 5, sharpness, similarity).double()  # pyright: ignore[reportArgumentType]
    head.grow(4, seeded(seed))
    embedding = np.random.default_rng(seed).normal(size=(6, 7))
    weight = head.weight.detach().numpy()
    expected = [[slow_lsc_score(f, proxies, sharpness, similarity) for proxies in weight] for f in embedding]
    np.testing.assert_allclose(head(torch.tensor(embedding)).detach().numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_the_distance_similarity_is_minus_the_squared_distance_of_unit_vectors(seed: int) -> None:
    head = LSCHead(7, 3, proxies=1, sharpness=3.0).double()
    head.grow(3, seeded(seed))
    embedding = np.random.default_rng(seed).normal(size=(5, 7))
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    proxies = head.weight.detach().numpy()[:, 0]
    proxies = proxies / np.linalg.norm(proxies, axis=1, keepdims=True)
    expected = [[-9 * ((f - w) ** 2).sum() for w in proxies] for f in unit]
    np.testing.assert_allclose(head(torch.tensor(embedding)).detach().numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_cosine_and_linear_scores_are_their_formulas(seed: int) -> None:
    random = np.random.default_rng(seed)
    embedding = random.normal(size=(5, 6))
    cosine, linear = CosineHead(6, 3).double(), LinearHead(6, 3).double()
    for head in (cosine, linear):
        head.grow(3, seeded(seed))
    with torch.no_grad():
        assert linear.bias is not None
        linear.bias.copy_(torch.tensor(random.normal(size=3)))
        bias = linear.bias.numpy()
    w = cosine.weight.detach().numpy()
    expected = [[f @ k / (np.linalg.norm(f) * np.linalg.norm(k)) for k in w] for f in embedding]
    np.testing.assert_allclose(cosine(torch.tensor(embedding)).detach().numpy(), expected, rtol=1e-9)
    v = linear.weight.detach().numpy()
    expected = [[f @ v[k] + bias[k] for k in range(3)] for f in embedding]
    np.testing.assert_allclose(linear(torch.tensor(embedding)).detach().numpy(), expected, rtol=1e-9)


def test_base_proxies_are_normal_with_a_standard_deviation_of_one_over_the_root_of_the_dimension() -> None:
    head = LSCHead(64, 50)
    head.grow(50, seeded())
    assert head.weight.shape == (50, 10, 64)
    assert head.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    assert head.weight.mean().item() == pytest.approx(0, abs=0.005)


def test_the_scale_is_one_scalar_that_starts_at_one_and_may_be_left_out() -> None:
    learned = LSCHead(8, 3)
    assert learned.scale is not None
    assert learned.scale.shape == ()
    assert learned.scale.item() == 1
    assert LSCHead(8, 3, learned_scale=False).scale is None
    assert LinearHead(8, 3).scale is None


# Growth


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("capacity", [2, 3, 6, 9])
def test_growing_keeps_the_scores_of_the_classes_before(kind: str, capacity: int) -> None:
    # A capacity of 2 or 3 is outgrown (once or twice), 6 is just enough and 9 has room to spare.
    head, random = HEADS[kind](8, capacity), seeded(1)
    embedding = torch.randn(7, 8, generator=seeded(2))
    assert head.num_classes == 0
    seen = 0
    for count in (2, 1, 3):
        before = head(embedding)[:, :seen].detach()
        assert head.grow(count, random) == range(seen, seen + count)
        after = head(embedding).detach()
        torch.testing.assert_close(after[:, :seen], before, rtol=1e-6, atol=1e-6)
        seen += count
        assert head.num_classes == seen
        assert head.capacity == len(head.seen) == after.shape[1] >= seen
        assert head.seen.tolist() == [i < seen for i in range(head.capacity)]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("capacity", [2, 5])
def test_growing_leaves_old_weights_bit_for_bit(kind: str, capacity: int) -> None:
    head = HEADS[kind](8, capacity)
    head.grow(2, seeded(1))
    before = {name: head.get_parameter(name).detach().clone()[:2] for name in head.class_parameters}
    head.grow(3, seeded(2))
    for name, rows in before.items():
        assert torch.equal(head.get_parameter(name)[:2], rows)


@pytest.mark.parametrize("kind", HEADS)
def test_the_head_within_its_capacity_keeps_its_tensors(kind: str) -> None:
    head = HEADS[kind](8, 5)
    places = {name: parameter.data_ptr() for name, parameter in head.named_parameters()}
    head.grow(2, seeded())
    head.grow(3, seeded())
    assert {name: parameter.data_ptr() for name, parameter in head.named_parameters()} == places


def test_new_rows_are_random_and_follow_their_generator() -> None:
    heads = [LSCHead(8, 4, 3) for _ in range(3)]
    for head, seed in zip(heads, (1, 1, 2), strict=True):
        head.grow(4, seeded(seed))
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)
    assert len({tuple(row) for row in heads[0].weight.detach().flatten(0, 1).tolist()}) == 12


def test_an_initialised_head_is_fresh_and_keeps_its_classes() -> None:
    head = LSCHead(8, 4, 3)
    head.grow(2, seeded(1))
    before = head.weight.detach().clone()
    assert head.scale is not None
    with torch.no_grad():
        head.scale.fill_(7)
    head.initialise(seeded(2))
    assert head.scale.item() == 1
    assert head.num_classes == 2
    assert not (head.weight[:2] == before[:2]).any()
    assert (head.weight[2:] == 0).all()


# Unseen classes, through a network


@pytest.mark.parametrize("kind", HEADS)
def test_unseen_classes_score_minus_infinity_and_the_scale_acts_on_the_rest(kind: str) -> None:
    head = HEADS[kind](8, 6)
    network = tiny_network(head)
    head.grow(2, seeded())
    if head.scale is not None:
        torch.nn.init.constant_(head.scale, 2.5)
    output = network(torch.rand(3, 3, 8, 8, generator=seeded()))
    scale = 1.0 if head.scale is None else 2.5
    assert output.scale.item() == scale
    torch.testing.assert_close(output.scores[:, :2], head(output.embedding)[:, :2])
    torch.testing.assert_close(output.logits[:, :2], scale * output.scores[:, :2])
    assert (output.scores[:, 2:] == -torch.inf).all()
    assert (output.logits[:, 2:] == -torch.inf).all()


@pytest.mark.parametrize("reading", ["released", "paper"])
@pytest.mark.parametrize("seen", [1, 3])
def test_no_gradient_is_nan_while_classes_are_unseen(reading: str, seen: int) -> None:
    head = LSCHead(8, 6, 3)
    network = tiny_network(head)
    head.grow(seen, seeded())
    images, labels = torch.rand(4, 3, 8, 8, generator=seeded()), torch.tensor([0, seen - 1, 0, seen - 1])

    def loss(scale: float | None = None) -> Tensor:
        output = network(images)
        assert head.scale is not None
        if scale is not None:
            torch.nn.init.constant_(head.scale, scale)
            output = network(images)
        if reading == "released":
            return nca_released(output.logits, labels).mean()
        # The margin's part does not follow the scale: it stays where it was.
        return nca_paper(output.logits, labels, output.scale if scale is None else torch.ones(()), 0.6).mean()

    loss().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert (head.weight.grad[seen:] == 0).all()  # pyright: ignore[reportOptionalSubscript]
    assert head.scale is not None
    assert head.scale.grad is not None
    with torch.no_grad():
        numeric = (loss(1.01) - loss(0.99)).item() / 0.02
    assert head.scale.grad.item() == pytest.approx(numeric, rel=2e-2, abs=2e-4)


# What a phase may move


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "parts", [Part(sum(p.value for p in chosen)) for n in range(5) for chosen in itertools.combinations(Part, n)]
)
def test_masks_open_exactly_the_parts_named(kind: str, parts: Part) -> None:
    head = HEADS[kind](8, 7)
    network = tiny_network(head)
    head.grow(2, seeded())
    head.grow(3, seeded())
    masks = network.trainable(parts, num_old=2)
    assert set(masks) == {name for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        mask = masks[name]
        assert mask.shape == parameter.shape
        if name == "head.scale":
            assert (mask == float(Part.HEAD_SHARED in parts)).all()
        elif name.startswith("head."):
            assert (mask[:2] == float(Part.OLD_CLASSES in parts)).all()
            assert (mask[2:5] == float(Part.NEW_CLASSES in parts)).all()
            assert (mask[5:] == 0).all()
        else:
            assert (mask == float(Part.BACKBONE in parts)).all()


def test_the_main_phase_moves_no_old_proxy_and_the_balanced_phase_moves_only_proxies() -> None:
    session = tiny_session(tiny_config("afc"))
    learn_stage(session, 0)
    learner, engine = session.learner, session.engine
    network = learner.network
    stage = session.stage(1)
    session.method.grow(learner, stage, engine)
    main, balance = session.method.phases(learner, stage, engine)
    assert (main.name, balance.name) == ("main", "balance")

    before = parameters_of(network)
    train_phase(session, stage, main, 0)
    after = parameters_of(network)
    assert torch.equal(after["head.weight"][:2], before["head.weight"][:2])
    assert (after["head.weight"][2:4] != before["head.weight"][2:4]).any(dim=2).all()
    assert torch.equal(after["head.weight"][4:], before["head.weight"][4:])
    assert after["head.scale"] != before["head.scale"]
    for name in before:
        if name.startswith("backbone."):
            assert not torch.equal(after[name], before[name]), name

    before, statistics = after, buffers_of(network)
    train_phase(session, stage, balance, 1)
    after = parameters_of(network)
    assert (after["head.weight"][:4] != before["head.weight"][:4]).any(dim=2).all()
    assert torch.equal(after["head.weight"][4:], before["head.weight"][4:])
    for name in before:
        if name != "head.weight":
            assert torch.equal(after[name], before[name]), name
    # The network is in train mode, so the statistics of its BatchNorms follow the exemplars.
    for name, value in buffers_of(network).items():
        if "running" in name:
            assert not torch.equal(value, statistics[name]), name


def test_the_base_stage_moves_everything_that_is_in_use() -> None:
    session = tiny_session(tiny_config("afc"))
    stage = session.stage(0)
    session.method.grow(session.learner, stage, session.engine)
    before = parameters_of(session.learner.network)
    (main,) = session.method.phases(session.learner, stage, session.engine)
    train_phase(session, stage, main)
    after = parameters_of(session.learner.network)
    assert (after["head.weight"][:2] != before["head.weight"][:2]).any(dim=2).all()
    assert (after["head.weight"][2:] == 0).all()
    assert all(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", HEADS)
def test_rows_beyond_the_first_capacity_are_trained(kind: str) -> None:
    heads = [HEADS[kind](8, 2) for _ in range(2)]
    network, teacher = tiny_network(heads[0]), tiny_network(heads[1])
    learner, engine = Learner(network, teacher, Memory(MemoryConfig()), seed=1), cpu_engine()
    training = Training(epochs=1, batch_size=4, lr=0.1)
    everything = Part.BACKBONE | Part.OLD_CLASSES | Part.NEW_CLASSES | Part.HEAD_SHARED
    for index, (num_old, labels) in enumerate([(0, [0, 1] * 4), (2, [2, 3, 0, 1] * 2)]):
        stage = make_stage(index, num_old, labels)
        network.head.grow(2, seeded(index))
        before = parameters_of(network)
        phase = Phase(
            name="main",
            images=len(labels),
            rows=lambda stage=stage: stage.all_rows,
            loss=Classify(LSCSettings()),
            train=everything,
            training=training,
        )
        for _ in engine.start(learner, stage, phase, 0):
            pass
        after = parameters_of(network)
        for row in range(num_old + 2):
            assert not torch.equal(after["head.weight"][row], before["head.weight"][row]), (index, row)
        learner.snapshot_teacher()
    assert teacher.head.num_classes == 4


def test_a_correction_is_of_the_scores_of_its_classes_alone() -> None:
    head = CorrectedHead(4, 5)
    plain = LinearHead(4, 5, bias=False)
    for each in (head, plain):
        each.grow(5, torch.Generator().manual_seed(1))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    assert torch.equal(head(x), plain(x))
    head.correct(range(3, 5))
    head.correction.data = torch.tensor([2.0, 0.5])
    torch.testing.assert_close(head(x)[:, :3], plain(x)[:, :3])
    torch.testing.assert_close(head(x)[:, 3:], 2 * plain(x)[:, 3:] + 0.5)
    twin = CorrectedHead(4, 5)
    twin.load_state_dict(head.state_dict())  # it travels with the teacher
    assert torch.equal(twin(x), head(x))
    head.reserve(7)
    assert head(x).shape == (3, 7)
    assert head.corrected.tolist() == [False] * 3 + [True] * 2 + [False] * 2
    head.correct(range(5, 7))
    assert torch.equal(head(x)[:, :5], plain(x))


def test_a_frozen_head_stays_frozen_when_its_capacity_grows() -> None:
    head = CosineHead(4, 2).requires_grad_(False)
    head.reserve(5)
    assert not head.weight.requires_grad
    head.requires_grad_().reserve(7)
    assert head.weight.requires_grad


def test_a_dropped_class_leaves_a_row_as_it_was_before_any_class() -> None:
    head = NormalisedHead(4, 3)
    head.grow(3, torch.Generator().manual_seed(1))
    head(torch.randn(8, 4, generator=torch.Generator().manual_seed(2)))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    head.drop([1])
    new = NormalisedHead(4, 3).state_dict()
    for name, value in head.state_dict().items():
        assert torch.equal(value[:2], before[name][[0, 2]]), name
        assert torch.equal(value[2:], new[name][2:]), name


def test_a_linear_head_sees_what_is_positive_in_the_last_map() -> None:
    network = tiny_network(LinearHead(8, 3))
    network.head.grow(3, torch.Generator().manual_seed(1))
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(module.weight)  # at first a block is its shortcut, which is positive here
    output = network.eval()(torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(2)))
    features = output.maps[-1].relu().mean(dim=(2, 3))
    torch.testing.assert_close(output.scores, network.head(features))
    torch.testing.assert_close(output.embedding, output.maps[-1].mean(dim=(2, 3)))
    assert not torch.allclose(features, output.embedding)


class CountingHead(LinearHead):
    """A head that keeps a row of sums for each class."""

    class_buffers: Mapping[str, float] = {"seen": 0, "sums": -1}
    sums: Tensor

    def __init__(self, dim: int, capacity: int) -> None:
        super().__init__(dim, capacity)
        self.register_buffer("sums", torch.full((capacity, dim), -1.0))


def test_rows_of_any_shape_grow_with_the_head_and_are_dropped_with_a_class() -> None:
    head = CountingHead(5, 2)
    head.grow(2, seeded())
    head.sums.copy_(torch.arange(10.0).view(2, 5))
    head.grow(2, seeded())
    assert head.sums.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [-1] * 5, [-1] * 5]
    head.drop([0])
    assert head.sums.tolist() == [[5, 6, 7, 8, 9], [-1] * 5, [-1] * 5, [-1] * 5]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_features_of_a_pass_are_the_input_of_the_head_and_fit_it_in_closed_form(kind: str) -> None:
    """A rectified head sees other features than the embeddings: fitted to these, its scores would be wrong."""
    engine, head = cpu_engine(size=8), HEADS[kind](8, 3)
    network = tiny_network(head)
    assert isinstance(network.backbone, ResNet)
    for group in network.backbone.groups:  # a new block only passes its input on
        torch.nn.init.normal_(group.get_parameter("0.bn2.weight"), generator=seeded())
    head.grow(3, seeded())
    images = torch.randint(0, 256, (12, 8, 8, 3), generator=seeded(1), dtype=torch.uint8)
    features, embeddings = engine.features(network, images), engine.embed(network, images)
    assert torch.equal(features, embeddings) == (kind == "cosine")
    with torch.no_grad():
        assert torch.allclose(head(features), engine.infer(network, images)[1], atol=1e-6)
    if isinstance(head, LinearHead):
        ones = torch.ones(len(images), 1, dtype=torch.float64)
        wanted = torch.randn(12, 3, generator=seeded(2), dtype=torch.float64)
        solved = [
            torch.linalg.lstsq(torch.cat([x.double(), ones], dim=1), wanted).solution for x in (features, embeddings)
        ]
        errors: list[float] = []
        for solution in solved:
            with torch.no_grad():
                head.weight.copy_(solution[:-1].T)
                head.get_parameter("bias").copy_(solution[-1])
            errors.append(float((engine.infer(network, images)[1] - wanted).square().sum()))
        best = torch.cat([features.double(), ones], dim=1) @ solved[0] - wanted
        assert errors[0] == pytest.approx(float(best.square().sum()), rel=1e-3)
        assert errors[1] > 2 * errors[0]
