"""Product quantisation: features of images as a few bytes each.

The features are rotated to their principal components, which are dealt out to as many parts as there are bytes, so that
the parts vary about equally. Each part is replaced by the number of the nearest of 256 centres.

Legend: N images, L features, P parts, D features of a part (the last ones may be zeros).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CENTRES = 256
SAMPLED = 12_288  # rows that the centres are fitted to, at most
ROUNDS = 12
CHUNK = 4096  # rows that are encoded at a time


class Codebook(NamedTuple):
    """How features become bytes. rotation: (L, L). centres: (P, 256, D)."""

    rotation: Tensor
    centres: Tensor


def make_codebook(rows: Tensor, parts: int, generator: torch.Generator) -> Codebook:
    """The codebook of features (N, L) for that many bytes per image, by k-means."""
    count = len(rows)
    drawn = torch.randperm(count, generator=generator)[:SAMPLED].to(rows.device)
    sample = rows[drawn].double()
    # The features are standardised, so that their mean is zero.
    rotation = torch.linalg.eigh(sample.T @ sample).eigenvectors.flip(1).to(rows)
    starts = torch.arange(CENTRES, device=rows.device) % len(drawn)
    divided = _divided(sample.to(rows) @ rotation, parts)
    return Codebook(rotation, torch.stack([_centres(points, points[starts]) for points in divided.unbind(1)]))


def encode(rows: Tensor, codebook: Codebook) -> Tensor:
    """The bytes (N, P) of features (N, L)."""
    codes: list[Tensor] = []
    for part in rows.split(CHUNK):
        divided = _divided(part @ codebook.rotation, len(codebook.centres))
        nearest = [_nearest(*both) for both in zip(divided.unbind(1), codebook.centres, strict=True)]
        codes.append(torch.stack(nearest, dim=1).to(torch.uint8))
    return torch.cat(codes) if codes else rows.new_zeros(0, len(codebook.centres), dtype=torch.uint8)


def decode(codes: Tensor, codebook: Codebook) -> Tensor:
    """The features (N, L) that the bytes (N, P) stand for."""
    parts, _, size = codebook.centres.shape
    places = torch.arange(parts, device=codes.device)
    divided = codebook.centres[places, codes.long()]  # (N, P, D)
    components = divided.transpose(1, 2).reshape(len(codes), size * parts)
    return components[:, : len(codebook.rotation)] @ codebook.rotation.T


def _divided(components: Tensor, parts: int) -> Tensor:
    """Components (N, L) dealt out to the parts in turn, (N, P, D)."""
    size = math.ceil(components.shape[1] / parts)
    padded = F.pad(components, (0, size * parts - components.shape[1]))
    return padded.view(len(components), size, parts).transpose(1, 2)


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The number (N,) of the centre (of 256, D) nearest to each point (N, D)."""
    return torch.addmm(centres.square().sum(dim=1), points, centres.T, alpha=-2).argmin(dim=1)


def _centres(points: Tensor, centres: Tensor) -> Tensor:
    """The centres after some rounds of k-means on points (N, D); one that is nearest to no point stays."""
    for _ in range(ROUNDS):
        member = F.one_hot(_nearest(points, centres), CENTRES).to(points)
        count = member.sum(dim=0)[:, None]
        centres = torch.where(count > 0, member.T @ points / count.clamp(min=1), centres)
    return centres
