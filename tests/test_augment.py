"""What a training step sees: augmentation against one image at a time, and the plan of an epoch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.contract import BatchPlan, Training
from engram.contract.schedules import learning_rates
from engram.core.errors import EngramError
from engram.data.augment import Augmentation, Draws, augment, draw, pad_images, to_unit
from engram.engine.planning import plan_epochs

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8))


def slow_augment(image: np.ndarray, pad: int, top: int, left: int, mirror: bool, factor: float) -> np.ndarray:
    """One image (H, W, 3) in uint8: zeros around it, a crop, a mirror, brightness, clamp; (3, H, W) in [0, 1]."""
    height, width, _ = image.shape
    out = np.zeros((3, height, width))
    for c in range(3):
        for y in range(height):
            for x in range(width):
                across = width - 1 - x if mirror else x
                from_y, from_x = top + y - pad, left + across - pad
                inside = 0 <= from_y < height and 0 <= from_x < width
                value = image[from_y, from_x, c] / 255 if inside else 0.0
                out[c, y, x] = min(1.0, max(0.0, value * factor))
    return out


# Augmentation


@settings(max_examples=20, deadline=None)
@given(
    pad=st.integers(0, 4),
    flip=st.booleans(),
    brightness=st.sampled_from([0.0, 63 / 255, 0.9]),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_a_batch_is_augmented_as_each_of_its_images(
    pad: int, flip: bool, brightness: float, height: int, width: int, seed: int
) -> None:
    images = random_images(5, height, width, seed)
    rows = torch.randint(5, (7,), generator=seeded(seed))
    draws = draw(Augmentation(pad, flip, brightness), (7,), seeded(seed + 1))
    batch = augment(pad_images(images, pad), rows, draws, (height, width))
    assert batch.shape == (7, 3, height, width)
    assert batch.dtype == torch.float32
    for b in range(7):
        expected = slow_augment(
            images[rows[b]].numpy(),
            pad,
            int(draws.top[b]),
            int(draws.left[b]),
            bool(draws.mirror[b]),
            float(draws.factor[b]),
        )
        np.testing.assert_allclose(batch[b].numpy(), expected, atol=1e-6)


def test_channels_keep_their_order() -> None:
    image = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    image[..., 0], image[..., 1], image[..., 2] = 51, 102, 204
    centre = Draws(torch.tensor([2]), torch.tensor([2]), torch.tensor([True]), torch.tensor([1.0]))
    for batch in (augment(pad_images(image, 2), torch.tensor([0]), centre, (4, 4)), to_unit(image)):
        for c, value in enumerate((0.2, 0.4, 0.8)):
            torch.testing.assert_close(batch[0, c], torch.full((4, 4), value))


def test_the_border_is_black_and_the_middle_is_the_image() -> None:
    images = random_images(2, 5, 3)
    padded = pad_images(images, 4)
    assert padded.shape == (2, 13, 11, 3)
    assert torch.equal(padded[:, 4:9, 4:7], images)
    assert padded.long().sum() == images.long().sum()
    assert torch.equal(pad_images(images, 0), images)


def test_nothing_changes_where_nothing_is_asked_for() -> None:
    images = random_images(6, 5, 4)
    draws = draw(Augmentation(pad=0, flip=False, brightness=0.0), (6,), seeded())
    torch.testing.assert_close(augment(images, torch.arange(6), draws, (5, 4)), to_unit(images))


def test_brightness_is_clamped_and_never_negative() -> None:
    images = torch.full((1, 2, 2, 3), 200, dtype=torch.uint8)
    one = torch.zeros(1, dtype=torch.int64)
    for factor, expected in ((1.25, 200 / 255 * 1.25), (1.5, 1.0), (0.01, 0.01 * 200 / 255)):
        draws = Draws(one, one, torch.tensor([False]), torch.tensor([factor]))
        batch = augment(images, one, draws, (2, 2))
        torch.testing.assert_close(batch, torch.full((1, 3, 2, 2), expected))


def test_draws_stay_in_range_and_use_all_of_it() -> None:
    default = Augmentation()
    assert (default.pad, default.flip, default.brightness) == (4, True, 63 / 255)
    draws = draw(default, (50, 200), seeded())
    for corner in (draws.top, draws.left):
        assert corner.shape == (50, 200)
        counts = torch.bincount(corner.flatten(), minlength=9)
        assert len(counts) == 9  # 0 to 8: every shift of the crop in a border of 4
        assert (counts > 900).all()
        assert (counts < 1330).all()
    assert draws.mirror.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert draws.factor.min() >= 1 - 63 / 255
    assert draws.factor.max() <= 1 + 63 / 255
    assert draws.factor.mean().item() == pytest.approx(1, abs=0.005)
    assert draws.factor.std().item() == pytest.approx(63 / 255 / math.sqrt(3), rel=0.03)  # uniform
    # Rows, columns, mirrors and brightness are drawn apart.
    together = torch.stack([x.flatten().float() for x in (draws.top, draws.left, draws.mirror, draws.factor)])
    assert (torch.corrcoef(together) - torch.eye(4)).abs().max() < 0.05


def test_no_draw_is_random_where_its_part_is_off() -> None:
    draws = draw(Augmentation(pad=0, flip=False, brightness=0.0), (100,), seeded())
    assert (draws.top == 0).all()
    assert (draws.left == 0).all()
    assert not draws.mirror.any()
    assert (draws.factor == 1).all()


def test_test_images_are_only_scaled_and_a_mirror_turns_left_to_right() -> None:
    images = random_images(3, 4, 5)
    expected = images.numpy().transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(to_unit(images).numpy(), expected, atol=1e-7)
    np.testing.assert_allclose(to_unit(images, mirror=True).numpy(), expected[..., ::-1], atol=1e-7)
    assert images.dtype == torch.uint8


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pad": -1}, "pad must be at least 0, got -1"),
        ({"brightness": -0.1}, "brightness must be at least 0 and below 1, got -0.1"),
        ({"brightness": 1.0}, "brightness must be at least 0 and below 1, got 1.0"),
        ({"brightness": math.nan}, "brightness must be at least 0 and below 1, got nan"),
    ],
)
def test_impossible_augmentations_are_refused(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        Augmentation(**changes)  # pyright: ignore[reportArgumentType]


# The plan of an epoch


def used_rows(training: Training, images: int, epoch: int = 0, seed: int = 1) -> list[list[int]]:
    """The rows of each step, for a pool whose rows are 100, 101, ..."""
    rows = torch.arange(100, 100 + images)
    plan = plan_epochs(training, Augmentation(), rows, range(epoch, epoch + 1), (0, 0), seed)
    steps: list[list[int]] = []
    count, full = training.batches(images)
    for i in range(len(plan)):
        size = min(full, images - i * full) if i == count - 1 else full
        batch, draws = plan.row(torch.tensor([i]), size)
        lr = plan.learning_rate(torch.tensor([i]))
        assert len(batch) == len(draws.top) == len(draws.left) == len(draws.mirror) == len(draws.factor) == size
        assert torch.equal(draws.factor, plan.draws.factor[i, :size])
        assert lr.tolist() == [plan.lr[i].item()]
        steps.append(batch.tolist())
    return steps


@settings(deadline=None)
@given(
    images=st.integers(1, 60),
    batch_size=st.integers(1, 40),
    remainder=st.sampled_from(["drop", "keep"]),
    epoch=st.integers(0, 2),
)
def test_an_epoch_sees_each_row_once_in_batches(
    images: int, batch_size: int, remainder: Literal["drop", "keep"], epoch: int
) -> None:
    training = Training(epochs=3, batch_size=batch_size, remainder=remainder)
    steps = used_rows(training, images, epoch)
    seen = [row for step in steps for row in step]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(100, 100 + images))
    size = min(batch_size, images)  # a phase smaller than a batch trains on what there is
    left = images % size
    assert [len(step) for step in steps[:-1]] == [size] * (len(steps) - 1)
    if remainder == "drop":
        assert len(seen) == images - left
        assert len(steps[-1]) == size
    else:
        assert len(seen) == images
        assert len(steps[-1]) == (left or size)
    assert training.batches(images) == (len(steps), size)


def test_epochs_and_seeds_shuffle_differently_and_repeat_themselves() -> None:
    training = Training(epochs=3, batch_size=8)
    assert used_rows(training, 40) == used_rows(training, 40)
    assert used_rows(training, 40, epoch=1) != used_rows(training, 40, epoch=0)
    assert used_rows(training, 40, seed=2) != used_rows(training, 40, seed=1)
    # What a dropped remainder leaves out changes from epoch to epoch.
    left_out = [set(range(100, 107)) - {r for s in used_rows(training, 7, epoch=e) for r in s} for e in range(3)]
    assert left_out == [set()] * 3
    training = Training(epochs=9, batch_size=4)
    left_out = [set(range(100, 107)) - {r for s in used_rows(training, 7, epoch=e) for r in s} for e in range(9)]
    assert all(len(rows) == 3 for rows in left_out)
    assert set().union(*left_out) == set(range(100, 107))


def test_the_plan_keeps_to_the_rows_it_was_given() -> None:
    rows = torch.tensor([3, 11, 7, 19, 2])
    plan = plan_epochs(Training(epochs=1, batch_size=2), Augmentation(), rows, range(1), (0, 0), 1)
    assert set(plan.rows.flatten().tolist()) <= set(rows.tolist())


# Schedules


@settings(deadline=None)
@given(epochs=st.integers(1, 7), steps=st.integers(1, 9), lr=st.sampled_from([0.1, 0.05, 1.0]))
def test_the_cosine_schedule_falls_from_the_rate_to_zero(epochs: int, steps: int, lr: float) -> None:
    rates = learning_rates(Training(epochs=epochs, lr=lr, schedule="cosine"), steps).tolist()
    total = epochs * steps
    assert len(rates) == total
    expected = [lr * (1 + math.cos(math.pi * k / total)) / 2 for k in range(total)]
    assert rates == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert rates[0] == pytest.approx(lr)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))
    # One step further the rate would be 0.
    assert 0 < rates[-1] <= lr * (math.pi / total) ** 2 / 4 + 1e-6


def test_the_constant_schedule_stays() -> None:
    rates = learning_rates(Training(epochs=3, lr=0.05, schedule="constant"), 4)
    assert rates.tolist() == pytest.approx([0.05] * 12)


def test_the_steps_schedule_falls_at_the_milestones_whatever_the_epochs() -> None:
    training = Training(epochs=10, lr=0.4, schedule="steps", milestones=(0.5, 0.8), factor=0.5)
    assert learning_rates(training, 2).tolist() == pytest.approx([0.4] * 10 + [0.2] * 6 + [0.1] * 4)
    short = replace(training, epochs=5)
    assert learning_rates(short, 1).tolist() == pytest.approx([0.4] * 3 + [0.2, 0.1])
    none = replace(training, milestones=())
    assert learning_rates(none, 2).tolist() == pytest.approx([0.4] * 20)


def test_the_restarts_schedule_starts_again_for_twice_as_long_each_time() -> None:
    training = Training(epochs=16, lr=0.05, schedule="restarts", factor=0.01)
    expected = [0.005]
    for length in (1, 2, 4, 8):
        expected += [0.0005 + 0.0495 * (1 + math.cos(math.pi * at / length)) / 2 for at in range(length)]
    assert learning_rates(training, 1).tolist() == pytest.approx(expected)
    by_step = learning_rates(training, 3)
    assert by_step.tolist() == pytest.approx([rate for rate in expected for _ in range(3)])
    assert by_step.dtype == torch.float32
    assert learning_rates(replace(training, epochs=0), 3).tolist() == []


def test_images_that_are_not_augmented_come_as_they_are() -> None:
    augmentation = Augmentation(pad=2, brightness=0.2)
    images = torch.randint(256, (5, 6, 7, 3), dtype=torch.uint8)
    plan = plan_epochs(Training(epochs=1, batch_size=5), augmentation, torch.arange(5), range(1), (0,), 1, False)
    rows, draws = plan.row(torch.tensor([0]), 5)
    batch = augment(pad_images(images, 2), rows, draws, (6, 7))
    torch.testing.assert_close(batch, to_unit(images[rows]))


@pytest.mark.parametrize("schedule", ["cosine", "constant", "steps", "restarts"])
def test_the_plans_of_the_epochs_hold_the_schedule_in_order(schedule: Literal["cosine", "constant"]) -> None:
    training = Training(epochs=4, batch_size=3, schedule=schedule, remainder="keep")
    rows = torch.arange(10)
    plans = [plan_epochs(training, Augmentation(), rows, range(e, e + 1), (0, 0), 1) for e in range(4)]
    assert torch.equal(torch.cat([plan.lr for plan in plans]), learning_rates(training, 4))


def test_epochs_planned_together_are_those_planned_one_by_one() -> None:
    training = Training(epochs=5, batch_size=3, remainder="keep")
    rows = torch.arange(10)
    together = plan_epochs(training, Augmentation(), rows, range(1, 4), (0, 0), 1)
    alone = [plan_epochs(training, Augmentation(), rows, range(e, e + 1), (0, 0), 1) for e in range(1, 4)]
    for ours, *theirs in zip(together.tensors(), *(plan.tensors() for plan in alone), strict=True):
        assert torch.equal(ours, torch.cat(theirs))


def test_a_plan_is_loaded_in_place_into_a_larger_one() -> None:
    plan = plan_epochs(Training(epochs=1, batch_size=2), Augmentation(), torch.arange(6), range(1), (0, 0), 1)
    larger = BatchPlan.allocate(5, 2, torch.device("cpu"))
    places = [tensor.data_ptr() for tensor in larger.tensors()]
    larger.load(plan)
    assert [tensor.data_ptr() for tensor in larger.tensors()] == places
    for held, loaded in zip(larger.tensors(), plan.tensors(), strict=True):
        assert torch.equal(held[:3], loaded)
        assert not held[3:].any()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epochs": -1}, "epochs must be at least 0, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
        ({"momentum": -1}, "momentum must be at least 0, got -1"),
        ({"weight_decay": -1}, "weight_decay must be at least 0, got -1"),
        ({"clip": 0}, "clip must be above 0, got 0"),
        ({"schedule": "cosin"}, "cosin"),
        ({"remainder": "dropped"}, "dropped"),
        ({"milestones": (0.5, 1.0)}, "between 0 and 1"),
        ({"milestones": (0.5, 0.2)}, "in ascending order"),
        ({"factor": 0}, "factor must be above 0"),
    ],
)
def test_impossible_trainings_are_refused(changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        Training(**changes)  # pyright: ignore[reportArgumentType]


def test_the_defaults_are_those_of_the_paper() -> None:
    training = Training()
    assert (training.epochs, training.batch_size, training.lr, training.schedule) == (160, 128, 0.1, "cosine")
    assert (training.momentum, training.weight_decay, training.clip) == (0.9, 5e-4, 5.0)
