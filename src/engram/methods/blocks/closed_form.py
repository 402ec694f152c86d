"""Heads on a backbone that is frozen after the base stage: features of a stage, sums over them, ridge regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from engram.contract import Learner, Network, Passes, Phase, Stage
from engram.core.errors import EngramError
from engram.methods.blocks.linear import LinearMethod, SteppedSettings
from engram.nn.backbone import Backbone
from engram.nn.heads import Head
from engram.nn.views import View

CHUNK = 4096  # images that are copied to the device at a time

FrozenSettingsT = TypeVar("FrozenSettingsT", bound=SteppedSettings)


class FrozenBackboneMethod(LinearMethod[FrozenSettingsT]):
    """Trains in the base stage only, as the linear family does; after every stage, `finish` sets the head."""

    predictors = ("cnn",)
    uses_teacher = False

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        return super().phases(learner, stage, passes) if stage.is_base else []


class AveragingNetwork(Network):
    """A network whose features are averaged over views."""

    def __init__(
        self, views: tuple[View, ...], backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__(backbone, head, mean, std)
        self._averaged = views

    @property
    def views(self) -> tuple[View, ...]:
        return self._averaged


def check_tensors(buffers: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Refuse tensors that are not exactly these: dtype and shape by name. A size of -1 in a shape is any."""
    for name in sorted({*buffers, *expected}):
        if name not in expected:
            raise EngramError(f"it holds a tensor {name!r:.80} that its method does not keep; the model is damaged")
        if name not in buffers:
            raise EngramError(f"it lacks the tensor {name!r}; the model is damaged")
        found, (dtype, shape) = buffers[name], expected[name]
        fits = found.ndim == len(shape) and all(want in (-1, has) for has, want in zip(found.shape, shape, strict=True))
        if found.dtype != dtype or not fits:
            kind = str(found.dtype).removeprefix("torch.")
            raise EngramError(f"its tensor {name!r} is {kind} of {tuple(found.shape)} and does not fit; it is damaged")
        if not bool(found.isfinite().all()):
            raise EngramError(f"its tensor {name!r} has values that are not finite; the model is damaged")


def check_classes(classes: Tensor, rows: int, known: int) -> None:
    """Refuse classes that are not one for each kept row, or that the model does not know."""
    if len(classes) != rows:
        raise EngramError(f"it keeps {rows} rows and the classes of {len(classes)}; the model is damaged")
    if rows and not 0 <= int(classes.min()) <= int(classes.max()) < known:
        raise EngramError(f"it keeps rows of classes that are not among its {known}; the model is damaged")


def new_features(learner: Learner, stage: Stage, passes: Passes) -> tuple[Tensor, Tensor]:
    """The features (N, D) of all images of the stage's new classes, as the head sees them, and their labels (N,)."""
    rows = stage.all_rows[~stage.pool.exemplar]
    parts = [passes.features(learner.network, stage.pool.images[part]) for part in rows.split(CHUNK)]
    features = torch.cat(parts)
    if not bool(features.isfinite().all()):
        raise EngramError(f"the features after stage {stage.index} are not finite; try a lower learning rate")
    return features, stage.pool.labels[rows].to(features.device)


def ridge_weights(products: Tensor, sums: Tensor, gamma: float) -> Tensor:
    """(A + gamma I)^-1 B as rows, one per class (K, D). products: A, (D, D). sums: B as rows, (K, D)."""
    penalised = products.clone()
    penalised.diagonal().add_(gamma)
    factor, failed = torch.linalg.cholesky_ex(penalised)
    if bool(failed):
        raise EngramError(f"the ridge regression has no solution in float64 with gamma={gamma:g}; give a larger gamma")
    return torch.cholesky_solve(sums.T, factor).T


def pack_symmetric(matrix: Tensor) -> Tensor:
    """The rows of the upper triangle of a symmetric matrix (D, D), one after the other (D (D + 1) / 2,)."""
    return matrix.masked_select(_upper(len(matrix), matrix.device))


def unpack_symmetric(packed: Tensor, size: int) -> Tensor:
    """The symmetric matrix (size, size) that `pack_symmetric` was given."""
    matrix = packed.new_zeros(size, size).masked_scatter_(_upper(size, packed.device), packed)
    return matrix + matrix.triu(1).T


def _upper(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu()
