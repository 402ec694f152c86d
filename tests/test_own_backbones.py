"""Backbones from outside the package: they train, resume and export, and mistakes in them are named before training."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram import Backbone, register_backbone
from engram.contract import Step
from engram.core.errors import EngramError
from engram.core.events import Learned, StageFinished
from engram.experiment.networks import make_network
from engram.experiment.runner import run
from engram.experiment.session import Session
from engram.methods import METHODS, find_method
from engram.models.store.codec import open_model
from engram.nn.backbones import BACKBONES, build_backbone
from engram.nn.trial import check_backbone
from engram.nn.vision_transformer import VisionTransformer
from engram.nn.wide_resnet import WideResNet
from helpers import (
    Engram,
    assert_resumes_to,
    learn_stage,
    run_stopped,
    run_whole,
    starts,
    tiny_config,
    tiny_session,
    toy_store,
)
from model_helpers import NAMES, learn, make, pictures, tiny
from test_methods_contract import SETTINGS

ROOT = Path(__file__).parents[1]
OWN = '''
import torch
from torch import nn
from engram import register_backbone
from engram.nn.vision_transformer import VisionTransformer
from engram.nn.wide_resnet import WideResNet


@register_backbone("own-vit")
def own_vit(generator):
    """A tiny transformer.

    This line is not shown in lists.
    """
    return VisionTransformer(3, 16, 2, 4, generator)


@register_backbone("own-wrn")
def own_wrn(generator):
    return WideResNet(10, 1, generator)


class Bare(nn.Module):
    """Not a Backbone, and without maps."""

    dim = 8

    def __init__(self, generator):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4)
        self.norm = nn.BatchNorm2d(8)
        for parameter in self.conv.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(self, x):
        return (), torch.tanh(self.norm(self.conv(x))).mean(dim=(2, 3))


@register_backbone("own-bare")
def own_bare(generator):
    return Bare(generator)
'''


def bring_in(file: Path) -> ModuleType:
    """Import a file, as ENGRAM_METHODS does."""
    spec = importlib.util.spec_from_file_location(str(file), file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[str(file)] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget(file: Path, before: list[str]) -> None:
    """Leave no trace of a file."""
    sys.modules.pop(str(file), None)
    for name in set(BACKBONES.names()) - set(before):
        BACKBONES.remove(name)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A file with three backbones, which is imported."""
    file, before = tmp_path / "mine" / "own.py", BACKBONES.names()
    file.parent.mkdir()
    file.write_text(OWN)
    bring_in(file)
    yield file
    forget(file, before)


Add = Callable[[Any], str]


@pytest.fixture
def add() -> Iterator[Add]:
    """Registers a function as the backbone "mine" until the test ends."""
    yield lambda make: (register_backbone("mine")(make), "mine")[1]
    if "mine" in BACKBONES:
        BACKBONES.remove("mine")


# What works


@pytest.mark.parametrize("method", ["afc", "ucir", "replay"])
@pytest.mark.parametrize("backbone", ["own-vit", "own-wrn"])
def test_a_run_resumes_exactly_from_the_second_stage(own: Path, backbone: str, method: str, tmp_path: Path) -> None:
    config, store = tiny_config(method, backbone=backbone), toy_store(num_classes=4)
    whole = run_whole(config, store, tmp_path / "whole")
    run_stopped(config, store, tmp_path / "stopped", 2, starts(1))
    assert_resumes_to(whole, tmp_path / "stopped", store)
    key = next(name for name in whole if name.startswith("network.backbone.") and whole[name].ndim > 1)
    fresh = build_backbone(backbone, torch.Generator()).state_dict()
    assert not torch.equal(whole[key], fresh[key.removeprefix("network.backbone.")])


@pytest.mark.parametrize("backbone", ["own-vit", "own-bare"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains_or_refuses_before_training(own: Path, method: str, backbone: str) -> None:
    config = tiny_config(method, backbone=backbone, epochs=1).with_settings(**SETTINGS.get(method, {}))
    config = config if method != "gdumb" else config.with_settings(rehearse__epochs=1)
    kind = find_method(method).kind
    said = None
    if backbone == "own-bare" and kind.needs_maps:
        said = f"{method} distils feature maps, but the backbone own-bare has none; choose another backbone, or"
    elif method in ("der", "foster", "memo") or (method == "mnemonics" and backbone == "own-vit"):
        said = f"{method} .* the backbone {backbone}.* choose "
    if said is not None:
        with pytest.raises(EngramError, match=f"^{said}"):
            tiny_session(config)
        return
    session = tiny_session(config, toy_store(num_classes=4))
    for index in range(2):
        learn_stage(session, index)
    assert all(bool(value.isfinite().all()) for value in session.learner.network.parameters())


def test_mnemonics_trains_a_transformer_without_its_factors(own: Path) -> None:
    config = tiny_config("mnemonics", backbone="own-vit")
    with pytest.raises(EngramError, match=r"own-vit has weights of other layers, such as thirds.* set factors=False"):
        tiny_session(config)
    session = tiny_session(config.with_settings(factors=False, variant="paper"), toy_store(num_classes=4))
    for index in range(2):
        learn_stage(session, index)
    assert len(session.learner.memory) == 12


class Mixed(Backbone):
    """A grouped convolution with a bias, a norm over tokens and linear layers, once with and once without tokens."""

    dim = 6

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 9, 3, padding=1, stride=2, groups=3)
        self.norm = nn.LayerNorm(9)
        self.tokens = nn.Linear(9, 5)
        self.last = nn.Linear(5, 6, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        tokens = self.tokens(self.norm(self.conv(x).flatten(2).transpose(1, 2)))
        return (), self.last(torch.tanh(tokens).mean(dim=1))


def squared_length(step: Step, _: Tensor) -> Tensor:
    return step.student.scores.masked_fill(~step.student.scores.isfinite(), 0).square().sum(dim=1)


@pytest.mark.parametrize("power", [1, 2])
def test_sensitivity_of_other_layers_is_that_of_single_images(add: Add, power: Any) -> None:
    session = tiny_session(tiny_config("mas", backbone=add(Mixed), epochs=1))
    stage = learn_stage(session, 0)
    learner, rows = session.learner, stage.all_rows[:6]
    ours = session.engine.sensitivity(learner, stage, rows, squared_length, power)
    network = learner.network.double()
    totals = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    for row in rows:
        image = (stage.pool.pixels[row].double() / 255).permute(2, 0, 1)[None]
        _, embedding = network.backbone((image - network.mean) / network.std)
        value = network.head(embedding)[0, : stage.num_seen].square().sum()
        gradients = torch.autograd.grad(value, list(network.parameters()))
        for name, gradient in zip(totals, gradients, strict=True):
            totals[name] += gradient.abs() ** power / len(rows)
    assert ours.keys() == totals.keys()
    for name, wanted in totals.items():
        scale = float(wanted.max())
        assert scale > 0, name
        torch.testing.assert_close(ours[name].double(), wanted, rtol=1e-3, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("backbone", ["own-vit", "own-wrn", "own-bare"])
def test_a_model_with_it_learns_and_exports(own: Path, backbone: str, tmp_path: Path) -> None:
    onnxruntime: Any = pytest.importorskip("onnxruntime", reason="engram[onnx] is not installed")
    pytest.importorskip("onnx")
    from engram.models.onnx_export import export_onnx

    config = tiny("replay" if backbone == "own-bare" else "wa", validation=0.25, backbone=backbone)
    path = make(tmp_path / "model", NAMES[:3], NAMES[3:5], config=config)
    model, _ = open_model(path, "cpu", "float32")
    images, _ = pictures(NAMES, 2, seed=5)
    exported = export_onnx(model, tmp_path / "model.onnx", "cnn")
    assert exported.difference <= 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for part in (images, images[:1]):
        probabilities, _, embedding = session.run(None, {"images": part})
        assert np.abs(probabilities - model.probabilities(part, "cnn")).max() < 1e-4
        assert embedding.shape == (len(part), build_backbone(backbone, torch.Generator()).dim)


def test_a_transformer_knows_where_its_patches_are() -> None:
    backbone = VisionTransformer(3, 16, 2, 4, torch.Generator().manual_seed(1))
    images = torch.randn(1, 3, 8, 12, generator=torch.Generator().manual_seed(2))
    moved = images.roll(4, dims=3)
    with torch.no_grad():
        (maps, embedding), (_, other) = backbone(images), backbone(moved)
        assert [tuple(each.shape) for each in maps] == 3 * [(1, 16, 2, 3)]
        assert not torch.allclose(embedding, other, atol=1e-4), "the same patches at other places"
        larger = backbone(F.pad(images, (0, 1, 0, 3)))[0][0]
    assert larger.shape == (1, 16, 3, 4), "a part of a patch is a patch"


@pytest.mark.parametrize(("depth", "width"), [(8, 2), (16, 0), (4, 1)])
def test_a_wide_resnet_has_layers_of_its_kind_only(depth: int, width: int) -> None:
    with pytest.raises(EngramError, match=f"10, 16, 22, 28, .* got {depth} and {width}"):
        WideResNet(depth, width, torch.Generator())


@pytest.mark.parametrize("shape", [(4, 16, 2, 4), (3, 18, 2, 4), (3, 16, 3, 4), (3, 16, 2, 0)])
def test_a_transformer_of_an_impossible_shape_is_refused(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(EngramError, match=f"a multiple of 3 blocks, .* got depth={shape[0]}, width={shape[1]}"):
        VisionTransformer(*shape, torch.Generator())


# Mistakes


def bad(**changes: Any) -> Callable[[torch.Generator], nn.Module]:
    """A small backbone with a mistake: attributes, or another forward."""

    def make(generator: torch.Generator) -> nn.Module:
        class Wrong(Mixed):
            widths = changes.get("widths", ())
            pools_last_map = changes.get("pools_last_map", False)
            ends_in_relu = changes.get("ends_in_relu", False)

            def forward(self, x: Tensor) -> Any:
                maps, embedding = super().forward(x)
                return changes["forward"](self, x, embedding) if "forward" in changes else (maps, embedding)

        wrong = Wrong(generator)
        changes.get("change", lambda _: None)(wrong)
        return wrong

    return make


def unseeded(backbone: Mixed) -> None:
    nn.init.normal_(backbone.conv.weight)


def with_unused(backbone: Mixed) -> None:
    backbone.unused = nn.Parameter(torch.ones(1))


def counting(backbone: Mixed, x: Tensor, embedding: Tensor) -> Any:
    backbone.norm.weight.data.mul_(1.001)
    return (), embedding


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "embedding only": ({"forward": lambda b, x, e: e}, r"must return \(maps, embedding\).* a tensor of the shape \(2,"),
    "a list of maps": ({"forward": lambda b, x, e: ([], e)}, r"maps is a tuple of tensors, .* a tuple of Tensor, list"),
    "map without pixels": ({"forward": lambda b, x, e: ((e,), e)}, r"map 0 of the shape \(B, C, H, W\)"),
    "one embedding": ({"forward": lambda b, x, e: ((), e[:1])}, r"of the shape \(B, dim\), but it is a tensor"),
    "other dim": ({"forward": lambda b, x, e: ((), e[:, :4])}, r"has dim=6, but its embedding has 4 values"),
    "not finite": ({"forward": lambda b, x, e: ((), e / 0)}, r"not float32 or not finite"),
    "no widths": ({"forward": lambda b, x, e: ((x,), e)}, r"maps with 3 channels, but its widths are \(\); set widths"),
    "map aside": (
        {"widths": (3,), "forward": lambda b, x, e: ((x.clone().requires_grad_(),), e)},
        r"map 0, from which",
    ),
    "dropout": ({"forward": lambda b, x, e: ((), F.dropout(e, 0.5, b.training))}, r"such as those of dropout"),
    "unseeded": ({"change": unseeded}, r"other initial values in conv.weight .* from the generator"),
    "unused": ({"change": with_unused}, r"the parameter unused, which has no effect"),
    "frozen": ({"change": lambda b: b.norm.requires_grad_(False)}, r"parameter norm.weight, which is not trained"),
    "half": ({"change": lambda b: b.half()}, r"float32 parameters on the CPU, but conv.weight is torch.float16"),
    "pools": ({"pools_last_map": True}, r"has pools_last_map=True, but its embedding is not the mean"),
    "relu": ({"ends_in_relu": True}, r"has ends_in_relu=True, which needs pools_last_map=True"),
    "changes": ({"forward": counting}, r"another output for the same images in train mode|changes norm.weight in eval"),
    "fails": ({"forward": lambda b, x, e: x @ e}, r"it failed on two images of 12x8 pixels \(RuntimeError: .*DEBUG=1"),
    "no dim": ({"change": lambda b: setattr(b, "dim", None)}, r"must have the attribute dim, .* got None"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_backbone_is_named(add: Add, mistake: str) -> None:
    changes, said = MISTAKES[mistake]
    name = add(bad(**changes))
    with pytest.raises(EngramError, match=rf"(?s)^the backbone mine .*(?:{said})"):
        check_backbone(name, (8, 12))


def test_a_mistake_is_named_before_a_run_or_a_lesson(add: Add, tmp_path: Path) -> None:
    name = add(bad(forward=lambda b, x, e: ((), e[:, :4])))
    with pytest.raises(EngramError, match="has dim=6, but its embedding has 4 values per image"):
        next(run(tiny_config("replay", backbone=name), toy_store(), tmp_path / "run"))
    with pytest.raises(EngramError, match="has dim=6, but its embedding has 4 values per image"):
        learn(tmp_path / "model", NAMES[:2], config=tiny("replay", backbone=name))
    assert list(tmp_path.iterdir()) == []


def test_layers_without_gradients_of_single_images_are_refused_before_training(add: Add) -> None:
    def twice(backbone: Mixed, x: Tensor, embedding: Tensor) -> Any:
        return (), backbone.last(embedding[:, :5])

    def own_weights(generator: torch.Generator) -> Backbone:
        backbone = Mixed(generator)
        backbone.last = nn.Bilinear(5, 5, 6)  # pyright: ignore[reportAttributeAccessIssue]
        return backbone

    name = add(bad(forward=twice))
    tiny_session(tiny_config("si", backbone=name))
    with pytest.raises(EngramError, match=r"calls each layer once, but it calls backbone.last 2 times; choose another"):
        tiny_session(tiny_config("ewc", backbone=name))
    BACKBONES.remove("mine")
    config = tiny_config("ewc", backbone=add(own_weights))
    method = find_method("ewc").make(config.settings)
    from engram.engine.sensitivity import check_layers

    with pytest.raises(EngramError, match=r"but not for Bilinear; a method that uses sensitivity needs"):
        check_layers(make_network(config, method, 2, (0.0,) * 3, (1.0,) * 3), (8, 8))


def test_a_name_is_refused_that_is_taken_or_impossible(own: Path) -> None:
    for name, said in (
        ("own-vit", r"a backbone named 'own-vit' is registered already \(own_vit\); choose another name"),
        ("resnet32", r"a backbone named 'resnet32' is registered already"),
        ("My_Net", r"a backbone cannot be called 'My_Net': .* such as 'my-backbone2'"),
        ("", r"a backbone cannot be called ''"),
    ):
        with pytest.raises(EngramError, match=said):
            register_backbone(name)(Mixed)
    with pytest.raises(EngramError, match=r"register_backbone takes a function of a torch.Generator"):
        register_backbone("other")("resnet32")  # pyright: ignore[reportArgumentType]
    with pytest.raises(EngramError, match=r"register_backbone takes a function of a torch.Generator"):
        register_backbone("other")(lambda: Mixed(torch.Generator()))  # pyright: ignore
    with pytest.raises(
        EngramError, match=r'register_backbone takes a name, .* write @register_backbone\("my-backbone"\)'
    ):
        register_backbone(Mixed)  # pyright: ignore[reportArgumentType]
    with pytest.raises(EngramError, match=r"no backbone 'own-vti': did you mean 'own-vit'\?"):
        tiny_config(backbone="own-vti")


def test_a_function_that_makes_no_module_is_refused(add: Add) -> None:
    with pytest.raises(EngramError, match=r"the backbone mine must be a torch module, but its function returns None"):
        tiny_session(tiny_config("replay", backbone=add(lambda _: None)))


# Its code


def test_its_code_is_part_of_the_base_stages_key(own: Path, add: Add) -> None:
    def key(backbone: str) -> str | None:
        return Session(tiny_config("replay", backbone=backbone), store).base_key("images")

    store, before = toy_store(), BACKBONES.names()
    first, ours = key("own-wrn"), key("resnet10")
    assert first is not None
    assert key("own-wrn") == first
    forget(own, [name for name in before if not name.startswith("own-")])
    own.write_text(OWN + "\n# edited\n")
    bring_in(own)
    assert key("own-wrn") not in (first, None)
    assert key("resnet10") == ours
    namespace: dict[str, Any] = {"WideResNet": WideResNet}
    exec("def typed(generator):\n    return WideResNet(10, 1, generator)\n", namespace)  # as in an interactive session
    assert key(add(namespace["typed"])) is None, "its code cannot be read"


def test_a_command_uses_it_and_records_its_code(
    engram: Engram, own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget(own, [name for name in BACKBONES.names() if not name.startswith("own-")])
    monkeypatch.setenv("ENGRAM_METHODS", str(own))
    listed = engram("list", "backbones").out
    assert "own-vit" in listed
    assert "A tiny transformer." in listed
    assert "not shown" not in listed
    short = ("--epochs", "1", "--finetune-epochs", "1", "--quiet", "--out", "run")
    refused = engram("run", "afc-mini-b10-s5", "--backbone", "own-bare", *short)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "afc distils feature maps, but the backbone own-bare has none" in refused.err
    assert not Path("run").exists()
    stopped = engram("run", "replay-mini-b10-s5", "--backbone", "own-bare", *short, "--stop-after-stage", "0")
    assert (stopped.status, stopped.err) == (0, "")
    manifest = json.loads(Path("run/run.json").read_text())
    code = manifest["versions"]["backbone_code"]
    assert manifest["versions"]["backbone_file"] == "own.py"
    assert manifest["command"].startswith(f"ENGRAM_METHODS={own} engram run replay-mini-b10-s5 ")
    forget(own, [name for name in BACKBONES.names() if not name.startswith("own-")])
    own.write_text(OWN + "\n# edited\n")
    resumed = engram("resume", "run", "--stop-after-stage", "1", "--json").out
    assert "the code of the backbone own-bare in own.py was changed since run was trained" in resumed
    codes = json.loads(Path("run/run.json").read_text())["versions"]["backbone_code"].split(", ")
    assert (len(codes), codes[0]) == (2, code)
    monkeypatch.delenv("ENGRAM_METHODS")
    forget(own, [name for name in BACKBONES.names() if not name.startswith("own-")])
    unknown = engram("resume", "run")
    assert (unknown.status, unknown.err.count("\n")) == (2, 1)
    assert "no backbone 'own-bare'" in unknown.err


# The example in CONTRIBUTING


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Path]:
    """The file of the example."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    (text,) = [block for block in blocks if "@register_backbone" in block]
    file, before = tmp_path / "mine" / "three_layers.py", BACKBONES.names()
    file.parent.mkdir()
    file.write_text(text)
    yield file
    forget(file, before)


def test_the_example_learns_as_it_says(engram: Engram, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_METHODS", str(example))
    assert "Three convolutions with a stride of 2; embedding 64." in engram("list", "backbones").out
    short = ("--epochs", "1", "--finetune-epochs", "1", "--quiet", "--stop-after-stage", "1")
    done = engram("run", "afc-mini-b10-s5", "--backbone", "three-layers", *short, "--out", "run")
    assert (done.status, done.err) == (0, "")
    assert len(json.loads(Path("run/result.json").read_text())["stages"]) == 2
    for size in ((8, 8), (33, 20)):
        check_backbone("three-layers", size)
    events = learn(Path("model"), NAMES[:2], config=tiny("afc", backbone="three-layers"))
    assert isinstance(events[-1], Learned)
    whole = list(run(tiny_config("lwm", backbone="three-layers"), toy_store(num_classes=4)))
    assert sum(isinstance(event, StageFinished) for event in whole) == 2
