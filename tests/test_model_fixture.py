"""Models written by earlier versions open and answer what they answered then."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engram import read_manifest
from engram.core.events import Learned
from engram.models.labels import decode_label
from engram.models.learning import learn_into
from helpers import unpack_archive
from model_helpers import opened

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("model-format*.tar.xz"))


def test_there_is_one_of_this_format() -> None:
    assert [path.name for path in FIXTURES] == ["model-format1.tar.xz"]
    assert all(path.stat().st_size < 400_000 for path in FIXTURES)


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name.partition(".")[0])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    unpack_archive(request.param, tmp_path)
    return tmp_path


def test_it_opens_and_answers_as_it_did(model: Path, request: pytest.FixtureRequest) -> None:
    recorded = json.loads((Path(__file__).parent / "fixtures" / f"{request.node.callspec.id}.json").read_text())
    found = opened(model)
    assert found.learner is not None
    assert found.labels == [decode_label(label) for label in recorded["labels"]]
    assert list(found.predictors) == list(recorded["shares"])
    pictures = [memory.samples() for memory in (found.learner.memory, found.heldout)]
    images = torch.cat([samples.pixels for samples in pictures if samples is not None])
    for by, shares in recorded["shares"].items():
        assert np.allclose(found.probabilities(images, by), shares, atol=1e-4)
    told = read_manifest(model)
    assert [entry["what"] for entry in told["history"]] == ["learned", "learned"]
    assert all(known["accuracy"].keys() == {"cnn", "nme"} for known in told["classes"])


def test_it_goes_on_learning(model: Path) -> None:
    before = opened(model).labels
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    events = list(learn_into(model, images, ["new"] * 6, epochs=1, device="cpu"))
    assert isinstance(events[-1], Learned)
    after = opened(model)
    assert after.labels == [*before, "new"]
    assert [len(known.digests) for known in after.classes] == [0, 0, 0, 0, 0, 8 * 5]
