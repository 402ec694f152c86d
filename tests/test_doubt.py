"""Doubt: strangers are told from known images at a stated error rate, in Python, on the command line and in ONNX."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from engram import IncrementalClassifier
from engram.cli.commands import evaluate
from engram.cli.main import main
from engram.contract.predictors import ImageOutputs
from engram.core.errors import EngramError
from engram.models.doubt import DoubtByMeans, DoubtByScores, area_under_curve, doubt_from_state
from engram.models.edit import remove_class, save_model
from engram.nn.network import Output
from model_helpers import learn, make, opened, pictures, png, tiny

KNOWN = ("apple", "boat", "camel")


def scores(per_class: int, classes: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of images of each class: a point of its own, with noise."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    noise = rng.normal(0, 1, (len(labels), classes))
    return torch.from_numpy(6 * np.eye(classes)[labels] + noise), torch.from_numpy(labels)


def test_the_stated_share_of_known_images_is_called_unknown() -> None:
    shares = []
    for seed in range(10):
        doubt = DoubtByScores.fit(*scores(6, seed=seed), {})
        assert doubt is not None
        fresh, _ = scores(100, seed=100 + seed)
        shares.append(float((doubt.familiarity_of(fresh) < doubt.threshold(0.05)).double().mean()))
    assert 0.02 < np.mean(shares) < 0.09


def test_strangers_are_less_familiar() -> None:
    doubt = DoubtByScores.fit(*scores(6), {})
    assert doubt is not None
    between = torch.from_numpy(np.random.default_rng(1).normal(0.75, 1, (500, 8)))
    known = doubt.familiarity_of(scores(50, seed=2)[0])
    assert area_under_curve(known.numpy(), doubt.familiarity_of(between).numpy()) > 0.95
    assert area_under_curve([1, 1], [1, 1]) == 0.5
    assert area_under_curve([2, 3], [0, 1]) == 1


def seen(embedding: torch.Tensor) -> ImageOutputs:
    """Outputs of a network whose head sees these features."""
    return ImageOutputs([Output((), embedding, embedding, embedding, torch.ones(()), embedding)])


def test_a_stranger_has_features_that_point_elsewhere() -> None:
    rng = np.random.default_rng(3)
    some, labels = scores(6)
    means = torch.from_numpy(rng.normal(0, 1, (8, 30)))
    features = means[labels] + torch.from_numpy(rng.normal(0, 0.3, (len(labels), 30)))
    assert DoubtByMeans.fit(some[:10], features[:10], means, means) is None
    doubt = DoubtByMeans.fit(some, features, means, means)
    assert doubt is not None
    known = doubt.familiarity_of(some, seen(3 * features))  # their length makes no difference
    assert torch.allclose(known.sort().values, doubt.familiarity)
    elsewhere = doubt.familiarity_of(some, seen(torch.from_numpy(rng.normal(0, 1, features.shape))))
    assert area_under_curve(known.numpy(), elsewhere.numpy()) > 0.9
    undecided = doubt.familiarity_of(torch.zeros_like(some), seen(features))
    assert area_under_curve(known.numpy(), undecided.numpy()) > 0.9
    again = doubt_from_state(doubt.state(), 8, 30)
    assert torch.equal(again.familiarity_of(some, seen(features)), doubt.familiarity_of(some, seen(features)))
    flat = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double()
    for changed, width in (({}, 31), ({"typical": flat}, 30), ({"centres": doubt.centres.float()}, 30)):
        with pytest.raises(EngramError, match="the model is damaged"):
            doubt_from_state({**doubt.state(), **changed}, 8, width)


def test_too_few_held_out_images_are_refused(tmp_path: Path) -> None:
    assert DoubtByScores.fit(*scores(2), {}) is None
    some, labels = scores(6)
    lacking = labels != 3
    assert DoubtByScores.fit(some[lacking], labels[lacking], {}) is None
    assert DoubtByScores.fit(some[lacking], labels[lacking], {3: some[~lacking]}) is not None
    doubt = DoubtByScores.fit(some, labels, {})
    assert doubt is not None
    with pytest.raises(EngramError, match="needs at least 100 held-out images, and this model has 48"):
        doubt.threshold(0.01)
    for rate in (0, 1, float("nan")):
        with pytest.raises(EngramError, match="above 0 and below 1"):
            doubt.threshold(rate)
    model = opened(make(tmp_path / "few", KNOWN))
    with pytest.raises(EngramError, match="at least 20 held-out images"):
        model.is_unknown(pictures(KNOWN)[0])


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("doubt") / "model"
    learn(place, KNOWN, count=48, config=tiny(epochs=6, validation=0.25))
    return place


def test_a_model_says_what_it_does_not_know(taught: Path) -> None:
    model = opened(taught)
    known, strangers = pictures(KNOWN, 40, seed=7)[0], pictures(("dingo", "falcon"), 40, seed=7)[0]
    assert model.is_unknown(known, 0.05).mean() < 0.2
    assert model.is_unknown(strangers, 0.05).mean() > model.is_unknown(known, 0.05).mean()
    again = opened(taught, images=False)
    assert (again.is_unknown(strangers) == model.is_unknown(strangers)).all()
    loaded = IncrementalClassifier.load(taught, device="cpu")
    assert (loaded.is_unknown(strangers) == model.is_unknown(strangers)).all()
    assert model.copy().doubts.keys() == model.doubts.keys() == {"cnn", "nme"}


def test_removing_a_class_measures_again(taught: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(taught, tmp_path / "copy"))
    remove_class(copy, "boat")
    assert opened(copy).doubts["cnn"].state()["means"].shape == (2, 2)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for place, names in (("known", KNOWN), ("strangers", ("dingo", "falcon"))):
        for number, (image, name) in enumerate(zip(*pictures(names, 8, seed=9), strict=True)):
            file = tmp_path / place / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    return tmp_path


def test_the_command_line(taught: Path, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, flags = str(taught), ["--device", "cpu", "--quiet"]
    assert main(["predict", model, "known", "strangers", "--unknown", "0.1", *flags]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert {row[1] for row in rows} == {"known", "unknown"}
    assert {len(row) for row in rows} == {4}
    assert main(["predict", model, "strangers", "--unknown", "0.1", "--json", *flags]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["unknown"] for line in lines] == [row[1] == "unknown" for row in rows[24:]]
    assert main(["evaluate", model, "known", "--strangers", "strangers", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)["strangers"]
    assert found["images"] == 16
    assert found["learned_from"] == 0
    assert 0.5 < found["auroc"] <= 1
    assert found["pass_at_95_kept"] < 100
    learned = pictures(KNOWN, 48)[0]  # of which a quarter is held out
    for number in range(4):
        Path(f"strangers/learned{number}.png").write_bytes(png(learned[number]))
    assert main(["evaluate", model, "known", "--strangers", "strangers", "--json", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    count = json.loads(said.out)["strangers"]["learned_from"]
    assert 0 < count <= 4
    assert f"was trained on {count} of the 20 images in strangers, so these are no strangers" in said.err
    for number in range(4):
        Path(f"strangers/learned{number}.png").unlink()
    assert main(["evaluate", model, "known", "--strangers", "strangers", "--report", "page.html", *flags]) == 0
    assert "16 strangers: AUROC" in capsys.readouterr().out
    assert "Strangers: 16 images" in Path("page.html").read_text()
    assert main(["predict", model, "known", "--unknown", "2", *flags]) == 2
    assert "--unknown must be a share above 0 and below 1" in capsys.readouterr().err
    assert main(["evaluate", model, "known", "--strangers", "nowhere", *flags]) == 2


def test_the_exported_network_has_the_same_doubt(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    from engram.models.onnx_export import export_onnx
    from engram.models.onnx_model import ExportedModel

    model = opened(taught, precision="float32")
    export_onnx(model, tmp_path / "m.onnx")
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    images = pictures(("apple", "dingo"), 20, seed=3)[0]
    (found,) = session.run(["familiarity"], {"images": images})
    ours = model.doubt_of().familiarity_of(*model.score_reader()(images)).numpy()
    np.testing.assert_allclose(found, ours, atol=0.05)  # float32 logits: large only for images very close to a class
    thresholds = json.loads(session.get_modelmeta().custom_metadata_map["unknown_below"])
    assert set(thresholds) == {"0.05", "0.1", "0.2"}
    assert thresholds["0.05"] == pytest.approx(model.doubt_of().threshold(0.05))
    files = [tmp_path / f"{number}.png" for number in range(len(images))]
    for file, image in zip(files, images, strict=True):
        file.write_bytes(png(image))
    exported = ExportedModel(tmp_path / "m.onnx")
    parts = list(exported.predict_files(map(str, files), doubt=True))
    measured = np.concatenate([part.familiarity for part in parts if part.familiarity is not None])
    np.testing.assert_allclose(measured, found, atol=1e-3)
    assert exported.threshold(0.1) == thresholds["0.1"]
    with pytest.raises(EngramError, match=r"0\.07: an exported model has limits for 0\.05, 0\.1, 0\.2 only"):
        exported.threshold(0.07)
    answers: list[list[bool]] = []
    for of in (taught, tmp_path / "m.onnx"):
        assert main(["predict", str(of), *map(str, files), "--unknown", "0.1", "--json", "--device", "cpu"]) == 0
        answers.append([json.loads(line)["unknown"] for line in capsys.readouterr().out.splitlines()])
    assert answers[0] == answers[1]
    assert set(answers[0]) == {True, False}
    no_number = [np.full((1, 3), 1 / 3, np.float32), np.full(1, np.nan, np.float32)]
    exported._session = SimpleNamespace(run=lambda *_: no_number)
    with pytest.raises(EngramError, match="scores are not finite"):
        next(exported.predict_files([str(files[0])], doubt=True))


def test_strangers_are_refused_before_anything_is_evaluated(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*_: object) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr(evaluate, "_evaluate", too_early)
    few = make(folders / "few", KNOWN, config=tiny(validation=0.25))
    assert main(["evaluate", str(few), "known", "--strangers", "strangers", "--device", "cpu"]) == 2
    assert "cannot tell unknown images" in capsys.readouterr().err
    model = opened(few)
    model.doubts = {
        by: DoubtByScores(torch.eye(3).double(), torch.eye(3).double(), torch.zeros(9).double()) for by in ("cnn",)
    }
    save_model(model, folders / "nine")
    assert main(["evaluate", str(folders / "nine"), "known", "--strangers", "strangers", "--device", "cpu"]) == 2
    assert "needs at least 20 held-out images, and this model has 9" in capsys.readouterr().err
