"""What every registered backbone keeps to, those of ENGRAM_METHODS too."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from engram.core.errors import EngramError
from engram.nn.backbone import Backbone
from engram.nn.backbones import BACKBONES, build_backbone
from engram.nn.trial import check_backbone
from helpers import buffers_of

SIZES = [(8, 8), (9, 14), (16, 12)]

# Deeper or wider networks of a class that another name has as well; test_pretrained.py has their shapes.
SAME_CLASS = ("efficientnet-lite1", "efficientnet-lite2", "resnet50-imagenet")

each = pytest.mark.parametrize("name", [name for name in BACKBONES.names() if name not in SAME_CLASS])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def built(name: str, seed: int) -> Backbone:
    """A backbone that no test changes."""
    return build_backbone(name, seeded(seed)).eval()


def images(count: int, size: tuple[int, int], seed: int = 5) -> Tensor:
    return torch.randn(count, 3, *size, generator=seeded(seed))


@each
@pytest.mark.parametrize("size", SIZES)
def test_images_of_several_sizes_give_maps_and_an_embedding(name: str, size: tuple[int, int]) -> None:
    backbone = built(name, 1)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    with torch.no_grad():
        maps, embedding = backbone(images(3, size))
        (again, _), (alone, same) = backbone(images(3, size)), backbone(images(3, size)[:1])
    assert embedding.shape == (3, backbone.dim)
    assert tuple(one.shape[1] for one in maps) == backbone.widths
    assert all(one.ndim == 4 and len(one) == 3 for one in maps)
    assert bool(embedding.isfinite().all())
    assert embedding.std(dim=0).max() > 0, "images differ, so their embeddings do"
    for one, other in zip(maps, again, strict=True):
        assert torch.equal(one, other)
    for one, other in zip((*maps, embedding), (*alone, same), strict=True):
        torch.testing.assert_close(one[:1], other, rtol=1e-3, atol=1e-4)
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, before[key]), "eval mode changes nothing"
    if backbone.pools_last_map:
        torch.testing.assert_close(maps[-1].mean(dim=(2, 3)), embedding, rtol=1e-4, atol=1e-5)


@each
def test_a_seed_means_the_same_weights(name: str) -> None:
    torch.manual_seed(3)
    one, other = built(name, 1), build_backbone(name, seeded(1))
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    other.load_state_dict(built(name, 2).state_dict())
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    other.initialise(seeded(1))
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), "initialise makes it new"


@each
def test_a_state_is_the_whole_backbone(name: str) -> None:
    trained = build_backbone(name, seeded(1)).train()
    trained(images(4, (16, 16)))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01)
    loaded = build_backbone(name, seeded(2))
    loaded.load_state_dict(trained.state_dict())
    with torch.no_grad():
        ours, theirs = loaded.eval()(images(2, (16, 16))), trained.eval()(images(2, (16, 16)))
    for one, other in zip((*ours[0], ours[1]), (*theirs[0], theirs[1]), strict=True):
        assert torch.equal(one, other)


@each
def test_gradients_reach_every_parameter_and_every_map(name: str) -> None:
    backbone = build_backbone(name, seeded(1)).train()
    with torch.no_grad():  # a block may begin as its shortcut: its other layers have gradient 0 then
        for parameter in backbone.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=seeded(2)))
    maps, embedding = backbone(images(4, (16, 16)))
    wanted = {f"map {i}": one for i, one in enumerate(maps)} | dict(backbone.named_parameters())
    total = (embedding * torch.randn(embedding.shape, generator=seeded(3))).sum()
    for key, gradient in zip(wanted, torch.autograd.grad(total, list(wanted.values())), strict=True):
        assert bool(gradient.isfinite().all()), key
        assert bool(gradient.any()), key


@each
@pytest.mark.parametrize("size", SIZES)
def test_it_is_known_whether_a_single_image_can_be_trained_on(name: str, size: tuple[int, int]) -> None:
    backbone = build_backbone(name, seeded(1))
    before = buffers_of(backbone)
    told = backbone.trains_on_one_image(size)
    assert all(torch.equal(value, before[key]) for key, value in buffers_of(backbone).items())
    if told:
        backbone.train()(images(1, size))
    else:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            backbone.train()(images(1, size))


@each
def test_it_passes_the_trial_that_one_from_outside_must_pass(name: str) -> None:
    state = torch.random.get_rng_state()
    check_backbone(name, (8, 8))
    assert torch.equal(torch.random.get_rng_state(), state), "a trial draws no random number of the run's"


def test_a_name_that_does_not_exist_is_refused_with_what_was_meant() -> None:
    with pytest.raises(EngramError, match=r"no backbone 'wrn-16-2': did you mean 'wrn16-2'\? .*ENGRAM_METHODS=FILE.py"):
        check_backbone("wrn-16-2", (8, 8))
