"""Mnemonics: exemplars that learn, and convolutions that move by factors; gradients, storage, memory and resuming."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from conftest import make_config, make_store
from engram import EngramError, recipe, run
from engram.contract import ImageTuningStep, Training
from engram.data.augment import Augmentation, to_unit
from engram.data.memory import Memory, MemoryConfig
from engram.data.stage import Samples, Stage
from engram.engine import tune as tuning
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session
from engram.methods import find_method
from engram.methods.mnemonics import (
    FactoredNetwork,
    Factors,
    Mnemonics,
    MnemonicsSettings,
    as_factored,
    convolution_weights,
    prototype_entropy,
    split_halves,
    to_uint8,
    unrolled_entropy,
)
from engram.nn.resnet import ResNet
from helpers import (
    assert_resumes_to,
    learn_stage,
    parameters_of,
    run_stopped,
    run_whole,
    tiny_config,
    tiny_session,
    toy_store,
    train_phase,
)

STILL = Augmentation(pad=0, flip=False, brightness=0.0)
# A rate at which toy exemplars learn something, as whole numbers too.
QUICK = Training(epochs=4, batch_size=16, lr=20.0, schedule="constant", weight_decay=0, clip=None, remainder="keep")


def quick_config(**settings: Any) -> RunConfig:
    return tiny_config("mnemonics", epochs=4, augmentation=STILL).with_settings(tune=QUICK, **settings)


def network_of(session: Session) -> FactoredNetwork:
    return as_factored(session.learner.network)


# ---- factors


def test_factor_gradients_are_those_of_the_product() -> None:
    session = tiny_session(tiny_config("mnemonics"))
    learn_stage(session, 0)
    network = network_of(session)
    network.add_factors()
    assert network.factors is not None
    images, labels = torch.rand(6, 3, 8, 8), torch.tensor([0, 1] * 3)
    network.eval().zero_grad()
    F.cross_entropy(network(images).logits, labels).backward()
    for factor in network.factors.values:
        factor.grad = torch.zeros_like(factor)
    network.factors.take_gradients(network.backbone)
    factors = [torch.ones(base.shape[:2], requires_grad=True) for base in network.factors.bases]
    names = [name for name, weight in network.named_parameters() if weight.ndim == 4]
    products = {
        name: base * factor[:, :, None, None]
        for name, base, factor in zip(names, network.factors.bases, factors, strict=True)
    }
    loss = F.cross_entropy(functional_call(network, products, (images,)).logits, labels)
    for held, expected in zip(network.factors.values, torch.autograd.grad(loss, factors), strict=True):
        assert held.grad is not None
        assert torch.allclose(held.grad, expected, rtol=1e-4, atol=1e-7)
        assert expected.any()


def test_after_the_base_convolutions_move_by_their_factors_alone() -> None:
    session = tiny_session(tiny_config("mnemonics"))
    learn_stage(session, 0)
    network = network_of(session)
    assert network.factors is None
    base, norm = [weight.detach().clone() for weight in convolution_weights(network.backbone)], parameters_of(network)
    for index in (1, 2):
        learn_stage(session, index)
        assert network.factors is not None
        weights = convolution_weights(network.backbone)
        for held, first, factor, weight in zip(
            network.factors.bases, base, network.factors.values, weights, strict=True
        ):
            assert torch.equal(held, first), "the base stage's weights, at every stage"
            assert not torch.equal(factor, torch.ones_like(factor))
            assert torch.equal(weight, first * factor[:, :, None, None])
    assert not torch.equal(network.backbone.get_parameter("bn.weight"), norm["backbone.bn.weight"]), "norms train"


def test_an_update_of_a_factor_is_sgd_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(tiny_config("mnemonics", batch_size=500, epochs=1))
    learn_stage(session, 0)
    stage = session.stage(1)
    session.method.grow(session.learner, stage, session.engine)
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    gradients: list[Tensor] = []
    take = Factors.take_gradients

    def spy(factors: Factors, backbone: ResNet) -> None:
        gradients.extend(weight.grad.clone() for weight in convolution_weights(backbone) if weight.grad is not None)
        take(factors, backbone)

    monkeypatch.setattr(Factors, "take_gradients", spy)
    train_phase(session, stage, phase)
    network, training = network_of(session), phase.training
    assert network.factors is not None
    for gradient, base, factor in zip(gradients, network.factors.bases, network.factors.values, strict=True):
        slope = (gradient * base).sum(dim=(2, 3)).clamp(-5, 5) + training.weight_decay  # times a factor of 1
        assert torch.allclose(factor, 1 - training.lr * slope, atol=1e-6)


def test_without_factors_the_convolutions_move_freely() -> None:
    session = tiny_session(tiny_config("mnemonics").with_settings(factors=False))
    stage = [learn_stage(session, index) for index in range(2)][-1]
    assert network_of(session).factors is None
    (phase,) = session.method.phases(session.learner, stage, session.engine)
    assert phase.extensions == ()


def test_a_state_brings_its_factors_and_a_state_without_them_takes_them_away() -> None:
    session = tiny_session(tiny_config("mnemonics"))
    learn_stage(session, 0)
    base = {name: value.clone() for name, value in session.learner.state_dict().items()}
    learn_stage(session, 1)
    state = {name: value.clone() for name, value in session.learner.state_dict().items()}
    assert any(name.startswith("network.factors.") for name in state)
    other = tiny_session(session.config)
    other.learner.load_state_dict(state)
    for name, value in other.learner.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert not any(parameter.requires_grad for parameter in other.learner.teacher.parameters())
    other.learner.load_state_dict(base)
    assert network_of(other).factors is None


# ---- objectives


class Smooth(nn.Module):
    """A network without kinks, in float64, for finite differences: embedding and logits with classes not seen."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(5, 12, generator=generator, dtype=torch.float64))
        self.head = nn.Linear(5, 6, bias=False, dtype=torch.float64)
        self.head.weight.data.copy_(torch.randn(6, 5, generator=generator))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        embedding = torch.tanh(images.flatten(1) @ self.first.T)
        cosines = F.normalize(embedding, dim=1) @ F.normalize(self.head.weight, dim=1).T
        return embedding, (4 * cosines).masked_fill(torch.arange(6) > 3, -torch.inf)


def smooth_step(tuned: Tensor, images: Tensor, labels: Tensor) -> ImageTuningStep:
    network = Smooth()
    parameters = {name: value.detach() for name, value in network.named_parameters()}

    def passes(images: Tensor, changed: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return functional_call(network, {**parameters, **changed}, (images,))

    return ImageTuningStep(tuned, images, labels, parameters, passes)


def some_images(count: int, seed: int) -> Tensor:
    return torch.rand(count, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("num_old", [0, 2])
def test_prototype_gradient_is_that_of_finite_differences(num_old: int) -> None:
    labels, tuned = torch.tensor([num_old, num_old, num_old + 1]), some_images(3, 1)
    old = F.normalize(torch.randn(num_old, 5, dtype=torch.float64), dim=1)
    batch, targets = some_images(7, 2), torch.arange(7) % (num_old + 2)

    def value(tuned: Tensor) -> Tensor:
        return prototype_entropy(smooth_step(tuned, batch, targets), labels, old)

    assert torch.autograd.gradcheck(value, tuned.requires_grad_())


@pytest.mark.parametrize("inner", ["head", "network"])
@pytest.mark.parametrize("steps", [1, 2])
def test_unrolled_gradient_is_that_of_finite_differences(inner: Any, steps: int) -> None:
    settings = MnemonicsSettings(inner=inner, inner_steps=steps, inner_lr=0.3)
    batch, targets, labels = some_images(7, 2), torch.arange(7) % 4, torch.tensor([0, 1, 3])

    def value(tuned: Tensor) -> Tensor:
        return unrolled_entropy(smooth_step(tuned, batch, targets), labels, settings)

    assert torch.autograd.gradcheck(value, some_images(3, 1).requires_grad_())


def test_unrolled_training_is_sgd_of_a_copy() -> None:
    settings = MnemonicsSettings(inner_steps=3, inner_lr=0.2)
    tuned, batch = some_images(4, 1), some_images(7, 2)
    labels, targets = torch.tensor([0, 1, 2, 3]), torch.arange(7) % 4
    network = Smooth()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.2)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(network(tuned)[1], labels).backward()
        optimiser.step()
    expected = F.cross_entropy(network(batch)[1], targets)
    value = unrolled_entropy(smooth_step(tuned, batch, targets), labels, settings)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)


def slow_prototype_entropy(session: Session, tuned: Tensor, labels: Tensor, old: Tensor, stage: Stage) -> float:
    """Over the whole pool, one image and one class at a time; images in [0, 1]."""
    network = copy.deepcopy(session.learner.network).eval()
    with torch.no_grad():
        embedding = network(tuned).embedding.double()
        features = network(to_unit(stage.pool.pixels)).embedding.double()
    prototypes = [row.double() for row in old]
    for label in stage.new_labels:
        own = [row for row, its in zip(embedding, labels, strict=True) if its == label]
        prototypes += [torch.stack(own).mean(dim=0)]
    total = 0.0
    for feature, label in zip(features, stage.pool.labels.tolist(), strict=True):
        cosines = [float(feature @ each / feature.norm() / each.norm()) for each in prototypes]
        total += np.log(np.exp(cosines).sum()) - cosines[label]
    return total / len(features)


@pytest.mark.parametrize("index", [0, 1])
def test_pixels_get_the_gradient_of_the_objective(index: int) -> None:
    session = tiny_session(quick_config())
    stage = [learn_stage(session, before) for before in range(index + 1)][-1]
    rows = torch.cat([stage.rows_of(label)[:3] for label in stage.new_labels])
    labels, images = stage.pool.labels[rows], stage.pool.pixels[rows]
    old = F.normalize(torch.randn(stage.num_old, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    once = Training(epochs=1, batch_size=500, lr=1.0, schedule="constant", momentum=0, weight_decay=0, clip=None)
    objective = partial(prototype_entropy, labels=labels, old=old)
    network, engine = session.learner.network, session.engine
    levels = engine.tune(session.learner, stage, images, stage.all_rows, objective, once, "test")
    # One step at rate 1 from rest: what was added, as the network sees it, is minus the gradient.
    std = network.std.permute(0, 2, 3, 1)
    gradient = (images - levels) / (255 * std)
    generator = torch.Generator().manual_seed(1)
    for along in (gradient, torch.randn(gradient.shape, generator=generator)):
        direction, step = along / along.norm(), 0.05

        def value(sign: int, way: Tensor = step * direction) -> float:
            moved = (images.float() / 255 + sign * way * std).permute(0, 3, 1, 2)
            return slow_prototype_entropy(session, moved, labels, old, stage)

        slope = (value(1) - value(-1)) / (2 * step)
        expected = float((gradient * direction).sum())
        assert slope == pytest.approx(expected, rel=0.02, abs=0.004 * float(gradient.norm()))


# ---- the engine's part


def test_tuning_is_sgd_with_momentum_and_decay_of_normalised_pixels() -> None:
    session = tiny_session(quick_config())
    stage = learn_stage(session, 0)
    images, network = stage.pool.pixels[:4], session.learner.network
    slope = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    training = Training(3, 10, 0.1, "steps", (0.5,), weight_decay=0.2, clip=0.2, remainder="keep")
    assert (slope * network.std > 0.2).any()
    seen: list[int] = []

    def objective(step: ImageTuningStep) -> Tensor:
        seen.append(len(step.labels))
        return (slope * step.tuned).sum()

    levels = session.engine.tune(session.learner, stage, images, stage.all_rows, objective, training, "test")
    assert seen == [10, 10, 4] * 3
    mean, std = network.mean.double(), network.std.double()
    value = (images.double().permute(0, 3, 1, 2) / 255 - mean) / std
    momentum = torch.zeros_like(value)
    for lr in [0.1] * 6 + [0.01] * 3:
        momentum = 0.9 * momentum + (slope * std).clamp(-0.2, 0.2) + 0.2 * value
        value = value - lr * momentum
    expected = 255 * (value * std + mean).permute(0, 2, 3, 1)
    assert torch.allclose(levels.double(), expected, atol=1e-3)


def test_the_network_and_its_gradients_are_left_as_they_were() -> None:
    session = tiny_session(quick_config())
    stage = learn_stage(session, 0)
    network = session.learner.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    gradients = [parameter.grad for parameter in network.parameters()]
    copies = [gradient.clone() for gradient in gradients if gradient is not None]
    assert isinstance(session.method, Mnemonics)
    for variant in ("released", "paper"):
        method = Mnemonics(replace(session.method.settings, variant=variant))
        method.exemplars(session.learner, stage, session.engine)
    assert not network.training
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter, held, value in zip(network.parameters(), gradients, copies, strict=True):
        assert parameter.grad is held
        assert torch.equal(parameter.grad, value)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_a_part_at_a_time_comes_to_the_same(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(quick_config(variant=variant))
    stage = learn_stage(session, 0)
    whole = session.method.exemplars(session.learner, stage, session.engine)
    monkeypatch.setitem(tuning.GRADIENT_PIXELS, "cpu", 4 * 8 * 8)
    parts = session.method.exemplars(session.learner, stage, session.engine)
    for label in stage.new_labels:
        one, other = whole[label], parts[label]
        assert isinstance(one, Samples)
        assert isinstance(other, Samples)
        assert (one.pixels.int() - other.pixels.int()).abs().max() <= 1
        assert (one.pixels != stage.pool.pixels[stage.rows_of(label)[:3]]).any()


def test_a_rate_too_high_is_said() -> None:
    session = tiny_session(quick_config(tune__lr=1e38, tune__weight_decay=1.0))
    with pytest.raises(EngramError, match=r"tuned exemplars of stage 0 are not finite.* lower learning rate than 1e"):
        learn_stage(session, 0)


# ---- what is kept


def test_pixels_are_kept_in_eight_bits() -> None:
    levels = torch.tensor([-3.0, -0.2, 0.0, 7.0, 6.999, 7.4, 7.6, 254.9, 255.0, 300.0])
    assert to_uint8(levels, "truncate").tolist() == [0, 0, 0, 7, 6, 7, 7, 254, 255, 255]
    assert to_uint8(levels, "round").tolist() == [0, 0, 0, 7, 7, 7, 8, 255, 255, 255]
    assert to_uint8(levels, "truncate").dtype == torch.uint8
    every = torch.arange(256).float()
    assert torch.equal(to_uint8(every, "truncate").float(), every)


def entropy_of(session: Session, stage: Stage, images: Tensor, rows: Tensor) -> float:
    old = torch.zeros(0, 64)
    return slow_prototype_entropy(session, to_unit(images), stage.pool.labels[rows], old, stage)


def test_exemplars_serve_the_stage_s_images_better_after_learning() -> None:
    session = tiny_session(quick_config(), toy_store(per_class=20))
    stage = learn_stage(session, 0)
    kept = [session.learner.memory.of(label) for label in stage.new_labels]
    rows = torch.cat(
        [torch.cat([torch.nonzero(stage.pool.sources == source)[0] for source in own.sources]) for own in kept]
    )
    before = entropy_of(session, stage, stage.pool.pixels[rows], rows)
    after = entropy_of(session, stage, torch.cat([own.pixels for own in kept]), rows)
    assert after < before - 1e-3, (before, after)
    share, mean = session.learner.buffers["exemplars.changed"].tolist()
    assert 0 < share <= 1
    assert mean > 0


@pytest.mark.parametrize("inner", ["head", "network"])
def test_a_copy_trained_on_learned_exemplars_does_better_on_the_stage_s_images(inner: Any) -> None:
    settings = {"variant": "paper", "inner": inner, "inner_lr": 0.5, "storage": "round"}
    session = tiny_session(quick_config(**settings), toy_store(per_class=20))
    stage = learn_stage(session, 0)
    assert isinstance(session.method, Mnemonics)
    network, kept = session.learner.network, [session.learner.memory.of(label) for label in stage.new_labels]
    samples = Samples.concatenate(kept)
    first = torch.from_numpy(session.store.train.images[samples.sources.numpy()])

    def trained(images: Tensor) -> float:
        copied = copy.deepcopy(network).eval()
        parameters = [copied.get_parameter("head.weight")] if inner == "head" else list(copied.parameters())
        loss = F.cross_entropy(copied(to_unit(images)).logits, samples.labels)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= 0.5 * gradient
            return float(F.cross_entropy(copied(to_unit(stage.pool.pixels)).logits, stage.pool.labels))

    assert trained(samples.pixels) < trained(first)


def memories(session: Session, stages: int = 2) -> list[dict[int, Samples]]:
    """What the memory holds after each stage."""
    held: list[dict[int, Samples]] = []
    for index in range(stages):
        learn_stage(session, index)
        memory = session.learner.memory
        held.append({label: memory.of(label) for label in memory.labels})
    return held


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_old_exemplars_change_in_the_paper_s_form_alone(variant: Any) -> None:
    session = tiny_session(quick_config(variant=variant, inner_lr=0.5))
    base, later = memories(session)
    changed = [not torch.equal(base[label].pixels, later[label].pixels) for label in base]
    assert changed == [variant == "paper"] * 2
    train = session.store.train.images
    for label, samples in later.items():
        assert torch.equal(samples.sources, later[label].sources)
        assert samples.exemplar.all()
        assert samples.pixels.dtype == torch.uint8
        assert (torch.from_numpy(train[samples.sources.numpy()]) != samples.pixels).any()


def test_halves_see_each_other_and_no_class_twice() -> None:
    kept = {0: torch.tensor([5, 6, 7]), 1: torch.tensor([9])}
    (_, first, second), (_, also_second, also_first) = split_halves(kept)
    assert (first.tolist(), second.tolist()) == ([5, 7, 9], [6])
    assert torch.equal(first, also_first)
    assert torch.equal(second, also_second)
    assert split_halves({0: torch.tensor([5]), 1: torch.tensor([9])}) == []
    assert split_halves({}) == []


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_a_shared_budget_shrinks_learned_exemplars(variant: Any) -> None:
    config = replace(quick_config(variant=variant), memory=MemoryConfig(budget="total", size=12))
    base, later = memories(tiny_session(config))
    assert [len(base[label]) for label in (0, 1)] == [6, 6]
    assert [len(samples) for samples in later.values()] == [3] * 4
    for label in (0, 1):
        assert torch.equal(later[label].sources, base[label].sources[:3])
        assert torch.equal(later[label].pixels, base[label].pixels[:3]) == (variant == "released")


def test_memory_keeps_changed_images_through_its_state() -> None:
    pool = Samples(
        torch.zeros(4, 2, 2, 3, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), torch.arange(4), torch.zeros(4) > 0
    )
    changed = Samples(
        torch.full((2, 2, 2, 3), 7, dtype=torch.uint8), pool.labels[:2], pool.sources[:2], pool.exemplar[:2]
    )
    memory = Memory(MemoryConfig(size=2))
    memory.update(pool, {0: changed, 1: torch.tensor([3])}, 2)
    assert memory.of(0).exemplar.all()
    other = Memory(MemoryConfig(size=2))
    other.load_state_dict(memory.state_dict())
    assert (other.of(0).pixels == 7).all()
    assert other.of(1).sources.tolist() == [3]


def test_class_means_are_of_the_learned_exemplars() -> None:
    session = tiny_session(quick_config())
    learn_stage(session, 0)
    learner, engine = session.learner, session.engine
    samples = learner.memory.samples()
    assert samples is not None
    first = torch.from_numpy(session.store.train.images[samples.sources.numpy()])

    def means(images: Tensor) -> Tensor:
        unit = sum(F.normalize(engine.embed(learner.network, images, mirror=mirror), dim=1) for mirror in (False, True))
        assert isinstance(unit, Tensor)
        return torch.stack([F.normalize(unit[samples.labels == label].mean(0), dim=0) for label in (0, 1)])

    assert learner.class_means is not None
    assert torch.allclose(learner.class_means, means(samples.pixels), atol=1e-5)
    assert not torch.allclose(learner.class_means, means(first), atol=1e-3)


def test_at_the_released_rate_nothing_but_the_rounding_down_shows() -> None:
    for storage, most in (("round", 0), ("truncate", 1)):
        session = tiny_session(tiny_config("mnemonics").with_settings(storage=storage))
        learn_stage(session, 0)
        samples = session.learner.memory.samples()
        assert samples is not None
        apart = samples.pixels.int() - torch.from_numpy(session.store.train.images[samples.sources.numpy()]).int()
        assert apart.max() <= 0
        assert apart.min() >= -most


# ---- runs


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_one_class_a_stage_trains_and_tunes_to_finite_numbers(variant: Any) -> None:
    session = tiny_session(replace(quick_config(variant=variant), base=1, increment=1))
    for index in range(3):
        learn_stage(session, index)
    for name, value in session.learner.state_dict().items():
        assert value.float().isfinite().all(), name
    assert len(session.learner.memory) == 9


@pytest.mark.parametrize(("variant", "steps"), [("released", 29), ("paper", 12)])
def test_a_stopped_run_resumes_to_the_same_images_bit_for_bit(variant: str, steps: int, tmp_path: Path) -> None:
    config = make_config("mnemonics", settings__train__epochs=3, settings__variant=variant, settings__tune__lr=20.0)
    whole = run_whole(config, make_store(), tmp_path / "whole")
    assert "memory.images" in whole
    run_stopped(config, make_store(), tmp_path / "stopped", steps)
    assert_resumes_to(whole, tmp_path / "stopped", make_store())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"variant": "relased"}, "no variant 'relased'"),
        ({"storage": "ceil"}, "no storage 'ceil'"),
        ({"inner": "neck"}, "no inner 'neck'"),
        ({"inner_steps": 0}, "inner_steps must be at least 1, got 0"),
        ({"inner_lr": 0.0}, "inner_lr must be above 0, got 0"),
        ({"margin": -1.0}, "margin must be at least 0, got -1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(EngramError, match=says):
        MnemonicsSettings(**settings)


def test_a_memory_of_every_image_is_refused_before_anything_is_trained() -> None:
    config = replace(tiny_config("mnemonics"), memory=MemoryConfig(budget="all", size=0))
    with pytest.raises(EngramError, match="memory=all keeps every image unchanged; give a budget"):
        next(run(config, toy_store()))


def test_recipes_have_ucir_s_schedule_the_released_tuning_and_twenty_exemplars() -> None:
    config = recipe("mnemonics-cifar100-b50-s10")
    settings = config.settings
    assert isinstance(settings, MnemonicsSettings)
    assert settings.train == recipe("ucir-cifar100-b50-s10").settings.train  # pyright: ignore[reportAttributeAccessIssue]
    tune = settings.tune
    assert (tune.epochs, tune.lr, tune.momentum, tune.weight_decay, tune.batch_size) == (1, 1e-5, 0.9, 5e-4, 128)
    assert (settings.variant, settings.storage, settings.factors) == ("released", "truncate", True)
    assert config.memory.per_class(100) == 20
    assert recipe("mnemonics-mini-b10-s5").settings.train.epochs == 16  # pyright: ignore[reportAttributeAccessIssue]
    assert find_method("mnemonics").predictors == ("cnn", "nme")
