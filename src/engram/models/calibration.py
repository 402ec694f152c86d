"""Calibrated confidence: a temperature for each predictor, fitted on held-out images."""

from __future__ import annotations

import numpy as np

FEWEST = 20  # held-out images needed to estimate the accuracy
COLDEST, HOTTEST = 0.05, 20.0
CLOSE = 0.005  # allowed difference of the mean confidence from its target
_HALVINGS = 40


def fit_temperature(probabilities: np.ndarray, labels: np.ndarray, margin: float = 0.0) -> float | None:
    """Return the temperature at which the mean confidence equals the accuracy less a margin, or None.

    The confidence is the largest probability. It falls monotonically with the temperature, so there is at most one
    solution. The accuracy is estimated with one more correct and one more wrong image, so it is never 0 or 1. None if
    there are fewer than FEWEST images, or no solution between COLDEST and HOTTEST.

    probabilities: (N, K) at temperature 1.
    labels: true class of each image (N,).
    """
    if len(labels) < FEWEST:
        return None
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)
    target = (np.count_nonzero(probabilities.argmax(axis=1) == labels) + 1) / (len(labels) + 2) - margin
    low, high = np.log(COLDEST), np.log(HOTTEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_confidence(logits, np.exp(middle)) > target else (low, middle)
    found = float(np.exp((low + high) / 2))
    return found if abs(mean_confidence(logits, found) - target) < CLOSE else None


def mean_confidence(logits: np.ndarray, temperature: float) -> float:
    """Return the mean over images of the largest probability, with logits (N, K) divided by the temperature."""
    above = (logits - logits.max(axis=1, keepdims=True)) / temperature
    return float((1 / np.exp(above).sum(axis=1)).mean())
