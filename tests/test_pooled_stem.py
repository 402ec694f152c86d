"""The stem that never stores its large map, against torch's modules in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # triton looks when it is first imported, and again at each launch
pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from engram.engine.compiled import _compiled  # noqa: E402
from engram.kernels import pooled_stem as kernels  # noqa: E402
from engram.kernels.pooled_stem import pooled_stem  # noqa: E402
from engram.nn.heads import LinearHead  # noqa: E402
from engram.nn.network import Network  # noqa: E402
from engram.nn.resnet import BlockGroup, ResNet  # noqa: E402

CHANNELS = 16


def stem(seed: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    torch.manual_seed(seed)
    conv, norm = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS)
    conv.weight.data = conv.weight.data.bfloat16().float()  # what the kernels multiply by
    nn.init.normal_(norm.weight)  # also negative and small ones
    norm.weight.data[0] = 0
    nn.init.normal_(norm.bias)
    return conv.to(DEVICE), norm.to(DEVICE)


def smooth_images(count: int, height: int, width: int) -> Tensor:
    """Images whose neighbouring pixels are alike, as those of photographs, so that variances are small differences."""
    coarse = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    fine = F.interpolate(coarse, size=(height, width), mode="bilinear")
    noise = torch.randn(fine.shape, generator=torch.Generator().manual_seed(2))
    return (fine + 0.05 * noise).bfloat16().float().to(DEVICE)


def reference(x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    return F.max_pool2d(F.relu(norm(conv(x))), 3, stride=2, padding=1)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours.double() - theirs).norm() / theirs.norm()).detach())


@pytest.mark.parametrize("size", [(12, 10), (9, 7)])
def test_training_pass_agrees_with_the_modules(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILES", 2)  # so that several programs sum
    x = smooth_images(3, *size)
    conv, norm = stem(0)
    slow_conv, slow_norm = stem(0)
    slow_conv, slow_norm = slow_conv.double(), slow_norm.double()

    ours, theirs = pooled_stem(x, conv, norm), reference(x.double(), slow_conv, slow_norm)
    assert ours.shape == theirs.shape
    assert relative(ours, theirs) < 5e-3  # of bf16
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(DEVICE)
    (ours * weights).sum().backward()
    (theirs * weights.double()).sum().backward()

    for name, mine, slow in (
        ("weight", conv.weight, slow_conv.weight),
        ("gamma", norm.weight, slow_norm.weight),
        ("beta", norm.bias, slow_norm.bias),
    ):
        assert mine.grad is not None
        assert slow.grad is not None
        assert relative(mine.grad, slow.grad) < 1e-3, name
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean.double(), slow_norm.running_mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(norm.running_var.double(), slow_norm.running_var, rtol=1e-5, atol=1e-7)
    assert norm.num_batches_tracked == slow_norm.num_batches_tracked


def test_eval_pass_uses_the_running_statistics() -> None:
    conv, norm = stem(1)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    norm.eval()
    x = smooth_images(2, 8, 14)
    before = norm.running_mean.clone()
    ours = pooled_stem(x, conv, norm)
    assert not ours.requires_grad
    assert relative(ours, reference(x, conv, norm).double()) < 5e-3
    assert torch.equal(norm.running_mean, before)


def test_nan_is_not_hidden() -> None:
    conv, norm = stem(2)
    x = smooth_images(1, 6, 6)
    x[0, 0, 2, 2] = torch.nan
    norm.eval()
    assert pooled_stem(x, conv, norm).isnan().any()


@pytest.mark.parametrize(("width", "is_ours"), [(16, True), (48, False)])
def test_torch_compiles_the_stem_of_a_width_that_the_kernels_do_not_have(
    width: int, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def count(images: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
        calls.append(conv.out_channels)
        return pooled_stem(images, conv, norm)

    monkeypatch.setattr(kernels, "pooled_stem", count)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    backbone = ResNet([BlockGroup(width, 1, pooled=True), BlockGroup(64, 1, 2)], torch.Generator().manual_seed(0))
    network = Network(backbone, LinearHead(backbone.dim, 2), (0.0,) * 3, (1.0,) * 3).to(DEVICE)
    x = smooth_images(2, 12, 10)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        maps, embedding = _compiled(network, own_stem=True)(x)
        expected_maps, expected = backbone(x)
    assert calls == [width] * is_ours
    assert len(maps) == len(expected_maps)
    assert relative(embedding, expected.double()) < 2e-2


def test_places_are_kept_only_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    pooled_map = kernels.pooled_map

    def count(*given: Any) -> tuple[Tensor, Tensor]:
        kept.append(given[-1])
        return pooled_map(*given)

    monkeypatch.setattr(kernels, "pooled_map", count)
    conv, norm = stem(3)
    x = smooth_images(1, 6, 6)
    pooled_stem(x, conv, norm)
    with torch.no_grad():
        pooled_stem(x, conv, norm)
    conv.requires_grad_(False)
    norm.requires_grad_(False)
    assert not pooled_stem(x, conv, norm).requires_grad
    assert kept == [True, False, False]
