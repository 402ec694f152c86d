"""Passes: computations over images that a method may use outside a training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from engram.contract.learner import Learner
from engram.contract.phase import Step
from engram.contract.settings import Training
from engram.data.image_rows import Pixels
from engram.data.stage import Stage
from engram.nn.network import Network


@dataclass(frozen=True, eq=False)
class ImageTuningStep:
    """One step of gradient descent on images; the network does not change.

    tuned: (N, 3, H, W), the images that are optimised, in [0, 1] plus their change. images: (B, 3, H, W), a batch of
    the pool, with labels (B,). parameters: the network's parameters by name, without gradients. network: returns the
    embedding (B, D) and the logits (B, K) of images in eval mode, with some parameters replaced.
    """

    tuned: Tensor
    images: Tensor
    labels: Tensor
    parameters: Mapping[str, Tensor]
    network: Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


class Passes(Protocol):
    """Passes over images, which the engine carries out on its device."""

    def embed(self, network: Network, images: Pixels, mirror: bool = False) -> Tensor:
        """Embeddings (N, D) of uint8 images (N, H, W, 3), in eval mode, not normalised.

        They compare images. A rectified head does not see them: to fit a head, use `features`.
        """
        ...

    def features(
        self, network: Network, images: Pixels, mirror: bool = False, shift: tuple[int, int] = (0, 0)
    ) -> Tensor:
        """The inputs of the head (N, D') for uint8 images (N, H, W, 3), in eval mode: `Head.input_features`.

        mirror: of the mirror images. shift: of the images moved by that many pixels down and to the right.

        Multiplied by the head's weights they give the scores, so a head in closed form is fitted to them.
        """
        ...

    def sweep(
        self,
        learner: Learner,
        stage: Stage,
        rows: Tensor,
        visit: Callable[[Step], Sequence[Tensor]],
        batch_size: int,
    ) -> list[Tensor]:
        """The sums of what `visit` returns over one augmented pass in train mode; no parameter changes.

        It returns a list of tensors: sums over the images of a batch, so that several processes can each visit a part.
        """
        ...

    def sensitivity(
        self,
        learner: Learner,
        stage: Stage,
        rows: Tensor,
        objective: Callable[[Step, Tensor], Tensor],
        power: Literal[1, 2],
    ) -> dict[str, Tensor]:
        """For each parameter the mean over images of |gradient|^power, with one gradient per image.

        In eval mode, on images as in evaluation. objective: takes a Step and a uniform random number per image (B,),
        which does not depend on the batches, and returns a value per image (B,). Only for the heads in nn/heads.py,
        without adjustments; others are refused.
        """
        ...

    def tune(
        self,
        learner: Learner,
        stage: Stage,
        images: Pixels,
        rows: Tensor,
        objective: Callable[[ImageTuningStep], Tensor],
        training: Training,
        purpose: str,
    ) -> Tensor:
        """The uint8 images (N, H, W, 3) after the training of their pixels, as floats; the network does not change.

        Each step sees an augmented batch of the pool's rows. The learning rate is for normalised pixels. purpose: names
        the random numbers.
        """
        ...
