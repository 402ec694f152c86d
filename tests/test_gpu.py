"""What only a GPU can show: the captured step is the eager step, bf16 learns as float32 does, runs share the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import make_config, make_store
from engram import recipe, run_together, train
from engram.events import BaseReused, RunFinished
from engram.session import Session
from engram.stagecache import StageCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def first_steps(capture: bool, steps: int) -> tuple[list[dict[str, float]], torch.Tensor]:
    """The loss terms of the first steps of a stage with a teacher, and the parameters after them, in float32."""
    config = make_config(device="cuda", precision="float32", settings__train__epochs=12)
    session = Session(config, make_store(train=24))
    learner, engine, method = session.learner, session.engine, session.method
    engine.capture = False  # the same base, bit for bit, under both
    base = session.stage(0)
    method.grow(learner, base, engine)
    for phase in method.phases(learner, base, engine):
        for _ in engine.start(learner, base, phase, 0):
            pass
    method.finish(learner, base, engine)
    learner.snapshot_teacher()
    engine.capture = capture
    stage = session.stage(1)
    method.grow(learner, stage, engine)
    loop = engine.start(learner, stage, method.phases(learner, stage, engine)[0], 0)
    losses: list[dict[str, float]] = []
    for taken, _ in enumerate(loop, start=1):
        losses.append(loop.terms())
        if taken == steps:
            break
    return losses, engine.optimiser(learner.network).values.clone()


def test_captured_and_eager_steps_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # Left to choose, cuDNN may take another algorithm for each, and fifty steps amplify the last bits.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    eager, eager_values = first_steps(capture=False, steps=50)
    captured, captured_values = first_steps(capture=True, steps=50)
    assert len(eager) == len(captured) == 50
    for ours, theirs in zip(captured, eager, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    difference = (captured_values - eager_values).norm() / eager_values.norm()
    assert difference < 1e-4


def test_bf16_learns_as_float32_does() -> None:
    def average(precision: str) -> float:
        config = recipe("afc-mini-b10-s5").with_value("device", "cuda").with_value("precision", precision)
        return train(config)["average_incremental_accuracy"]["cnn"]

    assert average("bf16") == pytest.approx(average("float32"), abs=3)


def test_runs_side_by_side_learn_as_alone(tmp_path: Path) -> None:
    """Eight runs in as many threads and streams: two methods with the same base stage, four seeds."""
    configs = {
        f"{method}-{seed}": recipe(f"{method}-mini-b10-s5").with_value("device", "cuda").with_value("seed", seed)
        for method in ("afc", "replay")
        for seed in (1, 2, 3, 4)
    }
    events = list(run_together(configs, directory=tmp_path / "runs", cache=StageCache(tmp_path / "cache")))
    results = {name: event.result for name, event in events if isinstance(event, RunFinished)}
    assert set(results) == set(configs), [event for _, event in events if event.name == "run_failed"]
    assert sum(isinstance(event, BaseReused) for _, event in events) == 4
    for name in ("afc-1", "replay-4"):
        alone = train(configs[name])["average_incremental_accuracy"]["cnn"]
        assert results[name]["average_incremental_accuracy"]["cnn"] == pytest.approx(alone, abs=3)
