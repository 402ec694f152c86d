"""The pure loss that UCIR has of its own: old classes against new ones.

Legend: B batch, K classes (minus infinity where not yet seen).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engram.methods.losses import MASKED


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
