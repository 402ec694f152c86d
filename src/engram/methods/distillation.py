"""Pure losses of class scores: classification within some columns, and distillation of the teacher's scores.

Legend: B batch, K columns, one a class (minus infinity where not yet seen). `columns` is bool (K,), those that take
part; the others get no gradient, whatever they hold. Each loss is one value a sample, (B,).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.methods.losses import MASKED


def cross_entropy(logits: Tensor, labels: Tensor, columns: Tensor) -> Tensor:
    """Cross-entropy of the softmax over the columns alone, among which the labels must be.

    columns: the same for all samples, (K,), or each one's own, (B, K).
    """
    return F.cross_entropy(logits.masked_fill(~columns, MASKED), labels, reduction="none")


def binary_cross_entropy(logits: Tensor, targets: Tensor, columns: Tensor) -> Tensor:
    """The binary cross-entropy of each column's sigmoid with its target (B, K), summed over the columns."""
    # Infinite scores go before the loss, not after: infinity times zero would be NaN.
    finite, wanted = (torch.where(columns, values, 0) for values in (logits, targets))
    each = F.binary_cross_entropy_with_logits(finite, wanted, reduction="none")
    return (each * columns).sum(dim=1)


def distillation(student: Tensor, teacher: Tensor, columns: Tensor, temperature: float) -> Tensor:
    """-sum_c softmax(teacher / T)_c log softmax(student / T)_c over the columns, not multiplied by T^2."""
    ours, theirs = ((logits / temperature).masked_fill(~columns, MASKED) for logits in (student, teacher.detach()))
    return -(theirs.softmax(dim=1) * ours.log_softmax(dim=1)).sum(dim=1)


def distillation_by_group(
    student: Tensor, teacher: Tensor, groups: Tensor, columns: Tensor, temperature: float
) -> Tensor:
    """The sum of the distillation losses of each group of columns, the softmaxes taken inside the groups.

    groups: int64 (K,), from 0; what it holds outside the columns does not matter.
    """
    inside = torch.where(columns, groups, len(groups))  # the last group is for what takes no part
    member = (inside[:, None] == torch.arange(len(groups) + 1, device=groups.device)).to(student.dtype)  # (K, groups)
    ours, theirs = (
        _below_the_group_maximum(torch.where(columns, logits / temperature, 0), inside)
        for logits in (student, teacher.detach())
    )
    shares = (theirs - _log_sums(theirs, member).gather(1, inside.expand_as(theirs))).exp()
    # The teacher's shares of a group add up to 1, so the student's sum of each group counts once.
    return _log_sums(ours, member)[:, :-1].sum(dim=1) - (shares * ours * columns).sum(dim=1)


def _below_the_group_maximum(logits: Tensor, groups: Tensor) -> Tensor:
    """The scores (B, K) less the highest of their group, which changes no share and keeps exponentials in range."""
    index = groups.expand_as(logits)
    floor = logits.new_full((len(logits), len(groups) + 1), MASKED)
    return logits - floor.scatter_reduce(1, index, logits.detach(), "amax").gather(1, index)


def _log_sums(shifted: Tensor, member: Tensor) -> Tensor:
    """The log of the sum of the exponentials in each group (B, groups), 0 for those without a member.

    By a product and not by scattering: a GPU adds what is scattered in any order.
    """
    # A group's highest member adds 1, so the clamp is for empty groups alone: log 0 has no gradient.
    return (shifted.exp() @ member).clamp(min=0.5).log() * member.amax(dim=0)
