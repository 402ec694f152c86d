"""Predictors: a registry of functions from a network's outputs to a score for each class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.contract.learner import Learner
from engram.core.errors import EngramError
from engram.core.registry import OWN, Registry
from engram.data.memory import RESERVOIR
from engram.nn.network import Output


class ImageOutputs:
    """The network's outputs for N images, in eval mode.

    embedding: (N, D), not normalised. scores: (N, K), of the head, minus infinity for classes not seen yet. logits: the
    scores times the learned scale, if there is one. features: (N, D'), exactly what the head sees.
    """

    def __init__(self, outputs: Iterable[Output]) -> None:
        self._parts = [output._replace(maps=()) for output in outputs]  # the maps of all images may not fit in memory

    def __len__(self) -> int:
        return sum(len(part.embedding) for part in self._parts)

    @cached_property
    def embedding(self) -> Tensor:
        return torch.cat([part.embedding for part in self._parts])

    @cached_property
    def scores(self) -> Tensor:
        return torch.cat([part.scores for part in self._parts])

    @cached_property
    def logits(self) -> Tensor:
        return torch.cat([part.logits for part in self._parts])

    @cached_property
    def features(self) -> Tensor:
        return torch.cat([part.features for part in self._parts if part.features is not None])


PredictorFunction = Callable[[Learner, ImageOutputs], Tensor]


@dataclass(frozen=True)
class Predictor:
    """A registered predictor. needs_means: it uses the class means, so its method needs exemplars of every class."""

    function: PredictorFunction
    needs_means: bool = False


PREDICTORS: Registry[Predictor] = Registry("predictor", OWN)


def register_predictor(name: str, *, needs_means: bool = False) -> Callable[[PredictorFunction], PredictorFunction]:
    """A decorator that registers a predictor, to be named in `Method.predictors`.

    The function takes a `Learner` and the `ImageOutputs` of some images. It returns a score for each image and class
    seen, a tensor (N, K); the class with the highest score is the prediction. The softmax of the scores is the
    confidence of a model of one's own images, after calibration.

    needs_means: it uses `learner.class_means`, (K, D), which are computed from the exemplars only if this is True.
    """

    def decorate(function: PredictorFunction) -> PredictorFunction:
        if not callable(function):
            raise EngramError(f"the predictor {name!r} is registered with {function!r:.80}; it should be a function")
        PREDICTORS.add(name, Predictor(function, needs_means), code=[function])
        return function

    return decorate


def need_means(predictors: Iterable[str]) -> list[str]:
    """Those of the predictors that use the class means."""
    return [name for name in predictors if PREDICTORS.find(name).needs_means]


def predicted_scores(name: str, learner: Learner, outputs: ImageOutputs) -> Tensor:
    """The scores (N, K) of a predictor for the classes seen."""
    count, seen = len(outputs), learner.num_classes
    scores = PREDICTORS.find(name).function(learner, outputs)
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != count or scores.shape[1] < seen:
        what = f"a tensor of the shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"{scores!r:.60}"
        raise EngramError(
            f"the predictor {name!r} returned {what} for {count} images and {seen} classes; it should return a score "
            f"for each, a tensor ({count}, {seen})"
        )
    return scores[:, :seen]


@register_predictor("cnn")
def highest_score(learner: Learner, outputs: ImageOutputs) -> Tensor:
    """The head's scores."""
    return outputs.scores


@register_predictor("nme", needs_means=True)
def nearest_mean(learner: Learner, outputs: ImageOutputs) -> Tensor:
    """The similarity to the mean of each class's exemplars."""
    assert learner.class_means is not None
    # Means and embeddings have length 1, so the nearest mean has the largest product.
    similarity = F.normalize(outputs.embedding, dim=1) @ learner.class_means.T
    if learner.memory.config.selection == RESERVOIR:  # it may have no exemplar of a class
        unknown = sorted(set(range(len(learner.class_means))).difference(learner.memory.labels))
        similarity[:, unknown] = -torch.inf
    return similarity
