"""Export to ONNX: the file answers as the model does, and is refused where it would not."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram import EngramError, open_model
from engram.cli.main import main
from engram.models import onnx_export as export
from engram.models import onnx_graph as onnxgraph
from engram.models.onnx_export import export_onnx
from model_helpers import NAMES, make, memory_of, pictures, png, tiny

onnx: Any = pytest.importorskip("onnx", reason="engram[onnx] is not installed")
onnxruntime: Any = pytest.importorskip("onnxruntime", reason="engram[onnx] is not installed")

# A head of local similarities, one whose scores are corrected, and a backbone more at every stage. test_from_run.py
# exports a network of every structure and compares the probabilities, so the last two are slow tests.
HEADS = ("afc", pytest.param("bic", marks=pytest.mark.slow), pytest.param("der", marks=pytest.mark.slow))


def taught(path: Path, method: str = "afc") -> Path:
    memory = memory_of(method)
    return make(path, NAMES[:3], NAMES[3:5], config=tiny(method, validation=0.25, memory=memory))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("models") / "afc")


@pytest.fixture(scope="module")
def program(model: Path) -> Any:
    """torch's export of the model's network."""

    class MadeError(Exception):
        pass

    def stop(program: Any, *_: object) -> None:
        raise MadeError(program)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "convert", stop)
        with pytest.raises(MadeError) as made:
            export_onnx(open_model(model, "cpu", "float32")[0], model.parent / "none.onnx")
    return made.value.args[0]


@pytest.fixture
def exported_once(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch exports the network of the same model once; most of the time of an export is this."""
    done = SimpleNamespace(run_decompositions=lambda: program)
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: done)


@pytest.mark.parametrize("by", ["cnn", pytest.param("nme", marks=pytest.mark.slow)])
def test_the_temperature_goes_with_the_file(model: Path, by: str, tmp_path: Path) -> None:
    ours = open_model(model, "cpu", "float32")[0]
    images, _ = pictures(NAMES, 3, seed=5)
    plain = ours.probabilities(images, by)
    ours.temperatures = {by: 3.0}
    export_onnx(ours, tmp_path / "warm.onnx", by)
    session = onnxruntime.InferenceSession(tmp_path / "warm.onnx")
    theirs = session.run(["probabilities"], {"images": images})[0]
    assert np.allclose(theirs, ours.probabilities(images, by), atol=1e-5)
    assert np.abs(theirs - plain).max() > 0.01


@pytest.mark.parametrize("method", HEADS)
def test_onnxruntime_answers_as_the_model_does(method: str, tmp_path: Path) -> None:
    ours = open_model(taught(tmp_path / "model", method), "cpu", "float32")[0]
    images, _ = pictures(NAMES, 3, seed=5)
    for by in ours.predictors:
        exported = export_onnx(ours, tmp_path / "model.onnx", by)
        assert exported.difference <= 1e-4
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        for part in (images, images[:1]):  # the number of images is open
            probabilities, logits, embedding = session.run(None, {"images": part})
            assert np.abs(probabilities - ours.probabilities(part, by)).max() < 1e-4
            assert probabilities.shape == logits.shape == (len(part), 5)
            assert ours.learner is not None
            assert embedding.shape == (len(part), ours.learner.network.backbone.dim)
            spread = np.exp(logits - logits.max(axis=1, keepdims=True))
            assert np.allclose(spread / spread.sum(axis=1, keepdims=True), probabilities, atol=1e-5)


def test_the_file_says_what_it_is(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.onnx"
    assert main(["export", str(model), str(out)]) == 0
    said = capsys.readouterr().out
    assert "images uint8 (N, 8, 8, 3) to probabilities (N, 5) by cnn" in said
    assert "checked in onnxruntime" in said
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    meta = session.get_modelmeta()
    assert json.loads(meta.custom_metadata_map["classes"]) == list(NAMES[:5])
    assert json.loads(meta.custom_metadata_map["image_size"]) == [8, 8]
    assert (meta.custom_metadata_map["method"], meta.custom_metadata_map["predictor"]) == ("afc", "cnn")
    assert [(value.name, value.type) for value in session.get_inputs()] == [("images", "tensor(uint8)")]
    # What is there is not written over unasked.
    before = out.read_bytes()
    assert main(["export", str(model), str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main(["export", str(model), str(out), "--overwrite", "--by", "nme", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by"] == "nme"


def lines(model: Path, images: Path, *flags: str) -> list[dict[str, Any]]:
    """The output of `engram predict --json`."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["predict", str(model), str(images), "--json", *flags]) == 0
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_predict_takes_an_exported_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, inbox = tmp_path / "model.onnx", tmp_path / "inbox"
    assert main(["export", str(model), str(out)]) == 0
    inbox.mkdir()
    for number, image in enumerate(pictures(NAMES[:5], 3, seed=5)[0]):
        (inbox / f"{number:02}.png").write_bytes(png(image))
    ours, theirs = lines(model, inbox, "--top", "3"), lines(out, inbox, "--top", "3", "--batch", "2")
    assert len(ours) == 15
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine["path"], mine["class"]) == (other["path"], other["class"])
        assert [best["probability"] for best in other["top"]] == pytest.approx(
            [best["probability"] for best in mine["top"]], abs=1e-4
        )
    capsys.readouterr()
    (tmp_path / "damaged.onnx").write_bytes(out.read_bytes()[:1000])
    other = onnx.load(out)
    del other.metadata_props[:]
    onnx.save(other, tmp_path / "foreign.onnx")
    for name, flags, sentence in (
        ("model", ["--by", "nme"], "was exported to predict by cnn"),
        ("model", ["--bf16"], "leave out --bf16"),
        ("model", ["--unknown", "0.1"], "cannot tell unknown images"),
        ("damaged", [], "onnxruntime cannot read"),
        ("foreign", [], "is not a file that 'engram export' wrote"),
    ):
        assert main(["predict", str(tmp_path / f"{name}.onnx"), str(inbox), *flags]) == 2
        said = capsys.readouterr()
        assert sentence in said.err, name
        assert (said.out, said.err.count("\n")) == ("", 1)


def test_a_norm_may_be_written_in_powers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from torch 2.15 on."""
    program, table = torch.export.ExportedProgram, torch.export.default_decompositions()
    powers: list[int] = []

    def norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        powers.append(1)
        return x.pow(order).sum(dim, keepdim).pow(1 / order)

    table[torch.ops.aten.linalg_vector_norm.default] = norm
    run = program.run_decompositions
    monkeypatch.setattr(program, "run_decompositions", lambda self: run(self, table))
    out = export_onnx(open_model(model, "cpu", "float32")[0], tmp_path / "model.onnx")
    assert powers, "or nothing was tested"
    assert (tmp_path / "model.onnx").exists(), out


@pytest.mark.usefixtures("exported_once")
def test_a_network_that_answers_otherwise_is_not_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(onnxgraph._OPERATIONS, "relu", onnxgraph._plain("Abs"))
    with pytest.raises(EngramError, match=r"differ from the model's .* nothing was written"):
        export_onnx(open_model(model, "cpu", "float32")[0], tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("exported_once")
def test_an_operation_that_is_not_known_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(onnxgraph._OPERATIONS, "relu")
    with pytest.raises(EngramError, match=r"relu.* cannot be exported"):
        export_onnx(open_model(model, "cpu", "float32")[0], tmp_path / "model.onnx")


def test_without_onnx_it_says_what_to_install(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    assert main(["export", str(model), str(tmp_path / "model.onnx")]) == 2
    assert (
        capsys.readouterr().err
        == "engram: onnx and onnxruntime must be installed for this: pip install onnx onnxruntime\n"
    )


@pytest.mark.usefixtures("exported_once")
def test_a_damaged_picture_does_not_stop_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Path(shutil.copytree(model, tmp_path / "model"))
    picture = place / "generations" / "000002" / "heldout" / "00000" / "00001.png"
    picture.write_bytes(picture.read_bytes()[:-1])
    assert main(["export", str(place), str(tmp_path / "out.onnx")]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("engram: compared on noise only: ")
    assert "00001.png is damaged" in said.err
    assert "on 32 images" in said.out
    (place / "generations" / "000002" / "weights.safetensors").write_bytes(b"")
    assert main(["export", str(place), str(tmp_path / "other.onnx")]) == 2
    assert not (tmp_path / "other.onnx").exists()
