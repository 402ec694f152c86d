"""Pure loss functions of tensors.

Legend: B batch, K classes (scores are minus infinity for classes not seen yet), C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.kernels.availability import is_available_for

# Used instead of minus infinity where a whole row may be masked: its exponential is 0 and its gradient is not NaN.
MASKED = -1e30


def _one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """bool (B, K), true at each sample's label. Unlike F.one_hot, it never waits for the device."""
    return labels[:, None] == torch.arange(num_classes, device=labels.device)


def nca_released(logits: Tensor, labels: Tensor) -> Tensor:
    """NCA classification loss of AFC's released code, one value per sample (B,).

    log(sum_{i != y} exp(s_i) + exp(max_i s_i)) - s_y. This is cross-entropy if y has the highest score; otherwise the
    highest wrong class counts twice. The maximum keeps its gradient: if detached, the learned scale becomes negative
    and the classifier learns nothing. A margin subtracted from every score, as in the released configuration, cancels.
    """
    if is_available_for(logits):
        from engram.kernels import sample_losses as rows

        return rows.nca(logits, labels)
    shifted = logits - logits.amax(dim=1, keepdim=True)
    target = shifted.gather(1, labels[:, None]).squeeze(1)
    is_target = _one_hot(labels, logits.shape[1])
    others = shifted.exp().masked_fill(is_target, 0).sum(dim=1)
    return (others + 1).log() - target


def nca_paper(logits: Tensor, labels: Tensor, scale: Tensor, margin: float) -> Tensor:
    """NCA classification loss of the AFC paper, Eq. (18), one value per sample (B,).

    The hinge of log sum_{i != y} exp(s_i) - (s_y - scale * margin), with s = scale * scores. The scale gets no gradient
    from the margin. Otherwise, while the scores are still uninformative, the margin would push the scale below 0, where
    the loss is 0 most easily, and the classifier would learn the opposite of the labels.
    """
    target = logits.gather(1, labels[:, None]).squeeze(1)
    is_target = _one_hot(labels, logits.shape[1])
    others = logits.masked_fill(is_target, MASKED).clamp(min=MASKED).logsumexp(dim=1)
    return F.relu(others - (target - scale.detach() * margin))


def _mean_over(per_sample: Tensor, counted: Tensor | None) -> Tensor:
    """The mean over the batch, or over the samples that are counted ((B,) bool); 0 if none is."""
    if counted is None:
        return per_sample.mean()
    return (per_sample * counted).sum() / counted.sum().clamp(min=1)


def _mean_over_maps(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    features: Callable[[Tensor], Tensor],
    size: Callable[[Tensor], Tensor],
) -> Tensor:
    """The mean over maps of the size of the difference of their features. Only the student gets a gradient."""
    pairs = zip(student, teacher, strict=True)
    return torch.stack([size(features(ours) - features(theirs.detach())) for ours, theirs in pairs]).mean()


def _for_kernels(maps: Sequence[Tensor]) -> bool:
    """Whether engram's kernels support these maps."""
    return all(is_available_for(each) and each.dtype in (torch.bfloat16, torch.float32) for each in maps)


def channel_distance(ours: Tensor, theirs: Tensor, square: bool) -> Tensor:
    """The distance (B, C) of the channels of two maps (B, C, H, W), each normalised to length 1 over its pixels.

    square: square the maps first. Only `ours` gets a gradient.
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
    """Discrepancy loss of AFC's released code, a scalar.

    Each map is squared element-wise, and each channel is normalised to length 1 over its pixels. The distance of
    student and teacher (not squared), times the importance of the channel, is averaged over batch, channels and maps.

    student, teacher: (B, C, H, W) per map. importance: (C,) or () per map. counted: (B,) bool, the samples to use.
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
    """Discrepancy loss of the AFC paper, Eq. (19), a scalar.

    Each feature map is divided by its Frobenius norm. The squared Frobenius distance, times the importance, is summed
    over channels and maps and averaged over the batch. Arguments: as for `discrepancy_released`.
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
    """Pool (B, C, H, W) to (B, C H + C W): the sums over the width, then the sums over the height."""
    return torch.cat([maps.sum(dim=3).flatten(1), maps.sum(dim=2).flatten(1)], dim=1)


def over_channels(maps: Tensor) -> Tensor:
    """Pool (B, C, H, W) to (B, H W): the sums over the channels."""
    return maps.sum(dim=1).flatten(1)


def over_pixels(maps: Tensor) -> Tensor:
    """Pool (B, C, H, W) to (B, C): the means over the pixels."""
    return maps.mean(dim=(2, 3))


def pooled_distance(student: Sequence[Tensor], teacher: Sequence[Tensor], pool: Callable[[Tensor], Tensor]) -> Tensor:
    """Distance of pooled maps as in PODNet's released code, a scalar. Only the student gets a gradient.

    Each map (B, C, H, W) is squared element-wise and pooled to one vector per sample, which is normalised to length 1.
    The distance of student and teacher (not squared) is averaged over batch and maps.
    """
    if pool is over_rows_and_columns and _for_kernels(student):
        from engram.kernels import pooled_sums as pod

        if pod.fits(student):
            return pod.pod_distances(student, teacher).mean()

    def unit(maps: Tensor) -> Tensor:
        return F.normalize(pool(maps.float().square()), dim=1)

    return _mean_over_maps(student, teacher, unit, lambda apart: torch.linalg.vector_norm(apart, dim=1).mean())


def whole_map_distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Squared distance of maps, each normalised to length 1 over all C H W values; mean over values, batch and maps."""

    def unit(maps: Tensor) -> Tensor:
        return F.normalize(maps.float().flatten(1), dim=1)

    return _mean_over_maps(student, teacher, unit, lambda apart: apart.square().mean())


def gram_distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Squared Frobenius distance of the maps' Gram matrices, averaged over batch and maps.

    With a sample's map as a matrix A (C, H W), its Gram matrix is A A' / (C H W): the correlation of its channels,
    independent of the position in the image.
    """

    def gram(maps: Tensor) -> Tensor:
        matrix = maps.float().flatten(2)
        return matrix @ matrix.transpose(1, 2) / matrix[0].numel()

    return _mean_over_maps(student, teacher, gram, lambda apart: apart.square().sum(dim=(1, 2)).mean())


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine of two embeddings (B, D), averaged over the batch. Only the student gets a gradient."""
    if is_available_for(student):
        from engram.kernels import sample_losses as rows

        return (1 - rows.cosine(student.float(), teacher.float())).mean()
    cosine = (F.normalize(student.float(), dim=1) * F.normalize(teacher.detach().float(), dim=1)).sum(dim=1)
    return (1 - cosine).mean()


def top_old_class(student: Tensor, teacher: Tensor) -> Tensor:
    """The class (B,) with the student's highest score among the teacher's classes, from scores (B, K) of both."""
    return student.detach().masked_fill(teacher.isneginf(), -torch.inf).argmax(dim=1)


def class_gradient(scores: Tensor, classes: Tensor, embedding: Tensor) -> Tensor:
    """The gradient (B, D) of each sample's score for its class (B,) with respect to the embedding. scores: (B, K).

    The embedding is the mean over the last map's pixels, so this is H W times the gradient at that map, which is the
    same at every pixel. The result has no gradient.
    """
    chosen = scores.gather(1, classes[:, None]).sum()
    return torch.autograd.grad(chosen, embedding, retain_graph=True)[0]


def attention_distance(ours: Tensor, theirs: Tensor, our_weight: Tensor, their_weight: Tensor, summed: bool) -> Tensor:
    """Distance of the attention of student and teacher, averaged over the batch. Only our map gets a gradient.

    Attention is the positive part of the map (B, C, H, W) times the weights of its channels (B, C), normalised to
    length 1 per sample. The distance is the sum of absolute differences. summed: sum over the channels before taking
    the positive part, as in GradCAM.
    """

    def attention(maps: Tensor, weight: Tensor) -> Tensor:
        weighted = maps.float() * weight.detach()[:, :, None, None]
        return F.normalize(F.relu(weighted.sum(dim=1) if summed else weighted).flatten(1), dim=1)

    difference = attention(ours, our_weight) - attention(theirs.detach(), their_weight)
    return difference.abs().sum(dim=1).mean()


def channel_importance(loss: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """For each map, the squared gradient of a loss at it, summed over pixels and samples, (C,).

    The loss must be a sum over samples: then each sample counts the same, whatever the size of its batch.
    """
    gradients = torch.autograd.grad(loss, list(maps))
    return [gradient.float().square().sum(dim=(0, 2, 3)) for gradient in gradients]


def normalise_importance(importance: Tensor) -> Tensor:
    """Divide the importance by its mean over the channels, Eq. (20) of the AFC paper; all ones if the mean is 0."""
    mean = importance.mean()
    return torch.where(mean == 0, 1.0, importance / mean)


def ranking(scores: Tensor, labels: Tensor, old: Tensor, new: Tensor, rivals: int, margin: float) -> Tensor:
    """Margin ranking loss of old classes against new classes, a scalar.

    For each image of an old class, and each of the up to `rivals` new classes that score highest for it, the positive
    part of margin - score_y + score_rival. Returns the mean of all these; 0 if there are none.

    scores: (B, K). old, new: (K,) bool.
    """
    counted = old[labels]
    own = scores.gather(1, labels[:, None])
    # Columns of other classes are set far below: the hinge and its gradient are 0 there.
    highest = scores.masked_fill(~new, MASKED).topk(min(rivals, scores.shape[1]), dim=1).values
    hinge = F.relu(margin - own + highest).masked_fill(~counted[:, None], 0)
    pairs = counted.sum() * new.sum().clamp(max=rivals)
    return hinge.sum() / pairs.clamp(min=1)


def cross_entropy(logits: Tensor, labels: Tensor, columns: Tensor) -> Tensor:
    """Cross-entropy (B,) of the softmax over the given columns only; they must include the labels.

    columns: bool, (K,) for all samples or (B, K) per sample.
    """
    return F.cross_entropy(logits.masked_fill(~columns, MASKED), labels, reduction="none")


def binary_cross_entropy(logits: Tensor, targets: Tensor, columns: Tensor) -> Tensor:
    """Binary cross-entropy (B,) of the sigmoids with their targets (B, K), summed over the given columns."""
    # Mask infinite scores before the loss: infinity times 0 would be NaN.
    finite, wanted = (torch.where(columns, values, 0) for values in (logits, targets))
    each = F.binary_cross_entropy_with_logits(finite, wanted, reduction="none")
    return (each * columns).sum(dim=1)


def distillation(student: Tensor, teacher: Tensor, columns: Tensor, temperature: float) -> Tensor:
    """Distillation loss (B,): -sum_c softmax(teacher / T)_c log softmax(student / T)_c over the columns.

    It is not multiplied by T^2.
    """
    ours, theirs = ((logits / temperature).masked_fill(~columns, MASKED) for logits in (student, teacher.detach()))
    return -(theirs.softmax(dim=1) * ours.log_softmax(dim=1)).sum(dim=1)


def distillation_by_group(
    student: Tensor, teacher: Tensor, groups: Tensor, columns: Tensor, temperature: float
) -> Tensor:
    """The sum (B,) of the distillation losses of the groups of columns, each with its own softmax.

    groups: int64 (K,), from 0; values outside the columns are ignored.
    """
    inside = torch.where(columns, groups, len(groups))  # the last group holds the other columns
    member = (inside[:, None] == torch.arange(len(groups) + 1, device=groups.device)).to(student.dtype)  # (K, groups)
    ours, theirs = (
        _subtract_group_maximum(torch.where(columns, logits / temperature, 0), inside)
        for logits in (student, teacher.detach())
    )
    shares = (theirs - _log_sums(theirs, member).gather(1, inside.expand_as(theirs))).exp()
    # The teacher's probabilities in a group add up to 1, so the student's log-sum of each group counts once.
    return _log_sums(ours, member)[:, :-1].sum(dim=1) - (shares * ours * columns).sum(dim=1)


def _subtract_group_maximum(logits: Tensor, groups: Tensor) -> Tensor:
    """Subtract the maximum of its group from each score (B, K): same softmax, and no overflow."""
    index = groups.expand_as(logits)
    floor = logits.new_full((len(logits), len(groups) + 1), MASKED)
    return logits - floor.scatter_reduce(1, index, logits.detach(), "amax").gather(1, index)


def _log_sums(shifted: Tensor, member: Tensor) -> Tensor:
    """The log of the sum of exponentials in each group (B, groups); 0 for empty groups.

    Uses a matrix product, not scatter-add, whose order of summation on a GPU is not deterministic.
    """
    # The highest member of a group adds 1, so the clamp only affects empty groups (log 0 has no finite gradient).
    return (shifted.exp() @ member).clamp(min=0.5).log() * member.amax(dim=0)
