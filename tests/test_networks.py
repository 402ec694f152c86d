"""Backbones against hand-written ones, and the optimiser over a network's parameters against torch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engram.contract.settings import Training
from engram.core.errors import EngramError
from engram.engine.flat_optimiser import FlatOptimiser
from engram.nn.backbones import build_backbone
from engram.nn.heads import LSCHead
from engram.nn.network import Network, Part
from engram.nn.resnet import Block, BlockGroup, ResNet, resnet10, resnet18, resnet18_small, resnet32
from engram.nn.wide_resnet import wrn16_2
from helpers import parameters_of


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shake(network: nn.Module, seed: int) -> None:
    """Random values for all BatchNorms, so that a test sees every one of them."""
    random = seeded(seed)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.bias, module.running_mean):
                    assert tensor is not None
                    tensor.copy_(torch.randn(tensor.shape, generator=random))
                assert module.running_var is not None
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=random))


# Slow implementations


def slow_convolution(x: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    """A 3x3 convolution of (C, H, W) with one pixel of zeros around, by loops."""
    outs, ins = weight.shape[:2]
    height, width = x.shape[1:]
    rows, columns = (height + stride - 1) // stride, (width + stride - 1) // stride
    out = np.zeros((outs, rows, columns))
    for o in range(outs):
        for i in range(rows):
            for j in range(columns):
                for dy in (-1, 0, 1):
                    for dx in (-1, 0, 1):
                        y, z = i * stride + dy, j * stride + dx
                        if 0 <= y < height and 0 <= z < width:
                            for c in range(ins):
                                out[o, i, j] += weight[o, c, dy + 1, dx + 1] * x[c, y, z]
    return out


def slow_batch_norm(x: np.ndarray, bn: nn.BatchNorm2d) -> np.ndarray:
    """BatchNorm in eval mode of (C, H, W), channel by channel."""
    out = np.empty_like(x)
    assert bn.running_mean is not None
    assert bn.running_var is not None
    for c in range(len(x)):
        std = math.sqrt(bn.running_var[c].item() + bn.eps)
        out[c] = (x[c] - bn.running_mean[c].item()) / std * bn.weight[c].item() + bn.bias[c].item()
    return out


def slow_shortcut(x: np.ndarray, channels: int, stride: int) -> np.ndarray:
    """Every second pixel where the stride is 2, and zeros for channels that x does not have."""
    rows, columns = (x.shape[1] + stride - 1) // stride, (x.shape[2] + stride - 1) // stride
    out = np.zeros((channels, rows, columns))
    for c in range(len(x)):
        for i in range(rows):
            for j in range(columns):
                out[c, i, j] = x[c, stride * i, stride * j]
    return out


def slow_block(x: np.ndarray, block: Block) -> np.ndarray:
    """conv-BN-ReLU-conv-BN plus the shortcut, and nothing after the sum."""
    out = slow_convolution(x, block.conv1.weight.detach().numpy(), block.stride)
    out = np.maximum(slow_batch_norm(out, block.bn1), 0)
    out = slow_batch_norm(slow_convolution(out, block.conv2.weight.detach().numpy(), 1), block.bn2)
    return out + slow_shortcut(x, len(out), block.stride)


# resnet32


def test_resnet32_has_the_parameters_of_its_description() -> None:
    def block(ins: int, outs: int) -> int:
        return 9 * ins * outs + 2 * outs + 9 * outs * outs + 2 * outs

    stem = 9 * 3 * 16 + 2 * 16
    groups = 5 * block(16, 16), block(16, 32) + 4 * block(32, 32), block(32, 64) + 3 * block(64, 64), block(64, 64)
    backbone = resnet32(seeded())
    assert sum(parameter.numel() for parameter in backbone.parameters()) == stem + sum(groups) == 463_504
    assert [sum(p.numel() for p in group.parameters()) for group in backbone.groups] == list(groups)
    assert [sum(isinstance(m, Block) for m in group.modules()) for group in backbone.groups] == [5, 5, 4, 1]
    # 1 + 2 * 15 convolutions and the head are the 32 layers.
    assert sum(isinstance(module, nn.Conv2d) for module in backbone.modules()) == 31
    assert all(module.bias is None for module in backbone.modules() if isinstance(module, nn.Conv2d))


def test_resnet32_gives_four_maps_and_an_embedding_of_64() -> None:
    backbone = resnet32(seeded())
    shake(backbone, 1)
    maps, embedding = backbone(torch.rand(2, 3, 32, 32, generator=seeded()))
    assert [tuple(z.shape) for z in maps] == [(2, 16, 32, 32), (2, 32, 16, 16), (2, 64, 8, 8), (2, 64, 8, 8)]
    assert embedding.shape == (2, 64)
    assert (backbone.dim, backbone.widths) == (64, (16, 32, 64, 64))
    torch.testing.assert_close(embedding, maps[-1].sum(dim=(2, 3)) / 64)
    # No ReLU ends a block: maps and embedding have values of both signs.
    for values in (*maps, embedding):
        assert values.min() < 0 < values.max()


@pytest.mark.parametrize(("size", "last"), [(8, 2), (16, 4), (20, 5), (13, 4)])
def test_resnet10_takes_small_images(size: int, last: int) -> None:
    backbone = resnet10(seeded())
    maps, embedding = backbone(torch.rand(2, 3, size, size, generator=seeded()))
    assert len(maps) == 4
    assert maps[-1].shape == (2, 64, last, last)
    assert embedding.shape == (2, 64)


@pytest.mark.parametrize(("ins", "outs", "stride"), [(3, 3, 1), (2, 4, 2), (3, 6, 2)])
@pytest.mark.parametrize("size", [(6, 6), (5, 4)])
def test_a_block_is_its_description(ins: int, outs: int, stride: int, size: tuple[int, int]) -> None:
    block = Block(ins, outs, stride).double().eval()
    shake(block, 3)
    x = torch.randn(2, ins, *size, generator=seeded(4), dtype=torch.float64)
    expected = np.stack([slow_block(image, block) for image in x.numpy()])
    np.testing.assert_allclose(block(x).detach().numpy(), expected, rtol=1e-9, atol=1e-9)


def test_a_whole_backbone_is_its_description() -> None:
    backbone = ResNet([BlockGroup(2, 1), BlockGroup(4, 2, 2), BlockGroup(4, 1)], seeded()).double().eval()
    shake(backbone, 5)
    x = torch.randn(2, 3, 6, 6, generator=seeded(6), dtype=torch.float64)
    maps, embedding = backbone(x)
    for b, image in enumerate(x.numpy()):
        now = slow_convolution(image, backbone.conv.weight.detach().numpy(), 1)
        now = np.maximum(slow_batch_norm(now, backbone.bn), 0)
        for group, ours in zip(backbone.groups, maps, strict=True):
            for block in group.children():
                assert isinstance(block, Block)
                now = slow_block(now, block)
            np.testing.assert_allclose(ours[b].detach().numpy(), now, rtol=1e-9, atol=1e-9)
        means = [now[c].sum() / now[c].size for c in range(len(now))]
        np.testing.assert_allclose(embedding[b].detach().numpy(), means, rtol=1e-9, atol=1e-9)


# resnet18


def slow_pool(x: np.ndarray) -> np.ndarray:
    """The largest of the 3x3 pixels around every second pixel of (C, H, W)."""
    rows, columns = (x.shape[1] + 1) // 2, (x.shape[2] + 1) // 2
    out = np.zeros((len(x), rows, columns))
    for c in range(len(x)):
        for i in range(rows):
            for j in range(columns):
                out[c, i, j] = x[c, max(0, 2 * i - 1) : 2 * i + 2, max(0, 2 * j - 1) : 2 * j + 2].max()
    return out


def slow_projection(x: np.ndarray, block: Block) -> np.ndarray:
    """A 1x1 convolution of every pixel that the stride leaves, and its norm; x itself where the shapes agree."""
    if block.projection is None:
        return x
    convolution, norm = block.projection
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    weight = convolution.weight.detach().numpy()[:, :, 0, 0]
    return slow_batch_norm(np.tensordot(weight, x[:, :: block.stride, :: block.stride], axes=1), norm)


@pytest.mark.parametrize("size", [(8, 8), (7, 6)])
def test_a_backbone_of_the_imagenet_kind_is_its_description(size: tuple[int, int]) -> None:
    """Stem halved by a maximum; a ReLU ends the first block of a group and not the second, nor the group."""
    groups = [
        BlockGroup(2, 2, pooled=True, projected=True, rectified=True),
        BlockGroup(4, 2, 2, projected=True, rectified=True),
    ]
    backbone = ResNet(groups, seeded()).double().eval()
    shake(backbone, 5)
    x = torch.randn(2, 3, *size, generator=seeded(6), dtype=torch.float64)
    maps, embedding = backbone(x)
    for b, image in enumerate(x.numpy()):
        now = slow_convolution(image, backbone.conv.weight.detach().numpy(), 1)
        now = slow_pool(np.maximum(slow_batch_norm(now, backbone.bn), 0))
        for group, ours in zip(backbone.groups, maps, strict=True):
            first, second = group.children()
            for block in (first, second):
                assert isinstance(block, Block)
                out = slow_convolution(now, block.conv1.weight.detach().numpy(), block.stride)
                out = np.maximum(slow_batch_norm(out, block.bn1), 0)
                out = slow_batch_norm(slow_convolution(out, block.conv2.weight.detach().numpy(), 1), block.bn2)
                now = out + slow_projection(now, block)
                if block is first:
                    now = np.maximum(now, 0)
            np.testing.assert_allclose(ours[b].detach().numpy(), now, rtol=1e-9, atol=1e-9)
            assert now.min() < 0
        np.testing.assert_allclose(embedding[b].detach().numpy(), now.mean(axis=(1, 2)), rtol=1e-9, atol=1e-9)


def test_resnet18_has_the_parameters_of_its_description() -> None:
    def block(ins: int, outs: int) -> int:
        shortcut = ins * outs + 2 * outs if ins != outs else 0
        return 9 * ins * outs + 9 * outs * outs + 4 * outs + shortcut

    groups = [block(ins, outs) + block(outs, outs) for ins, outs in ((64, 64), (64, 128), (128, 256), (256, 512))]
    backbone = resnet18(seeded())
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 9 * 3 * 64 + 2 * 64 + sum(groups)
    assert [sum(p.numel() for p in group.parameters()) for group in backbone.groups] == groups
    blocks = [module for module in backbone.modules() if isinstance(module, Block)]
    assert [block.rectified for block in blocks] == [True, False] * 4
    assert [block.projection is not None for block in blocks] == [False, False, True, False, True, False, True, False]
    assert all((block.bn2.weight == 0).all() for block in blocks)
    assert all((block.projection[1].weight == 1).all() for block in blocks if block.projection is not None)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("size", "sides"), [(32, (16, 8, 4, 2)), (37, (19, 10, 5, 3)), (56, (28, 14, 7, 4))])
def test_resnet18_takes_images_of_any_size(size: int, sides: tuple[int, ...]) -> None:
    backbone = resnet18(seeded())
    shake(backbone, 1)
    maps, embedding = backbone(torch.rand(2, 3, size, size, generator=seeded()))
    shapes = [(2, width, side, side) for width, side in zip((64, 128, 256, 512), sides, strict=True)]
    assert [tuple(z.shape) for z in maps] == shapes
    assert embedding.shape == (2, 512)
    assert (backbone.dim, backbone.widths) == (512, (64, 128, 256, 512))
    for values in (*maps, embedding):
        assert values.min() < 0 < values.max()
    embedding.sum().backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())


def test_every_block_starts_as_its_shortcut() -> None:
    backbone = resnet32(seeded())
    blocks = [module for module in backbone.modules() if isinstance(module, Block)]
    assert len(blocks) == 15
    assert all((block.bn2.weight == 0).all() and (block.bn1.weight == 1).all() for block in blocks)
    assert (backbone.bn.weight == 1).all()
    x = torch.rand(1, 3, 8, 8, generator=seeded())
    maps, _ = backbone(x)
    stem = torch.relu(backbone.bn(backbone.conv(x)))[0].detach().numpy()
    np.testing.assert_allclose(maps[0][0].detach().numpy(), stem, atol=1e-6)
    second = slow_shortcut(stem, 32, 2)
    np.testing.assert_allclose(maps[1][0].detach().numpy(), second, atol=1e-6)
    np.testing.assert_allclose(maps[2][0].detach().numpy(), slow_shortcut(second, 64, 2), atol=1e-6)
    assert torch.equal(maps[3], maps[2])


@pytest.mark.parametrize("make", [resnet10, resnet32, resnet18, resnet18_small, wrn16_2])
def test_convolutions_start_with_the_standard_deviation_of_he_by_fan_out(
    make: Callable[[torch.Generator], nn.Module],
) -> None:
    for module in make(seeded(7)).modules():
        if isinstance(module, nn.Conv2d):
            expected = math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels))
            count = module.weight.numel()
            # Five standard errors of a standard deviation and of a mean of so many normal numbers.
            assert module.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * count))
            assert module.weight.mean().item() == pytest.approx(0, abs=5 * expected / math.sqrt(count))


def test_a_seed_means_the_same_weights_and_initialise_undoes_training() -> None:
    one, same, other = resnet10(seeded(1)), resnet10(seeded(1)), resnet10(seeded(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.conv.weight, other.conv.weight)
    shake(other, 3)
    other.initialise(seeded(1))
    for name, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_misspelt_backbone_is_refused() -> None:
    with pytest.raises(EngramError, match=r"no backbone 'resnet23': did you mean 'resnet32'\?"):
        build_backbone("resnet23", seeded())


# Network


def small_network(seed: int = 0, classes: int = 3, capacity: int = 5) -> Network:
    backbone = ResNet([BlockGroup(4, 1), BlockGroup(6, 1, 2)], seeded(seed))
    head = LSCHead(6, capacity, proxies=2)
    head.grow(classes, seeded(seed + 1))
    return Network(backbone, head, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


def test_a_network_normalises_each_channel_of_its_images() -> None:
    network = small_network().eval()
    images = torch.rand(2, 3, 8, 8, generator=seeded())
    normal = torch.empty_like(images)
    for c, (mean, std) in enumerate([(0.5071, 0.2675), (0.4867, 0.2565), (0.4408, 0.2761)]):
        normal[:, c] = (images[:, c] - mean) / std
    maps, embedding = network.backbone(normal)
    output = network(images)
    torch.testing.assert_close(output.embedding, embedding)
    torch.testing.assert_close(output.maps, maps)


def test_a_frozen_backbone_takes_no_gradient_but_its_statistics_move() -> None:
    network = small_network().train()
    before = network.backbone.get_buffer("bn.running_mean").clone()
    output = network(torch.rand(4, 3, 8, 8, generator=seeded()), train_backbone=False)
    assert not output.embedding.requires_grad
    assert output.logits.requires_grad
    assert not torch.equal(network.backbone.get_buffer("bn.running_mean"), before)


# The optimiser


def random_gradients(network: Network, random: torch.Generator, size: float) -> list[torch.Tensor]:
    return [size * torch.randn(parameter.shape, generator=random) for parameter in network.parameters()]


@settings(max_examples=12, deadline=None)
@given(
    parts=st.sampled_from(
        [
            Part.BACKBONE | Part.NEW_CLASSES | Part.HEAD_SHARED,
            Part.OLD_CLASSES | Part.NEW_CLASSES,
            Part.BACKBONE | Part.OLD_CLASSES | Part.NEW_CLASSES | Part.HEAD_SHARED,
        ]
    ),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 5e-4, 0.1]),
    clip=st.sampled_from([None, 5.0, 0.3]),
    seed=st.integers(0, 1000),
)
def test_flat_sgd_is_sgd_on_clamped_gradients_where_the_mask_lets_it(
    parts: Part, momentum: float, weight_decay: float, clip: float | None, seed: int
) -> None:
    ours = small_network(seed)
    theirs = copy.deepcopy(ours)
    start = parameters_of(theirs)
    masks = theirs.trainable(parts, num_old=1)
    optimiser = FlatOptimiser(ours)
    optimiser.begin(ours.trainable(parts, num_old=1), "sgd")
    reference = torch.optim.SGD(theirs.parameters(), lr=1.0, momentum=momentum, weight_decay=weight_decay)
    training, random = Training(momentum=momentum, weight_decay=weight_decay, clip=clip), seeded(seed)
    for lr in (0.1, 0.07, 0.03, 0.003):
        gradients = random_gradients(ours, random, size=4.0)
        optimiser.zero_grad()
        for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad += gradient
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient if clip is None else gradient.clamp(-clip, clip)
        optimiser.step(torch.tensor([lr]), training)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        # What may not move goes back to where it was.
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                parameter.copy_(torch.where(masks[name] == 1, parameter, start[name]))
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, dict(theirs.named_parameters())[name], rtol=1e-5, atol=1e-6)
        frozen = masks[name] == 0
        assert torch.equal(parameter[frozen], start[name][frozen]), name


def test_flat_sgd_takes_over_the_weights_and_backward_fills_its_gradients() -> None:
    network = small_network()
    before, images = parameters_of(network), torch.rand(2, 3, 8, 8, generator=seeded())
    twin = copy.deepcopy(network)
    optimiser = FlatOptimiser(network)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, before[name])
    for each in (network, twin):
        each(images).logits[:, :3].sum().backward()
    network(images).logits[:, :3].sum().backward()  # a second backward adds
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(network.get_parameter(name).grad, 2 * parameter.grad, rtol=1e-4, atol=1e-5)
    # The convolutions' weights come first, so that they are one piece.
    convolutions = [parameter for parameter in network.parameters() if parameter.ndim == 4]
    weights = [parameter.grad.flatten() for parameter in convolutions if parameter.grad is not None]
    assert torch.equal(optimiser.gradients[: sum(map(len, weights))], torch.cat(weights))
    optimiser.zero_grad()
    assert all((parameter.grad == 0).all() for parameter in network.parameters() if parameter.grad is not None)


def test_a_phase_starts_from_rest_unless_it_goes_on() -> None:
    network = small_network()
    masks = network.trainable(Part.BACKBONE, num_old=0)
    optimiser = FlatOptimiser(network)
    optimiser.begin(masks, "sgd")
    optimiser.gradients.fill_(1)
    optimiser.step(torch.tensor([0.1]), Training(weight_decay=0.0, clip=None))
    held = optimiser.saved()
    assert held.keys() == {f"momentum.{name}" for name in optimiser.names}
    assert all((value == 1).all() for value in held.values())
    optimiser.begin(masks, "sgd")
    assert (optimiser.held["momentum"] == 0).all()
    optimiser.begin(masks, "sgd", held)
    assert (optimiser.held["momentum"] == 1).all()
