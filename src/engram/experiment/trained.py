"""The trained network of a run, read from its directory, for features or scores of other images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram.contract.learner import load_network
from engram.core.checkpoint import fitting
from engram.core.errors import EngramError
from engram.data.augment import centre, to_unit
from engram.experiment.networks import make_network
from engram.experiment.run_config import RunConfig
from engram.methods import find_method
from engram.nn.network import Network, Output, averaged
from engram.runs.directory import CHECKPOINT
from engram.runs.reader import read_manifest
from engram.runs.run_checkpoint import read_run_checkpoint

BATCH = 256  # images at a time


@dataclass(frozen=True)
class TrainedRun:
    """The trained network of a run, from its last checkpoint.

    network: in eval mode. class_names: of the classes seen, by label. class_means: (K, D), each of length 1, for the
    nearest mean of exemplars; None if the run has none. stages: number of finished stages, including the base stage.
    image_size: height and width of the images.
    """

    config: RunConfig
    network: Network
    class_names: tuple[str, ...]
    class_means: Tensor | None
    stages: int
    image_size: tuple[int, int]

    def features(self, images: Tensor | np.ndarray) -> Tensor:
        """The embeddings (N, D) of uint8 images (N, H, W, 3), not normalised."""
        return torch.cat([output.embedding for output in self._outputs(images)])

    def scores(self, images: Tensor | np.ndarray) -> Tensor:
        """The head's scores (N, K) of uint8 images (N, H, W, 3) for the classes seen, in the order of class_names."""
        return torch.cat([output.scores[:, : len(self.class_names)] for output in self._outputs(images)])

    def _outputs(self, images: Tensor | np.ndarray) -> Iterator[Output]:
        given = torch.as_tensor(np.ascontiguousarray(images) if isinstance(images, np.ndarray) else images)
        if given.dtype != torch.uint8 or tuple(given.shape[1:]) != (*self.image_size, 3) or not len(given):
            height, width = self.image_size
            raise EngramError(
                f"images must be uint8 of the shape (N, {height}, {width}, 3), with at least one image, got "
                f"{str(given.dtype).removeprefix('torch.')} of {tuple(given.shape)}"
            )
        seen = centre(given, self.config.augmentation.view_size(self.image_size))
        with torch.no_grad():
            for some in seen.split(BATCH):
                yield averaged(self.network, self.network, to_unit(some.to(self.network.mean.device)))


def open_run(directory: str | Path, device: str | torch.device = "cpu") -> TrainedRun:
    """Open the trained network of the run in a directory, from its last checkpoint. The images are not needed."""
    path = Path(directory)
    manifest = read_manifest(path)
    config = RunConfig.from_plain(manifest.config, f"the run in {path}")
    names = manifest.data.class_names
    checkpoint = read_run_checkpoint(path, manifest)
    method = find_method(config.method).make(config.settings)
    network = make_network(config, method, len(names), (0.0,) * 3, (1.0,) * 3)  # mean and std are loaded below
    with fitting(path / CHECKPOINT):
        load_network(network, checkpoint.tensors)
    means = checkpoint.tensors.get("class_means")
    order = manifest.order.class_ids[: network.head.num_classes]
    height, width = manifest.data.image_size
    return TrainedRun(
        config=config,
        network=network.to(device),
        class_names=tuple(names[label] for label in order),
        class_means=None if means is None else means.to(device),
        stages=len(checkpoint.data["records"]),
        image_size=(height, width),
    )
