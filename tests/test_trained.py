"""A run's network out of its directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import make_config, make_store
from engram import EngramError, open_run, read_mini, recipe, run, train


@pytest.mark.parametrize("method", ["afc", "der", "mnemonics", "bic", "naive"])
def test_the_network_of_a_run_is_the_one_that_was_measured(method: str, tmp_path: Path) -> None:
    store = make_store()
    result = train(make_config(method), store, tmp_path / "run")
    trained = open_run(tmp_path / "run")
    assert trained.stages == len(result["stages"]) == 3
    names, wanted = list(trained.class_names), [store.class_names[int(label)] for label in store.test.class_ids]
    assert sorted(names) == sorted(store.class_names)
    features, scores = trained.features(store.test.images), trained.scores(torch.from_numpy(store.test.images))
    assert scores.shape == (len(wanted), len(names))
    right = {"cnn": scores.argmax(dim=1)}
    if trained.class_means is not None:
        right["nme"] = (F.normalize(features, dim=1) @ trained.class_means.T).argmax(dim=1)
    assert set(right) == set(result["final_accuracy"])
    for name, labels in right.items():
        accuracy = np.mean([names[int(label)] == one for label, one in zip(labels, wanted, strict=True)])
        assert 100 * accuracy == pytest.approx(result["final_accuracy"][name])


def test_a_run_that_was_stopped_has_the_classes_it_has_seen(tmp_path: Path) -> None:
    store = make_store()
    for _ in run(make_config(), store, tmp_path / "run", stop_after_stage=1):
        pass
    trained = open_run(str(tmp_path / "run"))
    assert (trained.stages, len(trained.class_names)) == (2, 4)
    assert trained.scores(store.test.images[:3]).isfinite().all()


def test_what_is_no_run_and_what_are_no_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match=r"run\.json"):
        open_run(tmp_path)
    train(make_config("naive"), make_store(), tmp_path / "run")
    trained = open_run(tmp_path / "run")
    for images in (np.zeros((2, 8, 8, 3)), np.zeros((2, 9, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), np.uint8)):
        with pytest.raises(EngramError, match=r"uint8 of the shape \(N, 8, 8, 3\)"):
            trained.features(images)
    (tmp_path / "run" / "checkpoint" / "state.safetensors").unlink()
    with pytest.raises(EngramError, match="there is no checkpoint"):
        open_run(tmp_path / "run")


def test_the_example_in_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (place,) = re.findall(r'open_run\("(.*?)"\)', block)
    config = recipe("replay-mini-b10-s5").with_settings(train__epochs=1).with_value("backbone", "resnet10")
    for _ in run(config, directory=tmp_path / place, stop_after_stage=0):
        pass
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(block, found)
    assert len(found["features"]) == len(found["answers"]) == len(read_mini().test)
    assert set(found["answers"]) <= set(found["trained"].class_names)
