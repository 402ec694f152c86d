"""The features of a stage's images, for a method that fits its head to them: computed once, saved in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.contract import Learner, Method
from engram.core.errors import EngramError
from engram.core.events import Progress
from engram.core.memory_limits import check_memory
from engram.data.image_rows import Pixels
from engram.data.stage import Stage
from engram.engine import Engine
from engram.engine.forward import Inference

PHASE = "features"  # name of the pass in events
BATCH = {"cpu": 32, "cuda": 4096}  # images between two moments to save or to stop
# Buffers of a learner while its features are computed, so that they are in its checkpoints.
FEATURES, DONE = "features", "features.done"
DAMAGED = "the checkpoint is damaged: its features are not those of the stage; start again"


@dataclass(frozen=True, eq=False)
class FeaturesTaken:
    """Features were computed of `done` of the images. Now a checkpoint can be saved, or the stage stopped.

    rate: images per second, of those computed by this process.
    """

    stage: int
    done: int
    images: int
    rate: float

    def progress(self, stages: int) -> Progress:
        """The progress event; it has no epochs, and its steps are images."""
        return Progress(
            stage=self.stage,
            stages=stages,
            phase=PHASE,
            epoch=0,
            epochs=0,
            step=self.done,
            steps=self.images,
            terms={},
            images_per_second=self.rate,
            done=self.done / self.images,
            seconds_left=(self.images - self.done) / self.rate,
        )


class FeaturePass:
    """Computes the features of a stage's images, except exemplars, in the views that the method needs."""

    def __init__(self, method: Method, learner: Learner, engine: Engine, stage: Stage) -> None:
        self.views = method.feature_views()
        self.learner, self.engine, self.stage = learner, engine, stage
        self.rows = stage.all_rows[~stage.pool.exemplar] if self.views else stage.all_rows[:0]

    @property
    def labels(self) -> Tensor:
        """The label of each image whose features are computed."""
        return self.stage.pool.labels[self.rows]

    def __iter__(self) -> Iterator[int]:
        """Compute the features, or what a checkpoint lacks of them; yield the number of images that are done."""
        buffers, images = self.learner.buffers, self.stage.pool.images
        done = self.done_before()
        if not len(self.rows):
            return
        read = self.engine.inference(self.learner.network)
        if done and self._features(read, images[self.rows[:1]]).shape[1] != buffers[FEATURES].shape[1]:
            raise EngramError(DAMAGED)
        while done < len(self.rows):
            rows = self.rows[done : done + BATCH[self.engine.device.type]]
            part = self._features(read, images[rows])
            if FEATURES not in buffers:
                shape = (len(self.rows), *part.shape[1:])
                self._check_room(shape)
                buffers[FEATURES] = part.new_zeros(shape)
            buffers[FEATURES][done : done + len(part)] = part
            done += len(part)
            buffers[DONE] = torch.tensor([done])
            yield done

    def _features(self, read: Inference, images: Pixels) -> Tensor:
        """The mean over the views of the images' features, (N, D')."""
        total: Tensor | None = None
        for view in self.views:
            outputs = [output.features for output in read.outputs(images, view)]
            features = torch.cat([each for each in outputs if each is not None])
            total = features if total is None else total + features
        assert total is not None
        return total / len(self.views)

    def done_before(self) -> int:
        """The number of images whose features came with a checkpoint."""
        held, done = (self.learner.buffers.get(name) for name in (FEATURES, DONE))
        if held is None or done is None:
            return 0
        fits = held.ndim == 2 and len(held) == len(self.rows) and held.is_floating_point()
        if not fits or done.shape != (1,) or done.dtype != torch.int64 or not 0 <= int(done) <= len(held):
            raise EngramError(DAMAGED)
        return int(done)

    def _check_room(self, shape: tuple[int, ...]) -> None:
        needed = 4 * torch.Size(shape).numel()
        check_memory(needed, f"the features of {shape[0]} images", "learn fewer classes at a time", self.engine.device)

    def take(self) -> Tensor:
        """The features of all images, (N, D'); the learner does not hold them any longer."""
        features = self.learner.buffers.pop(FEATURES)
        del self.learner.buffers[DONE]
        if not bool(features.isfinite().all()):
            raise EngramError(
                "the features of some images are not finite: the network's weights are damaged, or its training "
                "diverged; choose other weights, or a lower learning rate"
            )
        return features
