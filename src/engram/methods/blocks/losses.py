"""Pure loss functions: tensors in, tensors out, nothing remembered.

Legend: B batch, K classes (minus infinity where not yet seen), C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.kernels import availability as kernels

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
    if kernels.is_available_for(logits):
        from engram.kernels import sample_losses as rows

        return rows.nca(logits, labels)
    shifted = logits - logits.amax(dim=1, keepdim=True)
    target = shifted.gather(1, labels[:, None]).squeeze(1)
    is_target = _one_hot(labels, logits.shape[1])
    others = shifted.exp().masked_fill(is_target, 0).sum(dim=1)
    return (others + 1).log() - target


def nca_paper(logits: Tensor, labels: Tensor, scale: Tensor, margin: float) -> Tensor:
    """The classification loss of the paper (eq. LSC_loss), one value a sample (B,).

    The hinge of log sum_{i != y} exp(s_i) - (s_y - scale * margin), with s = scale * scores. The margin's part has no
    gradient for the scale: with it a scale below zero is the easiest way to a loss of zero, since the margin asks for
    a smaller scale as long as the scores say nothing, and the classifier learns everything the wrong way round.
    """
    target = logits.gather(1, labels[:, None]).squeeze(1)
    is_target = _one_hot(labels, logits.shape[1])
    others = logits.masked_fill(is_target, MASKED).clamp(min=MASKED).logsumexp(dim=1)
    return F.relu(others - (target - scale.detach() * margin))


def _mean_over(per_sample: Tensor, counted: Tensor | None) -> Tensor:
    """The mean over the batch, or over the samples counted (B,) bool; zero where none is."""
    if counted is None:
        return per_sample.mean()
    return (per_sample * counted).sum() / counted.sum().clamp(min=1)


def _for_kernels(maps: Sequence[Tensor]) -> bool:
    """Whether our own kernels take these maps."""
    return all(kernels.is_available_for(each) and each.dtype in (torch.bfloat16, torch.float32) for each in maps)


def channel_distance(ours: Tensor, theirs: Tensor, square: bool) -> Tensor:
    """The distance (B, C) of the channels of two maps (B, C, H, W), each brought to length 1 over its pixels.

    square: of the maps' squares. Only ours gets a gradient.
    """

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
    student, teacher: (B, C, H, W) per map; importance: (C,) or () per map; counted: (B,) bool, the samples that take
    part.
    """
    if _for_kernels(student):
        from engram.kernels.distance import weighted_distance

        factors = [1 / (len(student) * maps.shape[1]) for maps in student]
        return _mean_over(weighted_distance(student, teacher, importance, factors, square=True, power=1), counted)
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
    if _for_kernels(student):
        from engram.kernels.distance import weighted_distance

        factors = len(student) * [1.0]
        return _mean_over(weighted_distance(student, teacher, importance, factors, square=False, power=2), counted)
    total = student[0].new_zeros((), dtype=torch.float32)
    for ours, theirs, weight in zip(student, teacher, importance, strict=True):
        distance = channel_distance(ours, theirs, square=False)
        total = total + _mean_over((weight * distance.square()).sum(dim=1), counted)
    return total


def over_rows_and_columns(maps: Tensor) -> Tensor:
    """(B, C, H, W) to (B, C H + C W): the sums over the width, then the sums over the height."""
    return torch.cat([maps.sum(dim=3).flatten(1), maps.sum(dim=2).flatten(1)], dim=1)


def over_channels(maps: Tensor) -> Tensor:
    """(B, C, H, W) to (B, H W): the sums over the channels."""
    return maps.sum(dim=1).flatten(1)


def over_pixels(maps: Tensor) -> Tensor:
    """(B, C, H, W) to (B, C): the means over the pixels."""
    return maps.mean(dim=(2, 3))


def pooled_distance(student: Sequence[Tensor], teacher: Sequence[Tensor], pool: Callable[[Tensor], Tensor]) -> Tensor:
    """The distance of pooled maps as in PODNet's released code, a scalar; only the student gets a gradient.

    Each map (B, C, H, W) is squared element-wise and pooled to a vector a sample, which is brought to length 1; the
    distance of student and teacher (not squared) is averaged over batch and maps.
    """
    if pool is over_rows_and_columns and _for_kernels(student):
        from engram.kernels import pooled_sums as pod

        if pod.fits(student):
            return pod.pod_distances(student, teacher).mean()

    def unit(maps: Tensor) -> Tensor:
        return F.normalize(pool(maps.float().square()), dim=1)

    per_map = [
        torch.linalg.vector_norm(unit(ours) - unit(theirs.detach()), dim=1).mean()
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(per_map).mean()


def whole_map_distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """The squared distance of whole maps of length 1 over the C H W of their values, averaged over batch and maps."""

    def unit(maps: Tensor) -> Tensor:
        return F.normalize(maps.float().flatten(1), dim=1)

    per_map = [
        (unit(ours) - unit(theirs.detach())).square().mean() for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(per_map).mean()


def gram_distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """The squared Frobenius distance of the maps' Gram matrices, averaged over batch and maps.

    With a sample's map as a matrix A (C, H W), its Gram matrix is A A' / (C H W): how much its channels go together,
    wherever in the image they do.
    """

    def gram(maps: Tensor) -> Tensor:
        matrix = maps.float().flatten(2)
        return matrix @ matrix.transpose(1, 2) / matrix[0].numel()

    per_map = [
        (gram(ours) - gram(theirs.detach())).square().sum(dim=(1, 2)).mean()
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(per_map).mean()


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """1 minus the cosine of two embeddings (B, D), averaged over the batch; only the student gets a gradient."""
    if kernels.is_available_for(student):
        from engram.kernels import sample_losses as rows

        return (1 - rows.cosine(student.float(), teacher.float())).mean()
    cosine = (F.normalize(student.float(), dim=1) * F.normalize(teacher.detach().float(), dim=1)).sum(dim=1)
    return (1 - cosine).mean()


def top_old_class(student: Tensor, teacher: Tensor) -> Tensor:
    """The class (B,) that the student scores highest among those that the teacher knows, from scores (B, K) of both."""
    return student.detach().masked_fill(teacher.isneginf(), -torch.inf).argmax(dim=1)


def class_gradient(scores: Tensor, classes: Tensor, embedding: Tensor) -> Tensor:
    """The gradient (B, D) of each sample's score (B, K) for its class (B,) at the embedding the scores came from.

    The embedding being the mean of the last map's pixels, this is the gradient at that map times its H W pixels, the
    same at each of them. It is a number here, with no gradient of its own.
    """
    chosen = scores.gather(1, classes[:, None]).sum()
    return torch.autograd.grad(chosen, embedding, retain_graph=True)[0]


def attention_distance(ours: Tensor, theirs: Tensor, our_weight: Tensor, their_weight: Tensor, summed: bool) -> Tensor:
    """How far apart student and teacher look, averaged over the batch; only the student's map gets a gradient.

    Attention is the positive part of the map (B, C, H, W) times its channels' weights (B, C), one vector of length 1 a
    sample; its distance is the sum of the absolute differences. summed: of the sum over the channels, as in GradCAM.
    """

    def attention(maps: Tensor, weight: Tensor) -> Tensor:
        weighted = maps.float() * weight.detach()[:, :, None, None]
        return F.normalize(F.relu(weighted.sum(dim=1) if summed else weighted).flatten(1), dim=1)

    difference = attention(ours, our_weight) - attention(theirs.detach(), their_weight)
    return difference.abs().sum(dim=1).mean()


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


def ranking(scores: Tensor, labels: Tensor, old: Tensor, new: Tensor, rivals: int, margin: float) -> Tensor:
    """How far the new classes come within the margin of an old image's own class, a scalar.

    For each image of an old class and each of the new classes that score highest for it, `rivals` of them or as many
    as there are: the positive part of margin - score_y + score_rival; the mean of all these, zero where there are none.
    scores: (B, K). old, new: (K,) bool.
    """
    counted = old[labels]
    own = scores.gather(1, labels[:, None])
    # Columns that are no rivals count as far below: the hinge is zero there, and so is its gradient.
    highest = scores.masked_fill(~new, MASKED).topk(min(rivals, scores.shape[1]), dim=1).values
    hinge = F.relu(margin - own + highest).masked_fill(~counted[:, None], 0)
    pairs = counted.sum() * new.sum().clamp(max=rivals)
    return hinge.sum() / pairs.clamp(min=1)


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
