"""What the head sees of held-out images: a frozen network computes it once, and the model keeps it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from safetensors.torch import load
from torch import Tensor

from engram.core.errors import EngramError
from engram.core.memory_limits import check_memory
from engram.data.memory import Memory
from engram.data.stage import Samples
from engram.models.store.generations import FEATURES_FILE, Snapshot
from engram.nn.network import Network

FEATURES = "features"  # tensor per held-out image; a row of zeros is not computed yet


def kept_features(heldout: Memory, samples: Samples, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the features (N, D) of held-out images, and keep those that are computed now.

    samples: the images of `heldout`. compute: from images to features.
    """
    kept = samples.state.get(FEATURES)
    rows = torch.arange(len(samples)) if kept is None else (kept == 0).all(dim=1).nonzero().flatten()
    if len(rows):
        found = compute(samples.pixels[rows]).cpu()
        kept = found.new_zeros(len(samples), found.shape[1]) if kept is None else kept.clone()
        kept[rows] = found
        heldout.set_state(FEATURES, kept)
    assert kept is not None
    return kept


def forget_features(heldout: Memory) -> None:
    """Forget the features of held-out images, after the network was trained."""
    samples = heldout.samples()
    if samples is not None and FEATURES in samples.state:
        heldout.set_state(FEATURES, torch.zeros_like(samples.state[FEATURES]))


def features_to_save(heldout: Memory) -> dict[str, Tensor]:
    """Return the features in the order of the pictures' names; empty if there are none."""
    samples = heldout.samples()
    if samples is None or FEATURES not in samples.state:
        return {}
    return {FEATURES: samples.state[FEATURES][samples.labels.argsort(stable=True)]}


def read_features(snapshot: Snapshot, network: Network, count: int) -> dict[str, Tensor]:
    """Return the saved features of `count` held-out images, empty if there are none; refuse those that do not fit."""
    if FEATURES_FILE not in snapshot.names:
        return {}
    path = snapshot.path / FEATURES_FILE
    check_memory(2 * snapshot.size(FEATURES_FILE), f"the features in {path}")
    content = snapshot.read(FEATURES_FILE)
    with suppress(Exception):  # safetensors has its own error types; a wrong width is an error of torch
        found = load(content)
        values = found[FEATURES]
        fits = found.keys() == {FEATURES} and values.dtype == torch.float32 and values.ndim == 2
        if fits and len(values) == count and bool(values.isfinite().all()):
            network.score(values[:1].to(network.mean.device))
            return found
    raise EngramError(f"{path} has other features than those of the held-out images; the model is damaged")
