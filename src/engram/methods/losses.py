"""Pure loss functions: tensors in, tensors out, nothing remembered.

Legend: B batch, K classes (minus infinity where not yet seen), C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Stands for minus infinity where a whole row may be masked: its exponential is zero and its gradient is not NaN.
MASKED = -1e30


def _one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """bool (B, K), true at each sample's label; unlike F.one_hot it never waits for the device."""
    return labels[:, None] == torch.arange(num_classes, device=labels.device)


def nca_released(logits: Tensor, labels: Tensor) -> Tensor:
    """The classification loss of the released code, one value a sample (B,).

    log(sum_{i != y} exp(s_i) + exp(max_i s_i)) - s_y: cross-entropy where y scores highest, else the top wrong class
    counts twice. The maximum carries its gradient; detached, the learned scale turns negative and the classifier dies.
    A margin taken from every score, as in the released configuration, cancels.
    """
    shifted = logits - logits.amax(dim=1, keepdim=True)
    target = shifted.gather(1, labels[:, None]).squeeze(1)
    is_target = _one_hot(labels, logits.shape[1])
    others = shifted.exp().masked_fill(is_target, 0).sum(dim=1)
    return (others + 1).log() - target


def nca_paper(logits: Tensor, labels: Tensor, scale: Tensor, margin: float) -> Tensor:
    """The classification loss of the paper (eq. LSC_loss), one value a sample (B,).

    The hinge of log sum_{i != y} exp(s_i) - (s_y - scale * margin), with s = scale * scores.
    """
    target = logits.gather(1, labels[:, None]).squeeze(1)
    is_target = _one_hot(labels, logits.shape[1])
    others = logits.masked_fill(is_target, MASKED).clamp(min=MASKED).logsumexp(dim=1)
    return F.relu(others - (target - scale * margin))


def _mean_over(per_sample: Tensor, counted: Tensor | None) -> Tensor:
    """The mean over the batch, or over the samples counted (B,) bool; zero where none is."""
    if counted is None:
        return per_sample.mean()
    return (per_sample * counted).sum() / counted.sum().clamp(min=1)


def channel_distance(ours: Tensor, theirs: Tensor, square: bool) -> Tensor:
    """The distance (B, C) of the channels of two maps (B, C, H, W), each brought to length 1 over its pixels.

    square: of the maps' squares. Only ours gets a gradient.
    """
    if ours.is_cuda and ours.dtype is torch.bfloat16:
        from engram.kernels import distance

        return distance.channel_distance(ours, theirs, square)

    def unit(maps: Tensor) -> Tensor:
        maps = maps.float().flatten(2)
        return F.normalize(maps.square() if square else maps, dim=2)

    return torch.linalg.vector_norm(unit(ours) - unit(theirs.detach()), dim=2)


def discrepancy_released(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    importance: Sequence[Tensor],
    counted: Tensor | None = None,
) -> Tensor:
    """The discrepancy loss of the released code, a scalar.

    Each map is squared element-wise and each channel brought to unit length over its pixels; the distance of student
    and teacher (not squared), times the channel's importance, is averaged over batch, channels and maps.
    student, teacher: (B, C, H, W) per map; importance: (C,) per map; counted: (B,) bool, the samples that take part.
    """
    per_map: list[Tensor] = []
    for ours, theirs, weight in zip(student, teacher, importance, strict=True):
        distance = channel_distance(ours, theirs, square=True)
        per_map.append(_mean_over((weight * distance).mean(dim=1), counted))
    return torch.stack(per_map).mean()


def discrepancy_paper(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    importance: Sequence[Tensor],
    counted: Tensor | None = None,
) -> Tensor:
    """The discrepancy loss of the paper (eq. old_new_example), a scalar.

    The squared Frobenius distance of each feature map, itself divided by its Frobenius norm, times its importance,
    summed over channels and maps and averaged over the batch. Arguments as for the released form.
    """
    total = student[0].new_zeros((), dtype=torch.float32)
    for ours, theirs, weight in zip(student, teacher, importance, strict=True):
        distance = channel_distance(ours, theirs, square=False)
        total = total + _mean_over((weight * distance.square()).sum(dim=1), counted)
    return total


def channel_importance(loss: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """For each map the squared gradient of a loss at it, summed over pixels and samples, (C,).

    The loss must be a sum over samples, so that each counts the same whatever the batch it came in.
    """
    gradients = torch.autograd.grad(loss, list(maps))
    return [gradient.float().square().sum(dim=(0, 2, 3)) for gradient in gradients]


def normalise_importance(importance: Tensor) -> Tensor:
    """Divided by its mean over the channels (eq. normalize_importance); uniform where no channel has any."""
    mean = importance.mean()
    return torch.where(mean == 0, 1.0, importance / mean)
