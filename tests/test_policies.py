"""Strong augmentation: each operation against Pillow, the policies' draws, and a registered augmentation."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from conftest import make_config, make_store
from engram import train
from engram.core.errors import EngramError
from engram.data.augment import Augmentation, apply, draw, pad_images
from engram.data.operations import CODES, GREY, OPERATIONS, cut_out, operate
from engram.data.policies import AUTO, POLICIES, register_augmentation
from engram.models.model_config import ModelConfig

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton looks when it is first imported, and again at each launch

AMOUNTS = {
    "shear_x": (-0.99, -0.31, 0.123, 0.99),
    "shear_y": (-0.99, -0.31, 0.123, 0.99),
    "translate_x": (-9.0, -1.0, 0.0, 4.0, 30.0),
    "translate_y": (-9.0, -1.0, 0.0, 4.0, 30.0),
    "rotate": (-135.0, -30.0, 4.5, 90.0),
    "brightness": (-0.99, -0.4, 0.3, 0.99),
    "colour": (-0.99, -0.4, 0.3, 0.99),
    "contrast": (-0.99, -0.4, 0.3, 0.99),
    "sharpness": (-0.99, -0.4, 0.3, 0.99),
    "posterize": (8.0, 7.0, 4.0, 2.0),
    "solarize": (255.0, 204.0, 127.5, 0.0),
}
GEOMETRY = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")


def photos(count: int = 4, height: int = 19, width: int = 23, seed: int = 0) -> Tensor:
    """Smooth random images, some of little contrast, one of a single colour."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((width, height))
        levels = np.asarray(small).astype(float)
        made.append(levels if i % 2 else 60 + levels / 3)
    made[-1] = np.full((height, width, 3), 77.0)
    return torch.from_numpy(np.stack(made).astype(np.uint8))


def by_pillow(image: np.ndarray, name: str, amount: float) -> np.ndarray:
    """One image (H, W, 3) after the operation, by Pillow."""
    picture = Image.fromarray(image)
    grey = (GREY,) * 3
    match name:
        case "shear_x" | "shear_y" | "translate_x" | "translate_y":
            matrix = {
                "shear_x": (1, amount, 0, 0, 1, 0),
                "shear_y": (1, 0, 0, amount, 1, 0),
                "translate_x": (1, 0, -amount, 0, 1, 0),
                "translate_y": (1, 0, 0, 0, 1, -amount),
            }[name]
            made = picture.transform(picture.size, Image.Transform.AFFINE, matrix, fillcolor=grey)
        case "rotate":
            made = picture.rotate(amount, fillcolor=grey)
        case "posterize":
            made = ImageOps.posterize(picture, int(amount))
        case "solarize":
            made = ImageOps.solarize(picture, amount)  # pyright: ignore[reportArgumentType]
        case "autocontrast" | "equalize" | "invert":
            made = getattr(ImageOps, name)(picture)
        case "identity":
            made = picture
        case _:
            kind = {"brightness": "Brightness", "colour": "Color", "contrast": "Contrast", "sharpness": "Sharpness"}
            made = getattr(ImageEnhance, kind[name])(picture).enhance(1 + amount)
    return np.asarray(made)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_does_what_pillow_does(name: str) -> None:
    images = photos()
    for amount in AMOUNTS.get(name, (0.0,)):
        made = operate(images, torch.full((len(images),), CODES[name]), torch.full((len(images),), amount)).numpy()
        for ours, image in zip(made, images.numpy(), strict=True):
            theirs = by_pillow(image, name, amount)
            if name in GEOMETRY:  # Pillow has coordinates of 16 bits, so a pixel on an edge may be its neighbour
                assert (ours != theirs).any(axis=2).mean() <= 0.02, amount
            else:
                assert np.abs(ours.astype(int) - theirs).max() <= 1, amount


def test_each_image_has_its_own_operation() -> None:
    images = photos(15)
    codes, amounts = torch.arange(15).flip(0), torch.tensor([0.4, -0.4, 3.0] * 5)
    made = operate(images, codes, amounts)
    for i in range(15):
        torch.testing.assert_close(made[i : i + 1], operate(images[i : i + 1], codes[i : i + 1], amounts[i : i + 1]))
    assert made.dtype == torch.uint8


def test_the_kernels_do_the_same() -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")
    from engram.kernels.image_operations import operate_on_gpu

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(name, amount) for name in OPERATIONS for amount in AMOUNTS.get(name, (0.0,))]
    images = photos(4, 33, 32)[[i % 4 for i in range(len(cases))]]  # more pixels than a block has
    codes = torch.tensor([CODES[name] for name, _ in cases])
    amounts = torch.tensor([amount for _, amount in cases])
    made = operate_on_gpu(images.to(device), codes.to(device), amounts.to(device)).cpu()
    for (name, amount), ours, theirs in zip(cases, made, operate(images, codes, amounts), strict=True):
        if name == "rotate":  # sines differ in their last bit
            assert (ours != theirs).any(dim=2).float().mean() <= 0.02, (name, amount)
        else:
            assert torch.equal(ours, theirs), (name, amount)


def numbers_of(policy: str, count: int = 20000, size: tuple[int, int] = (32, 32)) -> Tensor:
    return POLICIES.find(policy).draw((count,), torch.Generator().manual_seed(1), size)


def test_trivial_augment_draws_one_of_14_operations_of_31_strengths() -> None:
    numbers = numbers_of("trivial")
    codes = numbers[:, 0].long()
    assert set(codes.tolist()) == {CODES[name] for name in OPERATIONS if name != "invert"}
    assert (torch.bincount(codes, minlength=14)[:14] / len(codes) - 1 / 14).abs().max() < 0.01
    for name, low, high, distinct in (
        ("shear_x", -0.99, 0.99, 61),
        ("rotate", -135, 135, 61),
        ("translate_y", -32, 32, 61),
        ("brightness", -0.99, 0.99, 61),
        ("posterize", 2, 8, 7),
        ("solarize", 0, 255, 31),
        ("equalize", 0, 0, 1),
    ):
        amounts = numbers[codes == CODES[name], 1]
        assert amounts.min() == pytest.approx(low)
        assert amounts.max() == pytest.approx(high)
        assert len(set(amounts.tolist())) == distinct, name
    shifted = numbers_of("trivial", size=(16, 20))
    assert shifted[shifted[:, 0] == CODES["translate_x"], 1].max() == 20
    assert shifted[shifted[:, 0] == CODES["translate_y"], 1].max() == 16


def test_rand_augment_draws_two_operations_of_one_strength() -> None:
    numbers = numbers_of("rand")
    for i in (0, 2):
        codes = numbers[:, i].long()
        turned = numbers[codes == CODES["rotate"], i + 1]
        torch.testing.assert_close(turned.abs(), torch.full_like(turned, 9.0))
        shifts = numbers[codes == CODES["translate_x"], i + 1].abs()
        assert set(shifts.tolist()) == {math.trunc(150 / 331 * 32 * 9 / 30)}
        assert set(numbers[codes == CODES["posterize"], i + 1].tolist()) == {7.0}


def test_auto_augment_draws_its_pairs_with_their_probabilities() -> None:
    numbers = numbers_of("auto", 40000)
    names = list(OPERATIONS)
    counted = Counter((names[int(a)], names[int(b)]) for a, b in zip(numbers[:, 0], numbers[:, 2], strict=True))
    expected: Counter[tuple[str, str]] = Counter()
    for (first, p, _), (second, q, _) in AUTO:
        for one, share in ((first, p), ("identity", 1 - p)):
            for two, other in ((second, q), ("identity", 1 - q)):
                expected[one, two] += 40000 / len(AUTO) * share * other  # pyright: ignore[reportArgumentType]
    for pair in counted | expected:
        assert abs(counted[pair] - expected[pair]) < 5 * math.sqrt(expected[pair]) + 1, pair


def test_cutout_makes_a_box_grey() -> None:
    images = torch.zeros(2, 10, 12, 3, dtype=torch.uint8)
    made = cut_out(images, torch.tensor([[0.5, 0.5], [0.0, 0.99]]), 4)
    assert (made[0, 3:7, 4:8] == GREY).all()
    assert int((made[0] == GREY).sum()) == 4 * 4 * 3
    assert (made[1, :2, 9:] == GREY).all()  # cut off at the edges
    assert int((made[1] == GREY).sum()) == 2 * 3 * 3


def test_the_policy_comes_after_crop_mirror_and_brightness() -> None:
    images = photos(6)
    augmentation = Augmentation(pad=2, policy="auto", cutout=5)
    drawn = draw(augmentation, (6,), torch.Generator().manual_seed(2), (19, 23))
    assert drawn.numbers is not None
    rows = torch.arange(6)
    batch = apply(augmentation, pad_images(images, 2), rows, drawn, (19, 23))
    plain = apply(Augmentation(pad=2), pad_images(images, 2), rows, drawn, (19, 23), strong=False)
    levels = (plain * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    for i in range(2):
        levels = operate(levels, drawn.numbers[:, 2 * i].long(), drawn.numbers[:, 2 * i + 1])
    expected = cut_out(levels, drawn.numbers[:, 4:], 5)
    torch.testing.assert_close(batch, expected.permute(0, 3, 1, 2) / 255)
    # The choices before it are those of a run without a policy.
    before = draw(Augmentation(pad=2), (6,), torch.Generator().manual_seed(2))
    for ours, theirs in zip(drawn.tensors()[:4], before.tensors(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def own_augmentation() -> Iterator[str]:
    @register_augmentation("darker", numbers=1)
    def darker(images: Tensor, numbers: Tensor) -> Tensor:
        return (images * numbers[:, :, None, None]).to(torch.uint8)

    yield "darker"
    POLICIES.remove("darker")


def test_an_augmentation_of_ones_own_trains(own_augmentation: str) -> None:
    store = make_store(4)
    plain, darker = (
        train(make_config("replay").with_value("augmentation.policy", policy), store)
        for policy in ("none", own_augmentation)
    )
    assert plain["stages"] != darker["stages"]


@pytest.mark.parametrize("method", ["ucir-dde", "bic", "mnemonics"])
def test_every_kind_of_pass_takes_a_policy(method: str) -> None:
    config = make_config(method).with_value("augmentation.policy", "rand").with_value("augmentation.cutout", 3)
    result = train(config.with_value("settings.train.epochs", 1), make_store(4, train=6))
    assert len(result["stages"]) == 2


def test_a_box_larger_than_the_images_is_refused() -> None:
    config = make_config("replay").with_value("augmentation.cutout", 9)
    with pytest.raises(EngramError, match="cutout=9 hides images of 8x8 pixels; give a smaller box, such as cutout=2"):
        train(config, make_store(4))
    with pytest.raises(EngramError, match="cutout=9 hides images of 8x8"):
        ModelConfig.choose("lda", images=10, image_size=8, augmentation=config.augmentation)


def test_what_is_not_an_augmentation_is_refused() -> None:
    with pytest.raises(EngramError, match=r"no augmentation policy 'trivail': did you mean 'trivial'"):
        Augmentation(policy="trivail")
    with pytest.raises(EngramError, match="cutout must be at least 0, got -1"):
        Augmentation(cutout=-1)
    with pytest.raises(EngramError, match="must keep their shape and type"):
        register_augmentation("smaller", numbers=0)(lambda images, numbers: images[:, 1:])
    with pytest.raises(EngramError, match=r"makes torch.float32 of the shape"):
        register_augmentation("float", numbers=0)(lambda images, numbers: images / 255)
    with pytest.raises(EngramError, match="is registered already"):
        register_augmentation("trivial", numbers=0)(lambda images, numbers: images)
    with pytest.raises(EngramError, match="needs 0 or more random numbers"):
        register_augmentation("none-of-it", numbers=-1)(lambda images, numbers: images)
    with pytest.raises(EngramError, match="cannot be called 'none', which means no policy"):
        register_augmentation("none", numbers=0)(lambda images, numbers: images)
    with pytest.raises(EngramError, match="makes other images of the same images and numbers"):
        register_augmentation("drawing", numbers=0)(lambda images, _: images ^ torch.randint(256, images.shape).byte())
    with pytest.raises(EngramError, match="draws other numbers from the same generator"):
        register_augmentation("drawn", numbers=2, draw=lambda shape, *_: torch.rand(*shape, 2))(
            lambda images, _: images
        )
    assert "smaller" not in POLICIES
