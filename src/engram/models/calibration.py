"""Confidence that means what it says: one number for each predictor, found on held-out images."""

from __future__ import annotations

import numpy as np

# Fewer held-out images say too little of how often the model is right.
FEWEST = 20
COLDEST, HOTTEST = 0.05, 20.0
CLOSE = 0.005  # of the mean confidence to its aim
_HALVINGS = 40


def fit_temperature(shares: np.ndarray, labels: np.ndarray) -> float | None:
    """What logits are to be divided by so that the mean confidence is the share of the images that are called right.

    None where there are fewer than FEWEST, or nothing between COLDEST and HOTTEST does that. shares: of each class
    (N, K), at temperature 1; labels: the true class of each (N,). The confidence is the largest share, and falls
    steadily as the temperature rises, so there is one answer at most; the share of the right ones is counted with one
    more that is right and one that is wrong, so that no number of images makes a model certain.
    """
    if len(labels) < FEWEST:
        return None
    with np.errstate(divide="ignore"):
        logits = np.log(shares)
    aim = (np.count_nonzero(shares.argmax(axis=1) == labels) + 1) / (len(labels) + 2)
    low, high = np.log(COLDEST), np.log(HOTTEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_confidence(logits, np.exp(middle)) > aim else (low, middle)
    found = float(np.exp((low + high) / 2))
    return found if abs(mean_confidence(logits, found) - aim) < CLOSE else None


def mean_confidence(logits: np.ndarray, temperature: float) -> float:
    """The mean over images of the largest share, of logits (N, K) that are divided by the temperature."""
    above = (logits - logits.max(axis=1, keepdims=True)) / temperature
    return float((1 / np.exp(above).sum(axis=1)).mean())
