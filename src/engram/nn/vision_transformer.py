"""VisionTransformer: a backbone without convolutions over pixels (Dosovitskiy et al., ICLR 2021), for small images.

An image is cut into patches, and each becomes a token. Positions are added as sines and cosines, so an image may have
any size. Each block is norm-attention and norm-MLP, each plus its shortcut. There is no class token: the embedding is
the mean of all tokens after the final norm. The maps are the tokens at their places in the image.

Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.core.errors import EngramError
from engram.nn.backbone import Backbone

LONGEST_WAVE = 10000.0  # of the positions, in patches, divided by 2 pi


class SelfAttention(nn.Module):
    """Self-attention of tokens (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Written out: torch's fused attention adds up its gradients in any order on a GPU.
        split = self.inputs(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, D / heads)
        query, key, value = split[0], split[1], split[2]
        shares = (query @ key.transpose(2, 3) / math.sqrt(query.shape[3])).softmax(dim=3)
        return self.output((shares @ value).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.output(F.gelu(self.hidden(self.norm2(x))))


class VisionTransformer(Backbone):
    """Images (B, 3, H, W) to one map (B, width, H / patch, W / patch) per third of the blocks, and the embedding.

    An image whose sides do not divide by the patch is padded with zeros. depth: number of blocks, a multiple of 3.
    """

    pools_last_map = True

    def __init__(self, depth: int, width: int, heads: int, patch: int, generator: torch.Generator) -> None:
        super().__init__()
        if depth < 3 or depth % 3 or width < 1 or width % 4 or heads < 1 or width % heads or patch < 1:
            raise EngramError(
                "a VisionTransformer has a multiple of 3 blocks, and a width that divides by 4 and by its heads, got "
                f"depth={depth}, width={width}, heads={heads}, patch={patch}"
            )
        self.patch = patch
        self.dim, self.widths = width, 3 * (width,)
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        blocks = [TransformerBlock(width, heads) for _ in range(depth)]
        self.thirds = nn.ModuleList(nn.Sequential(*blocks[i : i + depth // 3]) for i in range(0, depth, depth // 3))
        self.norm = nn.LayerNorm(width)
        self.initialise(generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise the weights: normal, with the variance 1 / inputs; smaller where a shortcut adds the result."""
        additions = 2 * sum(isinstance(module, TransformerBlock) for module in self.modules())
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Conv2d)):
                fresh = torch.randn(module.weight.shape, generator=generator)  # on the CPU, whatever the device
                scale = module.weight[0].numel() * (additions if name.endswith("output") else 1)
                module.weight.data.copy_(fresh / math.sqrt(scale))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        low, right = -x.shape[2] % self.patch, -x.shape[3] % self.patch
        if low or right:
            x = F.pad(x, (0, right, 0, low))
        x = self.patches(x)
        size = x.shape[2], x.shape[3]
        tokens = x.flatten(2).transpose(1, 2) + positions(size, self.dim, x.device)
        maps: list[Tensor] = []
        for number, third in enumerate(self.thirds, start=1):
            tokens = third(tokens)
            if number == len(self.thirds):
                tokens = self.norm(tokens)
            # What follows is computed from the map, so that a loss has a gradient there.
            maps.append(tokens.transpose(1, 2).unflatten(2, size))
            tokens = maps[-1].flatten(2).transpose(1, 2)
        return tuple(maps), tokens.mean(dim=1)


def positions(size: tuple[int, int], width: int, device: torch.device) -> Tensor:
    """Sines and cosines (H W, width) of the row and the column of each patch, a quarter of the width each."""
    waves = LONGEST_WAVE ** (-torch.arange(width // 4, device=device) / (width // 4))
    down, across = (torch.arange(count, device=device)[:, None] * waves for count in size)  # (H or W, width / 4)
    down, across = down[:, None].expand(-1, size[1], -1), across[None].expand(size[0], -1, -1)
    return torch.cat([down.sin(), down.cos(), across.sin(), across.cos()], dim=2).flatten(0, 1)


def vit_tiny(generator: torch.Generator) -> VisionTransformer:
    """A small vision transformer: patches of 4x4 pixels, 6 blocks of 192 with 3 heads; embedding 192."""
    return VisionTransformer(6, 192, 3, 4, generator)
