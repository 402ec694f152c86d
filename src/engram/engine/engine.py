"""Engine: runs phases, sweeps and inference on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engram.data.augment import Augmentation, Draws, augment, draw, pad_images, to_unit
from engram.data.stage import Stage
from engram.engine.loop import PhaseLoop, PhaseState
from engram.engine.sgd import FlatSGD
from engram.learner import Learner
from engram.methods import Phase, Step
from engram.models.network import Network
from engram.random import generator

Precision = Literal["float32", "bf16"]

INFERENCE_PIXELS = 512 * 32 * 32


@dataclass(frozen=True, eq=False)
class Pool:
    """A stage's pool on the device: images with their border, labels, and which are exemplars."""

    padded: Tensor
    labels: Tensor
    exemplar: Tensor


class Engine:
    """Executes phases and passes on one device at one precision."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        augmentation: Augmentation,
        image_size: tuple[int, int],
    ) -> None:
        self.device = device
        self.precision: Precision = precision
        self.augmentation = augmentation
        self.image_size = image_size
        if device.type == "cuda":
            # The shapes of a run do not change, so trying each convolution's algorithms once pays.
            torch.backends.cudnn.benchmark = True
            # float32 means float32: no rounding of convolutions to TF32 behind the user's back.
            torch.backends.cudnn.allow_tf32 = False
        self.capture = device.type == "cuda"
        # On a CPU channels-last costs a fifth of the speed with resnet10, most of it in the distillation loss.
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self._optimiser: FlatSGD | None = None
        self._pool: tuple[Stage, Pool] | None = None

    def autocast(self) -> torch.autocast:
        """The context that forward passes run in."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def optimiser(self, network: Network) -> FlatSGD:
        """The optimiser bound to a network; made once, and again only where the network has new tensors."""
        if self._optimiser is None or not self._optimiser.holds(network):
            self._optimiser = FlatSGD(network)
        return self._optimiser

    def pool(self, stage: Stage) -> Pool:
        """The stage's pool on the device; made once a stage."""
        if self._pool is None or self._pool[0] is not stage:
            samples = stage.pool
            padded = pad_images(samples.images.to(self.device), self.augmentation.pad)
            self._pool = (
                stage,
                Pool(padded, samples.labels.to(self.device), samples.exemplar.to(self.device)),
            )
        return self._pool[1]

    def augment(self, pool: Pool, rows: Tensor, draws: Draws) -> Tensor:
        """The rows of the pool as a batch to train on, (B, 3, H, W), laid out as suits the device."""
        return augment(pool.padded, rows, draws, self.image_size).contiguous(memory_format=self.layout)

    def start(
        self, learner: Learner, stage: Stage, phase: Phase, index: int, resume: PhaseState | None = None
    ) -> PhaseLoop:
        """A loop over the steps of a phase (the stage's number `index`), from its beginning or from where it stood."""
        return PhaseLoop(self, learner, stage, phase, index, resume)

    @torch.no_grad()
    def infer(self, network: Network, images: Tensor, mirror: bool = False) -> tuple[Tensor, Tensor]:
        """Embeddings (N, D) and scores (N, K) of uint8 images (N, H, W, 3) in eval mode."""
        was_training = network.training
        network.eval()
        embeddings: list[Tensor] = []
        scores: list[Tensor] = []
        batch = max(1, INFERENCE_PIXELS // (images.shape[1] * images.shape[2]))
        for part in images.split(batch):
            with self.autocast():
                output = network(to_unit(part.to(self.device), mirror).contiguous(memory_format=self.layout))
            embeddings.append(output.embedding)
            scores.append(output.scores)
        network.train(was_training)
        return torch.cat(embeddings), torch.cat(scores)

    def embed(self, network: Network, images: Tensor, mirror: bool = False) -> Tensor:
        """Embeddings (N, D) of uint8 images (N, H, W, 3) in eval mode, not normalised."""
        return self.infer(network, images, mirror)[0]

    def sweep(
        self,
        learner: Learner,
        stage: Stage,
        rows: Tensor,
        visit: Callable[[Step], Sequence[Tensor]],
        batch_size: int,
    ) -> list[Tensor]:
        """The sums of what `visit` returns over one augmented pass in train mode; no parameter moves.

        Every image counts once, the last batch being as small as it must. Batch statistics do move, as in the
        released code.
        """
        pool = self.pool(stage)
        learner.network.train()
        draws = draw(self.augmentation, (len(rows),), generator(learner.seed, "augment", "sweep", stage.index))
        order = torch.randperm(len(rows), generator=generator(learner.seed, "shuffle", "sweep", stage.index))
        rows, draws = rows.to(self.device), draws.to(self.device)
        totals: list[Tensor] | None = None
        for part in order.to(self.device).split(batch_size):
            images = self.augment(pool, rows[part], draws[part])
            with self.autocast():
                output = learner.network(images)
            labels, exemplar = pool.labels[rows[part]], pool.exemplar[rows[part]]
            sums = visit(Step(labels, exemplar, output, None, {}, learner.buffers))
            totals = list(sums) if totals is None else [a + b for a, b in zip(totals, sums, strict=True)]
        assert totals is not None, "a sweep over no rows"
        return totals
