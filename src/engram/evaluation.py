"""Evaluation: what the learner predicts for test images, by each predictor."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.engine import Engine
from engram.learner import Learner


def predict(learner: Learner, engine: Engine, images: Tensor) -> dict[str, np.ndarray]:
    """The predicted label of each uint8 image (N, H, W, 3), by predictor.

    cnn: the class with the highest score. nme: the class whose mean of exemplars is nearest; only where there are
    class means.
    """
    embedding, scores = engine.infer(learner.network, images)
    predictions = {"cnn": scores.argmax(dim=1)}
    if learner.class_means is not None:
        # Means and embeddings have length 1, so the nearest mean has the largest product.
        predictions["nme"] = (F.normalize(embedding, dim=1) @ learner.class_means.T).argmax(dim=1)
    return {name: labels.to("cpu", torch.int16).numpy() for name, labels in predictions.items()}
