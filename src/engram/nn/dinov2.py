"""DINOv2Transformer: the vision transformer of DINOv2 (Oquab et al., 2023), with the names of tensors of its files.

Patches and a class token with learned positions pass through blocks of attention and a perceptron, whose results are
scaled. The embedding is the class token after the final norm. An image may have any size: the learned positions, for
37x37 patches, are interpolated, and an image whose sides do not divide by the patch is padded with zeros.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.nn.backbone import Backbone

PATCH = 14
GRID = 37  # patches in a row of the images that the positions were learned for, of 518x518 pixels
OFFSET = 0.1  # DINOv2 interpolates to a slightly larger grid, which matters for the last bits of its weights
EPSILON = 1e-6
SPREAD = 0.02  # standard deviation of untrained weights


class PatchEmbedding(nn.Module):
    """Images (B, 3, H, W) to a vector per patch, (B, D, H / 14, W / 14)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, stride=PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.pad(x, (0, -x.shape[3] % PATCH, 0, -x.shape[2] % PATCH)))


class QKVAttention(nn.Module):
    """Self-attention of tokens (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Written out: torch's fused attention adds up its gradients in any order on a GPU.
        split = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, D / heads)
        query, key, value = split[0], split[1], split[2]
        shares = (query @ key.transpose(2, 3) / math.sqrt(query.shape[3])).softmax(dim=3)
        return self.proj((shares @ value).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """Multiplies each channel by a learned factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DINOv2Block(nn.Module):
    """Attention and a perceptron, each after a norm, scaled, and with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPSILON)
        self.attn = QKVAttention(width, heads)
        self.ls1 = LayerScale(width)
        self.norm2 = nn.LayerNorm(width, eps=EPSILON)
        self.mlp = Perceptron(width)
        self.ls2 = LayerScale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class DINOv2Transformer(Backbone):
    """Images (B, 3, H, W) to three maps (B, D, H / 14, W / 14) and the embedding (B, D).

    The maps are the patches after each quarter of the blocks but the last, whose patches have no effect on the
    embedding. depth: number of blocks, a multiple of 4.
    """

    def __init__(self, width: int, depth: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + GRID * GRID, width))
        self.patch_embed = PatchEmbedding(width)
        self.blocks = nn.ModuleList(DINOv2Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.dim, self.widths = width, 3 * (width,)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.data.copy_(SPREAD * torch.randn(parameter.shape, generator=generator))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def own_name(self, published: str) -> str | None:
        return None if published.startswith("mask_token") else published

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x = self.patch_embed(x)
        size = (x.shape[2], x.shape[3])
        patches = x.flatten(2).transpose(1, 2) + self._positions(size)
        first = (self.cls_token + self.pos_embed[:, :1]).expand(x.shape[0], -1, -1)
        tokens = torch.cat([first, patches], dim=1)
        quarter, maps = len(self.blocks) // 4, []
        for number, block in enumerate(self.blocks, start=1):
            tokens = block(tokens)
            if number % quarter == 0 and number < len(self.blocks):
                # What follows is computed from the map, so that a loss has a gradient there.
                maps.append(tokens[:, 1:].transpose(1, 2).unflatten(2, size))
                tokens = torch.cat([tokens[:, :1], maps[-1].flatten(2).transpose(1, 2)], dim=1)
        return tuple(maps), self.norm(tokens)[:, 0]

    def _positions(self, size: tuple[int, int]) -> Tensor:
        """The learned positions (1, H W, D), interpolated to a grid of that size.

        By matrices: the gradient of torch's interpolation is not deterministic on a GPU.
        """
        learned = self.pos_embed[0, 1:]
        if size == (GRID, GRID):
            return learned[None]
        down, across = (_interpolation(count, learned.device) for count in size)
        rows = (down @ learned.reshape(GRID, -1)).reshape(size[0], GRID, -1)
        return (across @ rows).reshape(1, size[0] * size[1], -1)


def _interpolation(count: int, device: torch.device) -> Tensor:
    """The matrix (count, GRID) of a bicubic interpolation from GRID points to that many."""
    points = torch.eye(GRID, device=device).reshape(1, GRID, GRID, 1)  # a map for each point, which is 1 there
    with torch.no_grad():
        scale = ((count + OFFSET) / GRID, 1.0)
        return F.interpolate(points, scale_factor=scale, mode="bicubic").reshape(GRID, count).T


def vit_small_dinov2(generator: torch.Generator) -> DINOv2Transformer:
    """DINOv2's small vision transformer: patches of 14x14, 12 blocks of 384; 22 million weights; embedding 384."""
    return DINOv2Transformer(384, 12, 6, generator)
