"""Files that an earlier version wrote are read and resumed: run directories, checkpoints, an interrupted lesson.

The fixtures were written by commit e9cbcc3. To be small, nine tenths of their large tensors are zero.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engram import EngramError, learn_into, open_model, open_run, read_mini
from engram.core.events import Learned, RunFinished
from engram.experiment.runner import resume
from helpers import last_state, timeless, toy_store, unpack_archive

FIXTURES = Path(__file__).parent / "fixtures"
METHODS = ("afc", "bic", "der", "mnemonics", "podnet-dde", "si")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four toy classes that were stopped inside their second stage, and what they ended with."""
    folder = tmp_path_factory.mktemp("old")
    unpack_archive(FIXTURES / "runs-format1.tar.xz", folder)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_an_old_run_opens_and_resumes_to_the_old_result(method: str, runs: Path) -> None:
    expected = json.loads((runs / "expected.json").read_text())[method]
    store = toy_store(num_classes=4, per_class=6, test_per_class=2)
    trained = open_run(runs / method)
    assert trained.stages == 1
    assert trained.scores(store.test.images).isfinite().all()
    assert isinstance(list(resume(runs / method, store))[-1], RunFinished)
    state = last_state(runs / method)
    assert set(state) == set(expected["tensors"])
    for name, (shape, mean) in expected["tensors"].items():
        assert list(state[name].shape) == shape, name
        # Processors differ in their last bits, and a step makes more of it; an error in a mapping is far larger.
        assert float(state[name].double().abs().mean()) == pytest.approx(mean, rel=0.02, abs=1e-4), name
    result = timeless(runs / method)
    assert result["stages"][0] == expected["result"]["stages"][0]
    assert len(result["stages"]) == len(expected["result"]["stages"])


def test_an_old_interrupted_lesson_is_finished(tmp_path: Path) -> None:
    unpack_archive(FIXTURES / "lesson-format1.tar.xz", tmp_path / "model")
    store = read_mini()
    rows = np.flatnonzero(store.train.class_ids == 5)[:20]
    events = list(learn_into(tmp_path / "model", store.train.images[rows], ["sixth"] * len(rows), device="cpu"))
    assert isinstance(events[-1], Learned)
    model = open_model(tmp_path / "model", "cpu")[0]
    assert len(model.labels) == 6
    found = model.probabilities(torch.from_numpy(store.test.images[::40]), "cnn")
    expected = json.loads((FIXTURES / "lesson-format1.json").read_text())
    np.testing.assert_allclose(np.asarray(found), expected, atol=0.02)


def swap(file: Path, before: bytes, after: bytes) -> None:
    """Replaces some bytes of a file, once."""
    content = file.read_bytes()
    assert content.count(before) == 1, before
    file.write_bytes(content.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (b'\\"accuracy\\": {\\"cnn\\": 100.0', b'\\"accuracy\\": {\\"cnn\\": 000.0', "is damaged"),
        (b'\\"accuracy\\": {\\"cnn\\": 100.0', b'\\"accuracy\\": {\\"cnn\\": 90.00', "predictions are 100.00 % right"),
        (b'\\"classes\\": 2', b'\\"classes\\": 3', "should be stage 0 with 2 classes"),
        (b'\\"number\\": 0', b'\\"number\\": 7', "has no phase 7, epoch 0, step 3"),
        (b'\\"epoch\\": 0', b'\\"epoch\\": 9', "has no phase 0, epoch 9, step 3"),
        (b'\\"step\\": 3', b'\\"step\\": 2', "has no phase 0, epoch 0, step 2"),
        (b'\\"format\\": 1', b'\\"format\\": 2', "is damaged"),
    ],
)
def test_damage_in_an_old_checkpoint_without_a_checksum_of_its_numbers_is_found(
    before: bytes, after: bytes, words: str, tmp_path: Path
) -> None:
    unpack_archive(FIXTURES / "runs-format1.tar.xz", tmp_path)
    swap(tmp_path / "afc" / "checkpoint" / "state.safetensors", before, after)
    with pytest.raises(EngramError, match=words):
        list(resume(tmp_path / "afc", toy_store(num_classes=4, per_class=6, test_per_class=2)))
