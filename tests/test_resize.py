"""Random parts of images, resized: against Pillow and a loop over pixels, and as part of a plan."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from conftest import make_config, make_store
from engram import EngramError, resume, run, train
from engram.contract import Training
from engram.core.events import Checkpointed, RunFinished, Stopped
from engram.data import augment as resize
from engram.data.augment import (
    GRID,
    Augmentation,
    Draws,
    apply,
    augment,
    centre,
    crop_pixels,
    draw,
    draw_crops,
    identity_draws,
    pad_images,
    resize_augment,
    resize_crops,
)
from engram.engine.planning import plan_epochs
from helpers import cpu_engine, tiny_config, tiny_session, toy_store

VIEW = Augmentation(pad=0, view=0.875)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_images(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Images with structure at all scales, so that a shift by a fraction of a pixel shows."""
    random = np.random.default_rng(seed)
    ys, xs = np.mgrid[:height, :width]
    waves = [np.sin(ys * a + xs * b + c) for a, b, c in random.uniform(-1.5, 1.5, (3 * count, 3))]
    noise = random.normal(0, 12, (count, height, width, 3))
    images = 128 + 100 * np.stack(waves).reshape(count, 3, height, width).transpose(0, 2, 3, 1) + noise
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8))


def slow_resize(image: np.ndarray, top: int, left: int, height: int, width: int, size: tuple[int, int]) -> np.ndarray:
    """A part of an image (H, W, 3) at another size: every pixel is a mean of those of the part, weighted by a tent."""
    out = np.zeros((*size, 3))
    part = image[top : top + height, left : left + width].astype(float)

    def tent(into: int, length: int, pixels: int) -> list[float]:
        scale = length / pixels
        reach = max(scale, 1.0)
        middle = (into + 0.5) * scale
        weights = [max(0.0, 1 - abs(place + 0.5 - middle) / reach) for place in range(length)]
        return [weight / sum(weights) for weight in weights]

    for y in range(size[0]):
        for x in range(size[1]):
            for i, down in enumerate(tent(y, height, size[0])):
                for j, across in enumerate(tent(x, width, size[1])):
                    if down and across:
                        out[y, x] += down * across * part[i, j]
    return out


# Resizing


@settings(max_examples=15, deadline=None)
@given(
    height=st.integers(3, 9),
    width=st.integers(3, 9),
    size=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    seed=st.integers(0, 999),
)
def test_a_part_is_resized_pixel_by_pixel(height: int, width: int, size: tuple[int, int], seed: int) -> None:
    images = smooth_images(4, height, width, seed)
    rows = torch.randint(4, (5,), generator=seeded(seed))
    parts = draw_crops((5,), seeded(seed + 1))
    mirror = torch.tensor([False, True, False, True, True])
    batch = resize_crops(images, rows, parts, mirror, size)
    assert batch.shape == (5, 3, *size)
    top, rows_of_part = crop_pixels(parts[0], height, size[0])
    left, columns_of_part = crop_pixels(parts[1], width, size[1])
    for b in range(5):
        box = (int(top[b]), int(left[b]), int(rows_of_part[b]), int(columns_of_part[b]))
        expected = slow_resize(images[rows[b]].numpy(), *box, size)
        expected = expected[:, ::-1] if mirror[b] else expected
        np.testing.assert_allclose(batch[b].permute(1, 2, 0).numpy(), expected, atol=2e-3)


@pytest.mark.parametrize("side", [40, 64])
def test_a_part_is_what_pillow_makes_of_it(side: int) -> None:
    """Enlarged and shrunk; Pillow rounds to whole values after each side."""
    images, count, size = smooth_images(1, side, side, 5), 24, (35, 35)
    parts = draw_crops((count,), seeded(3))
    top, height = crop_pixels(parts[0], side, size[0])
    left, width = crop_pixels(parts[1], side, size[1])
    assert height.min() < 35 < height.max()
    batch = resize_crops(
        images, torch.zeros(count, dtype=torch.int64), parts, torch.zeros(count, dtype=torch.bool), size
    )
    photograph = Image.fromarray(images[0].numpy())
    for b in range(count):
        y, x = int(top[b]), int(left[b])
        part = photograph.crop((x, y, x + int(width[b]), y + int(height[b])))
        theirs = np.asarray(part.resize((35, 35), Image.Resampling.BILINEAR)).astype(float)
        np.testing.assert_allclose(batch[b].permute(1, 2, 0).numpy(), theirs, atol=1.01)


def test_brightness_comes_after_and_is_clamped() -> None:
    images = smooth_images(3, 16, 16)
    draws = draw(VIEW, (3,), seeded())
    dark = Draws(draws.top, draws.left, draws.mirror, torch.full((3,), 0.5))
    bright = Draws(draws.top, draws.left, draws.mirror, torch.full((3,), 1.9))
    plain = resize_crops(images, torch.arange(3), (draws.top, draws.left), draws.mirror, (14, 14)) / 255
    torch.testing.assert_close(resize_augment(images, torch.arange(3), dark, (14, 14)), plain * 0.5)
    torch.testing.assert_close(resize_augment(images, torch.arange(3), bright, (14, 14)), (plain * 1.9).clamp(max=1))
    assert (plain * 1.9).max() > 1


@pytest.mark.parametrize(("side", "size"), [(256, 224), (64, 56), (37, 32), (9, 9)])
def test_what_is_not_augmented_is_the_centre_to_the_bit(side: int, size: int) -> None:
    assert VIEW.view_size((side, side)) == (size, size) or side == 9
    images = smooth_images(2, side, side)
    batch = apply(VIEW, images, torch.arange(2), identity_draws(VIEW, (2,)), (size, size))
    middle = centre(images, (size, size))
    assert middle.shape == (2, size, size, 3)
    edge = (side - size) // 2
    assert torch.equal(middle[0, 0, 0], images[0, edge, edge])
    assert torch.equal((batch * 255).round().to(torch.uint8).permute(0, 2, 3, 1), middle)
    torch.testing.assert_close(batch, middle.permute(0, 3, 1, 2) / 255, atol=1e-7, rtol=0)


# Drawing


@settings(max_examples=30, deadline=None)
@given(side=st.integers(1, 300), seed=st.integers(0, 99))
def test_parts_lie_inside_the_image(side: int, seed: int) -> None:
    for drawn in draw_crops((200,), seeded(seed)):
        first, length = crop_pixels(drawn, side, 7)
        assert (length >= 1).all()
        assert (first >= 0).all()
        assert (first + length <= side).all()


@pytest.mark.parametrize(("share", "pixels"), [(0.01, 1), (0.24, 2), (0.26, 3), (0.94, 9), (0.96, 10), (1.0, 10)])
def test_a_part_has_the_nearest_number_of_pixels_and_one_at_least(share: float, pixels: int) -> None:
    drawn = torch.tensor([round(share * GRID) * GRID, round(share * GRID) * GRID + GRID - 1])
    first, length = crop_pixels(drawn, 10, 7)
    assert length.tolist() == [pixels, pixels]
    assert first.tolist() == [0, 10 - pixels], "from one edge to the other"


def test_parts_have_the_published_areas_and_shapes() -> None:
    """Area uniform in 0.08..1, the sides' ratio uniform in its logarithm in 3/4..4/3, of parts that fit; any place."""
    down, across = draw_crops((40_000,), seeded(7))
    height, width = (down // GRID) / GRID, (across // GRID) / GRID
    area, ratio = height * width, (width / height).log()
    assert 0.0799 < area.min() < 0.09
    assert 0.98 < area.max() <= 1
    assert ratio.abs().max() <= math.log(4 / 3) + 1e-3
    assert ratio.mean().item() == pytest.approx(0, abs=0.005)
    small = area < 0.7  # all of them fit: 0.7 * 4/3 < 1
    assert area[small].mean().item() == pytest.approx((0.08 + 0.7) / 2, abs=0.005)
    assert ratio[small].std().item() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), rel=0.02)
    for drawn in (down, across):
        place = (drawn % GRID) / GRID
        assert place.mean().item() == pytest.approx(0.5, abs=0.01)
        assert place.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.02)
    first, length = crop_pixels(down, 256, 224)
    free = 256 - length
    assert (first == 0).any()
    assert (first == free)[free > 0].any()


def test_where_no_part_fits_it_is_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize, "AREA", (1.0, 1.0))
    for drawn in draw_crops((50,), seeded()):
        first, length = crop_pixels(drawn, 31, 5)
        assert (first == 0).all()
        assert (length == 31).all()


def test_shifted_crops_are_drawn_and_taken_as_before() -> None:
    """The order of the draws is part of what a seed means."""
    draws, random = draw(Augmentation(), (4, 3), seeded(11)), seeded(11)
    assert torch.equal(draws.top, torch.randint(9, (4, 3), generator=random))
    assert torch.equal(draws.left, torch.randint(9, (4, 3), generator=random))
    assert torch.equal(draws.mirror, torch.rand(4, 3, generator=random) < 0.5)
    assert torch.equal(draws.factor, 1 + 63 / 255 * (2 * torch.rand(4, 3, generator=random) - 1))
    padded, rows = pad_images(smooth_images(3, 8, 8), 4), torch.arange(3)
    one = Draws(draws.top[0], draws.left[0], draws.mirror[0], draws.factor[0])
    assert torch.equal(apply(Augmentation(), padded, rows, one, (8, 8)), augment(padded, rows, one, (8, 8)))


def test_a_plan_of_resized_parts_is_the_same_however_far_ahead_it_looks() -> None:
    training, rows = Training(epochs=3, batch_size=4, remainder="keep"), torch.arange(10)
    whole = plan_epochs(training, VIEW, rows, range(3), (0, 0), seed=1)
    alone = plan_epochs(training, VIEW, rows, range(1, 2), (0, 0), seed=1)
    for ours, theirs in zip(whole.tensors(), alone.tensors(), strict=True):
        assert torch.equal(ours[3:6], theirs)
    assert not torch.equal(whole.draws.top[:3], whole.draws.top[3:6])
    other = plan_epochs(training, VIEW, rows, range(3), (0, 0), seed=2)
    assert not torch.equal(whole.draws.left, other.draws.left)
    as_is = plan_epochs(training, VIEW, rows, range(1), (0, 0), seed=1, augmented=False)
    assert not as_is.draws.top.any()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pad": 0, "view": 0.0}, r"view must be above 0 and at most 1, got 0"),
        ({"pad": 0, "view": 1.5}, r"at most 1, got 1\.5"),
        ({"pad": 0, "view": math.nan}, "at most 1, got nan"),
        ({"view": 0.875}, r"with view=0\.875 set pad to 0, got pad=4"),
    ],
)
def test_impossible_views_are_refused(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        Augmentation(**changes)  # pyright: ignore[reportArgumentType]


# In a run


def test_networks_see_the_centre_of_what_is_stored() -> None:
    store = toy_store(size=16)
    session = tiny_session(tiny_config(augmentation=VIEW), store)
    assert session.engine.image_size == (14, 14)
    images = torch.from_numpy(store.test.images)
    with torch.no_grad():
        session.learner.network.head.grow(2, seeded())
    network = session.learner.network
    for mirror in (False, True):
        plain = cpu_engine(size=14).infer(network, images[:, 1:15, 1:15], mirror)
        for ours, theirs in zip(session.engine.infer(network, images, mirror), plain, strict=True):
            assert torch.equal(ours, theirs)


def test_our_kernels_leave_resizing_to_torch() -> None:
    session = tiny_session(tiny_config(augmentation=VIEW), toy_store(size=16))
    assert session.engine.why_not_fused(session.learner.network.backbone) == "they crop images, but do not resize them"


@pytest.mark.parametrize("method", ["ucir-dde", "ssil", "gdumb", "der", "mnemonics", "mas"])
def test_what_methods_do_with_batches_goes_with_resized_parts(method: str) -> None:
    """Neighbours, two streams, mixed images, backbones that are added, tuned images, gradients of single images."""
    config = tiny_config(method, epochs=1, augmentation=VIEW, increment=4)
    result = train(config, toy_store(size=16))
    assert [stage["classes"] for stage in result["stages"]] == [2, 6]


@pytest.mark.parametrize("method", ["afc", "bic"])
def test_a_run_with_resized_parts_stopped_inside_a_stage_resumes_exactly(method: str, tmp_path: Path) -> None:
    config, store, taken = make_config(method, augmentation=VIEW), make_store(size=16), 0
    if method == "bic":
        config = config.with_settings(correction__epochs=4)
    whole = next(event.result for event in run(config, store) if isinstance(event, RunFinished))

    def stop() -> bool:
        nonlocal taken
        taken += 1
        return taken == 15  # in stage 1

    events = list(run(config, store, tmp_path / "run", stop=stop))
    assert isinstance(events[-1], Stopped)
    assert isinstance(events[-2], Checkpointed)
    again = next(event.result for event in resume(tmp_path / "run", store) if isinstance(event, RunFinished))
    assert [s["accuracy_by_stage"] for s in again["stages"]] == [s["accuracy_by_stage"] for s in whole["stages"]]
