"""Ridge: a linear head in closed form on a backbone that is frozen after the base stage.

As in analytic class-incremental learning (Zhuang, Weng, Wei, Xie, Toh, Lin, NeurIPS 2022), without its random expansion
of the features. The head is the ridge regression of one-hot labels on the features of all images seen. It needs only
two sums over images, to which each stage adds those of its new classes. So it needs no exemplars, and how the classes
after the base are divided into stages makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F

from engram.contract import Learner, Passes, Stage, register, setting
from engram.methods.blocks.closed_form import FrozenBackboneMethod, ridge_weights
from engram.methods.blocks.linear import SteppedSettings
from engram.nn.heads import LinearHead

# With x the features of an image and a 1: (D + 1, D + 1), the sum of x x^T; (K, D + 1), the sum of x for each class.
PRODUCTS, SUMS = "ridge.A", "ridge.B"
CHUNK = 4096  # images whose features are held at a time


@dataclass(frozen=True)
class RidgeSettings(SteppedSettings):
    """Ridge's settings; all but `train` have no effect on the training of the base stage.

    gamma: the penalty on the squared weights. mirror: count the mirrored images too. train: of the base stage.
    """

    gamma: float = setting(1.0, above=0, after_base=True)
    mirror: bool = setting(True, after_base=True)


@final
@register(
    "ridge",
    settings=RidgeSettings,
    title="Ridge regression on a frozen backbone",
    paper="after Zhuang, Weng, Wei, Xie, Toh, Lin, NeurIPS 2022",
    memory="optional",
    shares_base=True,
)
class Ridge(FrozenBackboneMethod[RidgeSettings]):
    """Trains in the base stage only; every stage adds to two sums and solves for the head."""

    returning_classes = True  # the sums are over images, whatever their class
    class_buffers = (SUMS,)

    @torch.no_grad()
    def finish(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Add the images of the new classes to the sums, and set the head to the solution."""
        head, pool = learner.network.head, stage.pool
        assert isinstance(head, LinearHead)
        assert head.bias is not None
        size, device = head.weight.shape[1] + 1, head.weight.device
        products = torch.zeros(size, size, dtype=torch.float64, device=device)
        sums = torch.zeros(head.capacity, size, dtype=torch.float64, device=device)
        if not stage.is_base:
            products += learner.buffers[PRODUCTS]
            sums[: stage.num_old] = learner.buffers[SUMS][: stage.num_old]
        for rows in stage.all_rows[~pool.exemplar].split(CHUNK):
            images, labels = pool.images[rows], pool.labels[rows].to(device)
            for mirror in (False, True) if self.settings.mirror else (False,):
                features = passes.features(learner.network, images, mirror).double()
                features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
                products += features.T @ features
                # A product and not index_add_, whose order of summation changes from run to run on a GPU.
                sums += F.one_hot(labels, head.capacity).to(features).T @ features
        learner.store(PRODUCTS, products)
        learner.store(SUMS, sums)
        solution = ridge_weights(products, sums, self.settings.gamma)
        head.weight.copy_(solution[:, :-1])
        head.bias.copy_(solution[:, -1])
