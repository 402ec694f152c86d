"""Training: how a phase trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engram.errors import EngramError
from engram.methods.settings import check_choice


@dataclass(frozen=True)
class Training:
    """How one phase trains: SGD with momentum over so many epochs.

    clip: each gradient is clamped element-wise to [-clip, clip]. schedule "cosine" falls to 0 over the phase; "steps"
    multiplies by `factor` at each of the milestones, which are shares of the phase (0.5: after half of its epochs);
    "restarts" has a tenth of the rate for one epoch and then, epoch by epoch, cosines from the rate down to `factor` of
    it, over 1, 2, 4, 8 ... epochs (so that it ends low after 16, 32, 64 ...); "rise" is a warm-up, epoch by epoch in
    equal steps up to the rate, which the last epoch has.
    remainder: what is left of an epoch after the full batches is dropped (a fresh permutation each epoch) or kept as a
    smaller batch, unless it is one image of which the backbone leaves but one number a channel. A phase with fewer
    images than batch_size trains on batches of what there is.
    clip_norm: gradients longer than that, all that train taken as one vector, are brought to that length.
    """

    epochs: int = 160
    batch_size: int = 128
    lr: float = 0.1
    schedule: Literal["cosine", "constant", "steps", "restarts", "rise"] = "cosine"
    milestones: tuple[float, ...] = ()
    factor: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip: float | None = 5.0
    remainder: Literal["drop", "keep"] = "drop"
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 0),
            ("batch_size", 1),
            ("lr", 0),
            ("momentum", 0),
            ("weight_decay", 0),
        ):
            if getattr(self, name) < least:
                raise EngramError(f"{name} must be at least {least}, got {getattr(self, name)}")
        schedules = ("cosine", "constant", "steps", "restarts", "rise")
        for name, choices in (("schedule", schedules), ("remainder", ("drop", "keep"))):
            check_choice(self, name, choices)
        if any(not 0 < share < 1 for share in self.milestones) or list(self.milestones) != sorted(self.milestones):
            raise EngramError(f"milestones must be shares of the phase between 0 and 1 in order, got {self.milestones}")
        if not 0 < self.factor <= 1:
            raise EngramError(f"factor must be above 0 and at most 1, got {self.factor}")
        if self.clip is not None and self.clip <= 0:
            raise EngramError(f"clip must be above 0, or none, got {self.clip}")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise EngramError(f"clip_norm must be above 0, or none, got {self.clip_norm}")

    def batches(self, images: int) -> tuple[int, int]:
        """The steps of an epoch over so many images, and the size of its batches (the last may be smaller)."""
        size = min(self.batch_size, images)
        steps = images // size if self.remainder == "drop" else -(-images // size)
        return steps, size
