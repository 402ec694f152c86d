"""The importance of channels against one image at a time: autograd for each sample, loops over channels and pixels."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from engram.contract import Step
from engram.core.events import EpochFinished, RunFinished, Warned
from engram.data.stage import Stage
from engram.engine.buffers import DeviceBuffers
from engram.experiment.runner import run
from engram.experiment.session import Session
from engram.methods.blocks.losses import channel_importance
from engram.nn.network import Network
from helpers import (
    NO_AUGMENTATION,
    buffers_of,
    learn_stage,
    make_stage,
    parameters_of,
    tiny_config,
    tiny_session,
    toy_store,
    without_batch_norm,
)

IMAGES = 13


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def session_without_batch_norm(variant: str = "released", **settings: object) -> tuple[Session, Stage]:
    """A session whose network treats each image by itself, and a stage of 13 images of 3 classes.

    BatchNorm in train mode mixes the images of a batch: with it, the gradient of one image depends on which others came
    along, and that is the network's doing and not the estimate's. Without it, any difference is the estimate's.
    """
    config = tiny_config("afc", augmentation=NO_AUGMENTATION).with_settings(variant=variant, **settings)
    session = tiny_session(config, toy_store(num_classes=6))
    session.learner.network = without_batch_norm(session.learner.network)
    stage = make_stage(0, 0, [i % 3 for i in range(IMAGES)])
    session.learner.network.head.grow(3, seeded(3))
    with torch.no_grad():
        # Small weights keep the embeddings of a network without normalisation apart from one another.
        for parameter in session.learner.network.backbone.parameters():
            parameter.mul_(0.7)
        scale = session.learner.network.head.scale
        assert scale is not None
        scale.fill_(2.5)
    return session, stage


def slow_sample_loss(network: Network, variant: str, image: Tensor, label: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The classification loss of one uint8 image (H, W, 3), by its formula, and the maps it came through."""
    output = network((image.permute(2, 0, 1)[None] / 255).float())
    scores = [output.logits[0, k] for k in range(3)]
    others = [score for k, score in enumerate(scores) if k != label]
    if variant == "released":
        top = scores[int(np.argmax([float(score.detach()) for score in scores]))]
        loss = (torch.exp(others[0] - top) + torch.exp(others[1] - top) + 1).log() - (scores[label] - top)
    else:
        loss = (torch.exp(others[0]) + torch.exp(others[1])).log() - (scores[label] - output.scale * 0.6)
        loss = loss if loss > 0 else 0 * loss
    return loss, output.maps


def slow_squares(network: Network, variant: str, image: Tensor, label: int) -> list[np.ndarray]:
    """For each map and channel the sum over pixels of the squared gradient of one image's loss."""
    loss, maps = slow_sample_loss(network, variant, image, label)
    squares: list[np.ndarray] = []
    for gradient in torch.autograd.grad(loss, maps):
        values = gradient[0].double().numpy()
        of_channel = np.zeros(len(values))
        for c in range(len(values)):
            for y in range(values.shape[1]):
                for x in range(values.shape[2]):
                    of_channel[c] += values[c, y, x] ** 2
        squares.append(of_channel)
    return squares


def slow_importance(network: Network, variant: str, stage: Stage) -> list[np.ndarray]:
    """The mean over samples, divided by its mean over the channels of the map."""
    samples = [
        slow_squares(network, variant, image, int(label))
        for image, label in zip(stage.pool.pixels, stage.pool.labels, strict=True)
    ]
    result: list[np.ndarray] = []
    for i in range(len(samples[0])):
        total = np.zeros_like(samples[0][i])
        for sample in samples:
            total += sample[i]
        mean = total / len(samples)
        result.append(mean / (sum(mean) / len(mean)))
    return result


def importance_of(session: Session, stage: Stage) -> list[np.ndarray]:
    """What the method finds after this stage."""
    session.learner.buffers.clear()
    session.method.finish(session.learner, stage, session.engine)
    assert list(session.learner.buffers) == [f"importance.{i}" for i in range(4)]
    return [value.numpy() for value in session.learner.buffers.values()]


def with_batch_size(session: Session, size: int) -> Session:
    """The same session whose method takes batches of that size."""
    config = session.config.with_settings(train__batch_size=size)
    session.method = type(session.method)(config.settings)
    return session


# The formula


@pytest.mark.parametrize("seed", range(3))
def test_channel_importance_is_the_squared_gradient_summed_over_pixels_and_samples(seed: int) -> None:
    random = np.random.default_rng(seed)
    shapes = [(4, 3, 5, 2), (4, 6, 1, 3)]
    maps = [torch.tensor(random.normal(size=shape), requires_grad=True) for shape in shapes]
    weights = [torch.tensor(random.normal(size=shape)) for shape in shapes]
    loss = sum((weight * z.square()).sum() for weight, z in zip(weights, maps, strict=True))
    assert isinstance(loss, Tensor)
    found = channel_importance(loss, maps)
    for z, weight, ours in zip(maps, weights, found, strict=True):
        expected = np.zeros(z.shape[1])
        for b, c, y, x in np.ndindex(*z.shape):
            expected[c] += (2 * weight[b, c, y, x].item() * z[b, c, y, x].item()) ** 2
        np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("batch_size", [6, IMAGES])
def test_importance_is_the_mean_over_samples_of_their_squared_gradients(
    variant: Literal["released", "paper"], batch_size: int
) -> None:
    # With batches of 6 the last one holds a single image, which must count as any other.
    session, stage = session_without_batch_norm(variant)
    expected = slow_importance(session.learner.network, variant, stage)
    found = importance_of(with_batch_size(session, batch_size), stage)
    for ours, slow in zip(found, expected, strict=True):
        assert ours.dtype == np.float32
        assert slow.std() > 0.01  # channels differ, or the comparison would say nothing
        np.testing.assert_allclose(ours, slow, rtol=2e-3, atol=1e-4)
        assert ours.mean() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_importance_does_not_depend_on_the_batch_size(variant: str) -> None:
    session, stage = session_without_batch_norm(variant)
    alone = importance_of(with_batch_size(session, 1), stage)
    for size in (2, 5, 6, 12, IMAGES, 128):
        for ours, reference in zip(importance_of(with_batch_size(session, size), stage), alone, strict=True):
            np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def test_a_small_last_batch_is_not_weighted_as_in_the_released_code() -> None:
    # There, batches were averaged before their squares were added up: sum over batches of (gradient / size)^2.
    session, stage = session_without_batch_norm()
    network = session.learner.network
    samples = [
        slow_squares(network, "released", image, int(label))
        for image, label in zip(stage.pool.pixels, stage.pool.labels, strict=True)
    ]
    order = torch.randperm(IMAGES, generator=seeded()).tolist()
    lopsided = sum(samples[i][0] for i in order[:12]) / 12**2 + samples[order[12]][0]
    lopsided = lopsided / lopsided.mean()
    ours = importance_of(with_batch_size(session, 12), stage)[0]
    assert np.abs(ours - lopsided).max() > 0.05


# The sweep


def test_the_sweep_sees_every_image_once_whatever_the_batches() -> None:
    session, stage = session_without_batch_norm()
    stage = make_stage(1, 1, [0, 1, 1, 2, 0, 2, 2, 2, 1])
    for size in (1, 2, 4, 9, 50):
        labels: list[int] = []
        exemplars: list[bool] = []
        sizes: list[int] = []

        def visit(step: Step) -> list[Tensor]:
            labels.extend(step.labels.tolist())  # noqa: B023
            exemplars.extend(step.exemplar.tolist())  # noqa: B023
            sizes.append(len(step.labels))  # noqa: B023
            return [torch.tensor(float(len(step.labels)))]

        (total,) = session.engine.sweep(session.learner, stage, stage.all_rows, visit, size)
        assert total == 9
        assert sorted(labels) == sorted(stage.pool.labels.tolist())
        assert [label == 0 for label in labels] == exemplars
        assert max(sizes) == min(size, 9)


def test_the_sweep_mixes_the_classes() -> None:
    session, _ = session_without_batch_norm()
    stage = make_stage(1, 1, [0] * 8 + [1] * 8 + [2] * 8)
    batches: list[set[int]] = []

    def visit(step: Step) -> list[Tensor]:
        batches.append(set(step.labels.tolist()))
        return [torch.zeros(())]

    session.engine.sweep(session.learner, stage, stage.all_rows, visit, 8)
    assert all(len(labels) > 1 for labels in batches), "the norms would see one class at a time"


def test_the_sweep_draws_anew_in_each_stage() -> None:
    session = tiny_session()
    session.learner.network = without_batch_norm(session.learner.network)
    seen: list[dict[int, Tensor]] = []
    for index in (1, 2):
        stage = make_stage(index, 0, list(range(6)))
        found: dict[int, Tensor] = {}

        def visit(step: Step) -> list[Tensor]:
            found.update(zip(step.labels.tolist(), step.student.embedding.detach(), strict=True))  # noqa: B023
            return [torch.zeros(())]

        session.engine.sweep(session.learner, stage, stage.all_rows, visit, 3)
        seen.append(found)
    first, second = seen
    assert first.keys() == second.keys() == set(range(6))
    assert not any(torch.allclose(first[label], second[label]) for label in first)


def test_the_sweep_is_augmented_and_the_same_each_time() -> None:
    config = tiny_config("afc")
    session = tiny_session(config)
    stage = session.stage(0)
    session.learner.network = without_batch_norm(session.learner.network)
    session.method.grow(session.learner, stage, session.engine)
    first, again = importance_of(session, stage), importance_of(session, stage)
    session.engine.augmentation = NO_AUGMENTATION
    session.engine.buffers = DeviceBuffers(session.engine.device, NO_AUGMENTATION.pad)
    plain = importance_of(session, stage)
    for a, b, c in zip(first, again, plain, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.allclose(a, c, rtol=1e-3)


def test_the_estimate_moves_statistics_and_no_parameter() -> None:
    session = tiny_session()
    before: dict[str, dict[str, Tensor]] = {}

    def remember(_: Stage) -> None:
        before["parameters"] = parameters_of(session.learner.network)
        before["buffers"] = buffers_of(session.learner.network)

    learn_stage(session, 0, before_finish=remember)
    for name, value in parameters_of(session.learner.network).items():
        assert torch.equal(value, before["parameters"][name]), name
    # The pass is in train mode.
    for name, value in buffers_of(session.learner.network).items():
        if "running" in name:
            assert not torch.equal(value, before["buffers"][name]), name


def test_importance_follows_the_stages_and_is_saved_with_the_learner() -> None:
    session = tiny_session()
    learn_stage(session, 0)
    first = [value.clone() for value in session.learner.buffers.values()]
    assert [len(value) for value in first] == [16, 32, 64, 64]
    places = [value.data_ptr() for value in session.learner.buffers.values()]
    learn_stage(session, 1)
    second = list(session.learner.buffers.values())
    assert [value.data_ptr() for value in second] == places  # in place: a captured step goes on reading it
    for before, now in zip(first, second, strict=True):
        assert not torch.equal(before, now)
        assert now.mean().item() == pytest.approx(1, abs=1e-5)
        assert (now >= 0).all()
    saved = {name: value.clone() for name, value in session.learner.state_dict().items()}
    other = tiny_session()
    other.learner.load_state_dict(saved)
    for name, value in session.learner.buffers.items():
        assert torch.equal(other.learner.buffers[name], value)


# The number of samples


@pytest.mark.parametrize(("samples", "expected"), [(1, 1), (5, 5), (24, 24), (500, 24), (None, 24)])
def test_importance_samples_bounds_the_images_of_the_estimate(
    samples: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tiny_session(tiny_config("afc").with_settings(importance_samples=samples))
    stage = session.stage(0)
    session.method.grow(session.learner, stage, session.engine)
    asked: list[list[int]] = []
    sweep = session.engine.sweep

    def spy(learner: Any, stage: Stage, rows: Tensor, *rest: Any) -> list[Tensor]:
        asked.append(rows.tolist())
        return sweep(learner, stage, rows, *rest)

    monkeypatch.setattr(session.engine, "sweep", spy)
    for _ in range(2):
        session.method.finish(session.learner, stage, session.engine)
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == len(asked[0]) == expected
    assert set(asked[0]) <= set(range(24))


def test_a_sample_is_drawn_from_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(tiny_config("afc").with_settings(importance_samples=12))
    stage = session.stage(0)
    session.method.grow(session.learner, stage, session.engine)
    heard: list[int] = []
    sweep = session.engine.sweep

    def spy(learner: Any, stage: Stage, rows: Tensor, *rest: Any) -> list[Tensor]:
        heard.extend(stage.pool.labels[rows].tolist())
        return sweep(learner, stage, rows, *rest)

    monkeypatch.setattr(session.engine, "sweep", spy)
    session.method.finish(session.learner, stage, session.engine)
    assert len(heard) == 12
    assert set(heard) == {0, 1}


# One class


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_a_base_of_one_class_gives_uniform_importance_and_says_so(variant: str) -> None:
    session = tiny_session(tiny_config("afc", base=1, increment=1).with_settings(variant=variant))
    learn_stage(session, 0)
    assert len(session.learner.notes) == 1
    assert "after stage 0, all channels of a map have importance 0" in session.learner.notes[0]
    for value in session.learner.buffers.values():
        assert (value == 1).all()
    learn_stage(session, 1)
    for name, value in session.learner.state_dict().items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_a_run_from_one_class_tells_the_user_and_stays_finite(variant: str) -> None:
    config = tiny_config("afc", base=1, increment=1).with_settings(variant=variant)
    events = list(run(config, toy_store(num_classes=3)))
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert len(warnings) == 1
    assert "have importance 0" in warnings[0]
    for event in events:
        if isinstance(event, EpochFinished):
            assert np.isfinite(list(event.terms.values())).all()
    assert isinstance(events[-1], RunFinished)
