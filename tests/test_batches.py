"""Batches of two streams, images mixed by boxes, gradients held to a length: as planned, in the loop, and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engram.contract import Phase, Step, Training
from engram.core.errors import EngramError
from engram.core.rng import generator
from engram.data.augment import Augmentation
from engram.engine.flat_optimiser import FlatOptimiser
from engram.engine.planning import plan_epochs
from engram.experiment.session import PhasePlan, Session
from engram.experiment.stage_work import STEP_COST
from engram.methods.blocks.batches import CutMix, Mixed, Mixup, SecondStream, paste_box, plan_boxes
from engram.methods.blocks.phases import EVERYTHING
from helpers import (
    NO_AUGMENTATION,
    assert_resumes_to,
    learn_stage,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
)

KEEP = Training(epochs=3, batch_size=4, lr=0.05, remainder="keep")


def phase_of(session: Session, **changes: object) -> Phase:
    """A phase that trains everything on the base stage's pool by cross-entropy."""
    stage = session.stage(0)
    session.method.grow(session.learner, stage, session.engine)
    (main,) = session.method.phases(session.learner, stage, session.engine)
    phase = Phase(
        name="main",
        images=len(stage.pool),
        rows=lambda: stage.all_rows,
        loss=main.loss,
        train=EVERYTHING,
        training=KEEP,
    )
    return replace(phase, **changes)


# Two streams


@settings(deadline=None, max_examples=40)
@given(
    own=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    beside=st.integers(1, 20),
    side=st.integers(1, 12),
    remainder=st.sampled_from(["keep", "drop"]),
)
def test_the_second_stream_goes_round_and_leaves_the_first_as_it_is(
    own: int, batch_size: int, beside: int, side: int, remainder: str
) -> None:
    training = Training(epochs=4, batch_size=batch_size, remainder=remainder)  # pyright: ignore[reportArgumentType]
    rows, others = torch.arange(own), torch.arange(100, 100 + beside)
    alone = plan_epochs(training, Augmentation(), rows, range(4), (1, 0), 3)
    both = plan_epochs(training, Augmentation(), rows, range(4), (1, 0), 3, extensions=[SecondStream(others, side)])
    parts = ((plan.rows, *plan.draws.tensors()) for plan in (both, alone))
    for ours, theirs in zip(*parts, strict=True):
        assert torch.equal(ours[:, side:], theirs)
    assert torch.equal(both.lr, alone.lr)
    stream = both.rows[:, :side].flatten().tolist()
    assert len(stream) == side * len(both)
    for start in range(0, len(stream), beside):
        part = stream[start : start + beside]
        assert len(set(part)) == len(part), "no image comes again before all have come"
        assert set(part) <= set(others.tolist())


def test_the_second_stream_is_shuffled_anew_each_round_and_by_the_seed() -> None:
    training, rows = Training(epochs=6, batch_size=5), torch.arange(10)

    def rounds(seed: int) -> list[list[int]]:
        stream = SecondStream(torch.arange(8), 4)
        plan = plan_epochs(training, Augmentation(), rows, range(6), (1, 0), seed, extensions=[stream])
        return plan.rows[:, :4].reshape(-1, 8).tolist()

    assert rounds(1) == rounds(1) != rounds(2)
    assert len({tuple(order) for order in rounds(1)}) == len(rounds(1)) == 6


def test_epochs_of_two_streams_planned_together_are_those_planned_one_by_one() -> None:
    streams = [SecondStream(torch.arange(50, 57), 4)]
    arguments = (KEEP, Augmentation(), torch.arange(10))
    together = plan_epochs(*arguments, range(1, 3), (2, 1), 1, extensions=streams)
    alone = [plan_epochs(*arguments, range(e, e + 1), (2, 1), 1, extensions=streams) for e in (1, 2)]
    for ours, *theirs in zip(together.tensors(), *(plan.tensors() for plan in alone), strict=True):
        assert torch.equal(ours, torch.cat(theirs))
    draws = together.draws.factor[:, :4]
    assert draws.unique().numel() > 20, "the second stream's images are brightened each in its own way"
    plain = plan_epochs(*arguments, range(1), (2, 1), 1, augmented=False, extensions=streams)
    assert plain.draws.factor.unique().tolist() == [1]


def test_the_loop_takes_both_streams_and_ends_the_epoch_with_the_first() -> None:
    session = tiny_session()
    seen: list[tuple[int, int, int]] = []
    main = phase_of(session)
    rows = torch.arange(10)

    def spy(step: Step) -> dict[str, Tensor]:
        assert step.streams == {"beside": slice(0, 3), "main": slice(3, None)}
        side = step.labels[step.streams["beside"]].tolist()
        assert len(side) == 3
        assert all(label in session.stage(0).pool.labels[10:15].tolist() for label in side)
        seen.append((len(step.labels), len(step.student.logits), len(step.exemplar)))
        return main.loss(step)

    streams = (SecondStream(torch.arange(10, 15), 3),)
    phase = replace(main, images=10, rows=lambda: rows, loss=spy, extensions=streams)
    for _ in session.engine.start(session.learner, session.stage(0), phase, 0):
        pass
    assert [size for size, *_ in seen] == [7, 7, 5] * 3
    assert all(len(set(sizes)) == 1 for sizes in seen)
    plan = PhasePlan.of(phase)
    assert (plan.steps, plan.batch_size, plan.work) == (3, 7, 3 * (10 + 9 + 3 * STEP_COST))
    without = PhasePlan.of(replace(phase, extensions=()))
    assert (without.steps, without.batch_size, without.work) == (3, 4, 3 * (10 + 3 * STEP_COST))


# Mixed images


def slow_paste(images: np.ndarray, partner: list[int], box: list[int]) -> np.ndarray:
    """(B, C, H, W): every pixel inside the box from the partner."""
    out = images.copy()
    top, bottom, left, right = box
    for b in range(len(images)):
        for y in range(top, bottom):
            for x in range(left, right):
                out[b, :, y, x] = images[partner[b], :, y, x]
    return out


@pytest.mark.parametrize("box", [[1, 4, 0, 3], [0, 6, 0, 5], [2, 2, 1, 1], [5, 6, 4, 5]])
@pytest.mark.parametrize("height_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_box_is_pasted_whatever_the_layout(box: list[int], height_dim: int, dtype: torch.dtype) -> None:
    random, partner = np.random.default_rng(0), [2, 0, 1, 3]
    images = torch.tensor(random.normal(size=(4, 3, 6, 5)), dtype=dtype)
    expected = slow_paste(images.float().numpy(), partner, box)
    for layout in (torch.contiguous_format, torch.channels_last):
        given = images.contiguous(memory_format=layout)
        if height_dim == 1:
            given = given.permute(0, 2, 3, 1).contiguous()
        got = paste_box(given, torch.tensor(partner), torch.tensor(box), height_dim)
        assert got.stride() == given.stride()
        assert got.dtype == dtype
        got = got.permute(0, 3, 1, 2) if height_dim == 1 else got
        np.testing.assert_array_equal(got.float().numpy(), expected)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    height=st.integers(8, 40),
    width=st.integers(8, 40),
    seed=st.integers(0, 99),
)
def test_partners_are_in_the_batch_and_shares_are_counted_in_pixels(
    sizes: tuple[int, int, int], height: int, width: int, seed: int
) -> None:
    steps, batch_size = sizes[0], max(sizes[1:])
    last = min(sizes[1:])
    planned = plan_boxes(CutMix(1.0), (steps, batch_size, last), (height, width), range(2), (0, 0), seed)
    assert [len(each) for each in planned] == [2 * steps] * 3
    for at, (partner, box, share) in enumerate(zip(*planned, strict=True)):
        size = last if at % steps == steps - 1 else batch_size
        assert sorted(partner[:size].tolist()) == list(range(size))
        top, bottom, left, right = box.tolist()
        assert 0 <= top <= bottom <= height
        assert 0 <= left <= right <= width
        area = sum(1 for _ in range(top, bottom) for _ in range(left, right))
        assert share.item() == pytest.approx(1 - area / (height * width), abs=1e-6)
        assert share.dtype == torch.float32


def test_boxes_are_their_formula() -> None:
    """A square of the image's shape with 1 - lambda of its area around a centre, lambda uniform, cut at the borders."""
    _, boxes, shares = plan_boxes(CutMix(0.5), (300, 4, 4), (32, 20), range(2, 3), (4, 1), 7)
    draws = generator(7, "mix", 4, 1, 2)
    mixed, lambdas = torch.rand(300, generator=draws) < 0.5, torch.rand(300, generator=draws)
    down, across = (torch.randint(extent, (300,), generator=draws).tolist() for extent in (32, 20))
    for at, box in enumerate(boxes.tolist()):
        side = float((1 - lambdas[at]).sqrt())
        split_halves = [int(side * 32) // 2, int(side * 20) // 2] if mixed[at] else [0, 0]
        expected = [max(0, down[at] - split_halves[0]), min(32, down[at] + split_halves[0])]
        expected += [max(0, across[at] - split_halves[1]), min(20, across[at] + split_halves[1])]
        assert box == expected
        if not mixed[at]:
            assert shares[at] == 1
    assert 0.4 < mixed.float().mean() < 0.6
    assert shares.unique().numel() > 50


def test_nothing_is_mixed_with_probability_0_and_everything_is_drawn_anew() -> None:
    def planned(epochs: range, probability: float = 1.0, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        return plan_boxes(CutMix(probability), (50, 4, 4), (8, 8), epochs, (0, 0), seed)

    partner, box, share = planned(range(1), probability=0.0)
    assert (share == 1).all()
    images = torch.rand(4, 3, 8, 8)
    assert torch.equal(paste_box(images, partner[3], box[3], 2), images)
    first, second = planned(range(1)), planned(range(1, 2))
    assert not torch.equal(first[1], second[1])
    for ours, *theirs in zip(planned(range(2)), first, second, strict=True):
        assert torch.equal(ours, torch.cat(theirs))
    assert not torch.equal(planned(range(1), seed=2)[1], first[1])


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_impossible_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(EngramError, match="probability must be at least 0 and at most 1"):
        CutMix(probability)


def test_the_network_sees_mixed_images_and_the_loss_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(tiny_config(augmentation=NO_AUGMENTATION))
    engine, stage = session.engine, session.stage(0)
    main = phase_of(session, extensions=(CutMix(1.0),))
    batches: list[Tensor] = []
    steps: list[Step] = []
    forward = engine.bind(session.learner, 4)
    student = forward.student

    def watch(images: Tensor, train_backbone: bool) -> object:
        batches.append(images.clone())
        return student(images, train_backbone)

    def spy(step: Step) -> dict[str, Tensor]:
        steps.append(step)
        return main.loss(step)

    monkeypatch.setattr(forward, "student", watch)
    rows = torch.arange(10)
    phase = replace(main, rows=lambda: rows, images=10, loss=spy)
    for _ in engine.start(session.learner, stage, phase, 5):
        pass
    plan = plan_epochs(KEEP, NO_AUGMENTATION, rows, range(3), (0, 5), session.learner.seed, True)
    sizes, seed = (3, 4, 2), session.learner.seed
    partners, boxes, shares = plan_boxes(CutMix(1.0), sizes, engine.image_size, range(3), (0, 5), seed)
    different = 0
    for at, (images, step) in enumerate(zip(batches, steps, strict=True)):
        size = 2 if at % 3 == 2 else 4
        picked, partner, box = plan.rows[at, :size], partners[at, :size].tolist(), boxes[at].tolist()
        plain = stage.pool.pixels[picked].permute(0, 3, 1, 2).numpy() / np.float32(255)
        np.testing.assert_allclose(images.numpy(), slow_paste(plain, partner, box), atol=1e-6)
        different += not np.allclose(images.numpy(), plain)
        mixed = step.extra(Mixed)
        assert mixed is not None
        assert step.labels.tolist() == stage.pool.labels[picked].tolist()
        assert mixed.labels.tolist() == [int(step.labels[place]) for place in partner]
        assert mixed.share.shape == ()
        assert mixed.share == shares[at]
    assert different > 4


def test_mixup_blends_each_image_with_its_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_session(tiny_config(augmentation=NO_AUGMENTATION))
    engine, stage = session.engine, session.stage(0)
    main = phase_of(session, extensions=(Mixup(1.0),))
    forward = engine.bind(session.learner, 4)
    student, shares = forward.student, []
    seen: list[Tensor] = []

    def watch(images: Tensor, train_backbone: bool) -> object:
        seen.append(images.clone())
        return student(images, train_backbone)

    def spy(step: Step) -> dict[str, Tensor]:
        mixed = step.extra(Mixed)
        assert mixed is not None
        share = float(mixed.share)
        shares.append(share)
        plain = stage.pool.pixels[step.images.rows].permute(0, 3, 1, 2) / 255
        others = [row for row in range(len(plain)) if step.labels[row] == mixed.labels[0]]
        candidates = torch.stack([share * plain[0] + (1 - share) * plain[row] for row in others])
        assert min((candidates - seen[-1][0]).abs().amax(dim=(1, 2, 3))) < 1e-6
        return main.loss(step)

    monkeypatch.setattr(forward, "student", watch)
    rows = torch.arange(10)
    for _ in engine.start(session.learner, stage, replace(main, rows=lambda: rows, images=10, loss=spy), 5):
        pass
    assert len(shares) == len(set(shares)) == 9
    assert 0 < min(shares) < max(shares) < 1
    with pytest.raises(EngramError, match="alpha must be above 0"):
        Mixup(0)


def test_phases_that_do_not_mix_say_nothing_of_it() -> None:
    session = tiny_session()
    main = phase_of(session)

    def spy(step: Step) -> dict[str, Tensor]:
        assert step.extra(Mixed) is None
        assert step.extras == ()
        return main.loss(step)

    for _ in session.engine.start(session.learner, session.stage(0), replace(main, loss=spy), 0):
        pass


@pytest.mark.parametrize("method", ["gdumb", "ssil"])
@pytest.mark.parametrize("taken", [1, 4])
def test_stopped_inside_an_epoch_it_resumes_exactly(method: str, taken: int, tmp_path: Path) -> None:
    config = tiny_config(method, batch_size=4)
    changes = {"gdumb": {"rehearse": KEEP, "cutmix__probability": 1.0}, "ssil": {"replay": 5}}[method]
    config = config.with_settings(**changes)
    whole = run_whole(config, toy_store(), tmp_path / "whole")
    run_stopped(config, toy_store(), tmp_path / "stopped", taken, starts(1))
    assert_resumes_to(whole, tmp_path / "stopped", toy_store())


def test_persistent_buffers_keep_their_address_until_they_grow() -> None:
    buffers = tiny_session().engine.buffers
    first = buffers.persistent_buffer("partners", (512, 4), torch.int64)
    assert buffers.persistent_buffer("partners", (300, 4), torch.int64) is first
    version = buffers.version
    assert len(buffers.persistent_buffer("partners", (600, 4), torch.int64)) == 600
    assert buffers.version == version + 1, "what was recorded with the old one is recorded again"


# Gradients of a length


@pytest.mark.parametrize("length", [0.5, 3.0, 1e9])
def test_the_length_of_the_gradients_is_that_of_what_trains(length: float) -> None:
    session = tiny_session()
    learn_stage(session, 0)
    network = session.learner.network
    random = torch.Generator().manual_seed(0)
    optimiser = FlatOptimiser(network)
    masks = {
        name: (torch.rand(value.shape, generator=random) < 0.5).float() for name, value in network.named_parameters()
    }
    optimiser.begin(masks, "sgd")
    gradients = {name: torch.randn(value.shape, generator=random) for name, value in network.named_parameters()}
    theirs = [nn.Parameter(torch.zeros(value.shape)) for value in gradients.values()]
    for parameter, (name, value) in zip(theirs, gradients.items(), strict=True):
        parameter.grad = value * masks[name]
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(gradients[name])
    nn.utils.clip_grad_norm_(theirs, length)
    optimiser.limit(length)
    for parameter, (name, ours) in zip(theirs, network.named_parameters(), strict=True):
        assert parameter.grad is not None
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad * masks[name], parameter.grad)
    assert optimiser.gradients.isfinite().all()


def test_a_phase_holds_its_gradients_to_the_length() -> None:
    moved: list[float] = []
    for length in (None, 1e-3):
        session = tiny_session()
        training = replace(KEEP, epochs=1, batch_size=24, momentum=0.0, weight_decay=0.0, clip=None, clip_norm=length)
        phase = phase_of(session, training=replace(training, lr=1.0, schedule="constant"))
        before = torch.cat([value.detach().flatten().clone() for value in session.learner.network.parameters()])
        for _ in session.engine.start(session.learner, session.stage(0), phase, 0):
            pass
        after = torch.cat([value.detach().flatten() for value in session.learner.network.parameters()])
        moved.append(float((after - before).norm()))
    assert moved[0] > 0.01
    assert moved[1] == pytest.approx(1e-3, rel=0.01)


def test_an_impossible_length_is_refused() -> None:
    with pytest.raises(EngramError, match="clip_norm must be above 0, got 0"):
        Training(clip_norm=0)
