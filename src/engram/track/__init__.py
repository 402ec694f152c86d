"""Trackers: TensorBoard, Weights & Biases, MLflow, or plain files, fed by the events of runs and lessons."""

from engram.track.services import check_tracker
from engram.track.tracker import Confusion, TrackedRun, Tracker
from engram.track.tracking import Tracking

__all__ = ["Confusion", "TrackedRun", "Tracker", "Tracking", "check_tracker"]
