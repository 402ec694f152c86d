"""Models whose statistics are damaged are refused in a sentence when they are opened, and so are their checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from engram.core.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from engram.core.errors import EngramError
from engram.core.events import Learned
from engram.core.safe_folder import digest
from engram.experiment import feature_pass
from engram.models.model_config import ModelConfig
from engram.models.store.generations import FEATURES_FILE, WEIGHTS, pointer_checksum
from model_helpers import NAMES, SIZE, learn, make, opened, same, tiny

Tensors = dict[str, torch.Tensor]
STATISTICS = {
    "lda": ("lda.counts", "lda.means", "lda.factors", "lda.classes"),
    "bedrock": ("bedrock.rows", "bedrock.classes", "bedrock.sizes"),
    "codes": ("bedrock.rows", "bedrock.classes", "bedrock.sizes", "bedrock.rotation", "bedrock.centres"),
}
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda value: None,
    "shorter": lambda value: value[:-1],
    "longer": lambda value: torch.cat([value, value[:1]]),
    "empty": lambda value: value[:0],
    "flat": lambda value: value.flatten()[None],
    "one number": lambda value: value.flatten()[0].clone(),
    "another dtype": lambda value: value.to(torch.float64 if value.dtype != torch.float64 else torch.float32),
    "far too large": lambda value: (value.double() * 0 + 60_000).to(value.dtype),
    "below zero": lambda value: (value.double() * 0 - 9).to(value.dtype),
}
VALUES = ("far too large", "below zero")
# Numbers that another model could have; it is what they make of it, and gives answers.
POSSIBLE = {"lda.means", "lda.factors", "bedrock.rows", "bedrock.rotation", "bedrock.centres"}


def config(kind: str) -> ModelConfig:
    if kind == "lda":
        return ModelConfig.choose("lda", image_size=SIZE, images=24, backbone="resnet10", device="cpu", validation=0.25)
    settings = {"train.batch_size": 8, "width": 32, "code_bytes": 4 if kind == "codes" else 0}
    return tiny("bedrock", epochs=1, validation=0.25, settings=settings)


@pytest.fixture(scope="module", params=list(STATISTICS))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model that keeps statistics; not to be changed."""
    path = make(tmp_path_factory.mktemp("models") / request.param, NAMES[:3], config=config(request.param))
    return request.param, path


def change_weights(path: Path, change: Callable[[Tensors], object], file: str = WEIGHTS) -> None:
    """Change the tensors in a file of a model and compute all checksums again."""
    pointer = json.loads((path / "current").read_text())
    generation = path / "generations" / pointer["generation"]
    tensors = load((generation / file).read_bytes()) if (generation / file).exists() else {}
    change(tensors)
    content = save({name: value.contiguous() for name, value in tensors.items()})
    (generation / file).write_bytes(content)
    manifest = json.loads((generation / "model.json").read_text())
    manifest["files"][file] = [len(content), digest(content)]
    (generation / "model.json").write_text(json.dumps(manifest))
    pointer["digest"] = digest((generation / "model.json").read_bytes())
    (path / "current").write_text(json.dumps(pointer | {"checksum": pointer_checksum(pointer)}))


def changed(tensors: Tensors, name: str, how: str) -> None:
    value = CHANGES[how](tensors.pop(name))
    if value is not None:
        tensors[name] = value


def assert_one_sentence(error: EngramError) -> None:
    assert "damaged" in str(error)
    assert "\n" not in str(error)
    assert "Error" not in str(error)


@pytest.mark.parametrize("how", CHANGES)
def test_a_model_with_damaged_statistics_is_refused(how: str, whole: tuple[str, Path], tmp_path: Path) -> None:
    kind, original = whole
    for name in STATISTICS[kind]:
        path = Path(shutil.copytree(original, tmp_path / name))
        change_weights(path, lambda tensors, name=name: changed(tensors, f"buffers.{name}", how))
        if how in VALUES and (name in POSSIBLE or (name, how) == ("lda.counts", "far too large")):
            assert opened(path).probabilities(torch.zeros(2, SIZE, SIZE, 3, dtype=torch.uint8)).shape == (2, 3)
            continue
        with pytest.raises(EngramError) as refusal:
            opened(path)
        assert_one_sentence(refusal.value)


@pytest.mark.parametrize("how", ["missing", "shorter", "longer", "empty", "flat", "one number"])
def test_a_model_with_a_damaged_network_is_refused(how: str, whole: tuple[str, Path], tmp_path: Path) -> None:
    _, original = whole
    names = [name for name in load(next(original.rglob("weights.safetensors")).read_bytes()) if "head" in name]
    for name in [*names, "network.backbone.conv.weight", "network.mean"]:
        path = Path(shutil.copytree(original, tmp_path / name))
        if name not in load(next(path.rglob("weights.safetensors")).read_bytes()):
            continue
        change_weights(path, lambda tensors, name=name: changed(tensors, name, how))
        try:
            model = opened(path)
        except EngramError as error:
            assert_one_sentence(error)
        else:
            assert same(model, opened(original)), name


def test_a_tensor_that_the_method_does_not_keep_is_refused(whole: tuple[str, Path], tmp_path: Path) -> None:
    for name in ("buffers.x", "doubt.x.means"):
        path = Path(shutil.copytree(whole[1], tmp_path / name))
        change_weights(path, lambda tensors, name=name: tensors.update({name: torch.zeros(3)}))
        with pytest.raises(EngramError, match=r"does not keep|does not have"):
            opened(path)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LDA model with the checkpoint of its second lesson, inside the features; not to be changed."""
    path = make(tmp_path_factory.mktemp("models") / "lesson", NAMES[:3], config=config("lda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_pass, "BATCH", {"cpu": 4})
        learn(path, NAMES[3:5], stop=lambda: True)
    assert (path / "learning").exists()
    return path


@pytest.mark.parametrize("name", ["features", "features.done", "lda.counts", "lda.classes", "lda.factors"])
def test_a_lesson_with_a_damaged_checkpoint_is_not_continued(name: str, interrupted: Path, tmp_path: Path) -> None:
    whole = opened(make(tmp_path / "whole", NAMES[:3], NAMES[3:5], config=config("lda")))
    for how in CHANGES:
        path = Path(shutil.copytree(interrupted, tmp_path / how))
        file = path / "learning" / "state.safetensors"
        checkpoint = load_checkpoint(file)
        tensors = dict(checkpoint.tensors)
        changed(tensors, f"buffers.{name}", how)
        save_checkpoint(file, Checkpoint(tensors, checkpoint.data))
        try:
            events = learn(path, NAMES[3:5])
        except EngramError as error:
            assert_one_sentence(error)
            assert len(opened(path).labels) == 3
        else:
            # A tensor that is missing or has another dtype is taken from the model, or computed again.
            assert how in (*VALUES, "missing", "another dtype"), how
            assert isinstance(events[-1], Learned)
            assert how in VALUES or same(opened(path), whole), how


def test_another_width_of_features_is_found(interrupted: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(interrupted, tmp_path / "model"))
    file = path / "learning" / "state.safetensors"
    checkpoint = load_checkpoint(file)
    features = checkpoint.tensors["buffers.features"]
    tensors = checkpoint.tensors | {
        "buffers.features": features[:, :3],
        "buffers.features.done": torch.tensor([len(features)]),
    }
    save_checkpoint(file, Checkpoint(tensors, checkpoint.data))
    with pytest.raises(EngramError, match="its features are not those of the stage"):
        learn(path, NAMES[3:5])


@pytest.mark.parametrize("how", [*(how for how in CHANGES if how not in VALUES), "narrower", "not a number", "further"])
def test_damaged_features_of_held_out_images_are_refused(whole: tuple[str, Path], tmp_path: Path, how: str) -> None:
    def change(tensors: Tensors) -> None:
        if how == "narrower":
            tensors["features"] = tensors["features"][:, :-1]
        elif how == "not a number":
            tensors["features"][0, 0] = torch.nan
        elif how == "further":
            tensors["others"] = torch.zeros(1)
        else:
            changed(tensors, "features", how)

    path = Path(shutil.copytree(whole[1], tmp_path / "model"))
    change_weights(path, change, FEATURES_FILE)
    opened(path, images=False)  # predictions do not read it
    with pytest.raises(EngramError, match="other features than those of the held-out images") as caught:
        opened(path)
    assert_one_sentence(caught.value)


def test_features_in_a_model_whose_network_is_trained_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "model", NAMES[:2], config=tiny("icarl", epochs=1, validation=0.25))
    change_weights(path, lambda tensors: tensors.update(features=torch.zeros(4, 32)), FEATURES_FILE)
    with pytest.raises(EngramError, match="other features than those of the held-out images"):
        opened(path)
