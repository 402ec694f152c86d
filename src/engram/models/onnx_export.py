"""Export a model as an ONNX file with its normalisation and class names, and compare it with the model."""

from __future__ import annotations

import importlib
import io
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.core.errors import EngramError, option
from engram.core.io import write_bytes
from engram.core.provenance import version
from engram.core.serialize import to_plain
from engram.data.store import Images
from engram.models.doubt import DIRECTION, Doubt, DoubtByMeans, DoubtByScores
from engram.models.labels import encode_label
from engram.models.model import NME_SHARPNESS, Model
from engram.models.onnx_graph import IR_VERSION, OPSET, Graph, convert
from engram.nn.network import averaged

TOLERANCE = 1e-4
CHECKED = 64  # images to compare at most, half of them held-out images if there are any
EXPORTED = ("cnn", "nme")  # predictors
INPUT, OUTPUTS = "images", ("probabilities", "logits", "embedding")
FAMILIARITY = "familiarity"  # a fourth output, if the model can tell unknown images
UNKNOWN_RATES = (0.01, 0.02, 0.05, 0.1, 0.2)  # whose thresholds are in the file


@dataclass(frozen=True)
class Exported:
    """An exported file. images, difference: number of images compared, largest difference of probabilities."""

    path: str
    by: str
    classes: int
    bytes: int
    images: int
    difference: float
    onnxruntime: str


class _ExportedNetwork(nn.Module):
    """Network from uint8 images (N, H, W, 3) to probabilities (N, K), their logits, the embedding and the features."""

    def __init__(self, model: Model, by: str) -> None:
        super().__init__()
        learner = model.learner
        assert learner is not None
        self.network = learner.network
        self.classes = len(model.classes)
        self.by = by
        self.temperature = model.temperatures.get(by, 1.0)
        self.register_buffer("means", learner.class_means if by == "nme" else None)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        output = averaged(self.network, self.network, images.permute(0, 3, 1, 2).float() / 255)
        logits = output.logits[:, : self.classes]
        if self.by == "nme":
            assert isinstance(self.means, Tensor)
            logits = NME_SHARPNESS * (F.normalize(output.embedding, dim=1) @ self.means.T)
        logits = logits / self.temperature
        features = output.embedding if output.features is None else output.features
        return logits.softmax(dim=1), logits, output.embedding, features


def require_onnx(*packages: str) -> None:
    """Refuse if a package is not installed; without names, one of those that an export needs."""
    needed = packages or ("onnx", "onnxruntime")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise EngramError(f"{' and '.join(missing)} must be installed for this: pip install {' '.join(needed)}")


def export_onnx(model: Model, path: str | Path, by: str | None = None) -> Exported:
    """Write the model's network to that path; refuse if onnxruntime gives other probabilities than the model.

    The model must be on a CPU in float32.

    by: "cnn" or "nme"; None is the method's default.
    """
    require_onnx()
    by = model.predictor(by)
    if by not in EXPORTED:
        able = [name for name in EXPORTED if name in model.predictors]
        advice = f"choose {option('by', able[0])}" if able else "its method has none of them"
        raise EngramError(f"only the predictors {' and '.join(EXPORTED)} can be exported, not {by!r}; {advice}")
    content = _to_onnx(model, by)
    images = _images_to_check(model)
    difference = _difference(model, content, images, by)
    if not difference <= TOLERANCE:
        raise EngramError(
            f"the exported network's probabilities differ from the model's by {difference:.1e}, more than {TOLERANCE:g}"
            "; nothing was written"
        )
    write_bytes(Path(path), content)
    runtime: Any = importlib.import_module("onnxruntime")
    return Exported(str(path), by, len(model.classes), len(content), len(images), difference, runtime.__version__)


def _to_onnx(model: Model, by: str) -> bytes:
    from onnx import TensorProto, checker, helper

    learner = model.learner
    if learner is None or not model.classes:
        raise EngramError("there is nothing to export: the model knows no class")
    assert (model.engine.device.type, model.engine.precision) == ("cpu", "float32"), (
        "only exact results can be compared"
    )
    network = _ExportedNetwork(model, by)
    network.eval()
    height, width = model.config.image_size
    sample = torch.zeros(3, height, width, 3, dtype=torch.uint8)
    # torch prints internal warnings and progress here.
    with torch.no_grad(), warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        open_number = {"images": {0: torch.export.Dim.DYNAMIC}}
        program = torch.export.export(network, (sample,), dynamic_shapes=open_number, strict=False)
        program = program.run_decompositions()
    graph = Graph()
    *outputs, features = convert(program, graph, INPUT)
    widths: dict[str, tuple[int, ...]] = dict(
        zip(OUTPUTS, ((len(model.classes),), (len(model.classes),), (learner.network.backbone.dim,)), strict=True)
    )
    doubt = model.doubts.get(by)
    if doubt is not None:
        outputs.append(_add_familiarity(graph, outputs[1], features, doubt))
        widths[FAMILIARITY] = ()
    for name, output in zip(outputs, widths, strict=True):
        graph.nodes.append(helper.make_node("Identity", [name], [output]))
    made = helper.make_graph(
        graph.nodes,
        "engram",
        [helper.make_tensor_value_info(INPUT, TensorProto.UINT8, ["N", height, width, 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *sizes]) for name, sizes in widths.items()],
        initializer=graph.constants,
    )
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="engram")
    proto.ir_version, proto.producer_version = IR_VERSION, version()
    described = {
        "classes": json.dumps([encode_label(label) for label in model.labels]),
        "method": model.config.method,
        "predictor": by,
        "image_size": json.dumps([height, width]),
    }
    if model.config.weights is not None:
        described["pretrained"] = json.dumps(to_plain(model.config.weights))
    if doubt is not None:
        rates = [rate for rate in UNKNOWN_RATES if len(doubt.familiarity) * rate >= 1]
        described["unknown_below"] = json.dumps({f"{rate:g}": doubt.threshold(rate) for rate in rates})
    helper.set_model_props(proto, described)
    with _refusing("the check of its graph"):
        checker.check_model(proto, full_check=True)
    return proto.SerializeToString()


@contextmanager
def _refusing(who: str) -> Iterator[None]:
    """Say in one sentence that a graph is refused. A network of another library may need what is not translated yet."""
    try:
        yield
    except Exception as error:  # onnx and onnxruntime have many types, and no common one
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise EngramError(f"this model's network cannot be exported yet: {who} fails ({reason})") from error


def _add_familiarity(graph: Graph, logits: str, features: str, doubt: Doubt) -> str:
    """Add how much an image is like those of a known class, as `Doubt.familiarity_of`; return its name."""
    if isinstance(doubt, DoubtByMeans):
        return _by_means(graph, logits, features, doubt)
    assert isinstance(doubt, DoubtByScores)
    return _by_scores(graph, logits, doubt)


def _by_means(graph: Graph, logits: str, features: str, doubt: DoubtByMeans) -> str:
    (lead, lead_deviation), (cosine, cosine_deviation) = doubt.typical.tolist()
    first, second = _extremes(graph, logits, largest=1)
    above = graph.add("Sub", [graph.add("Sub", [first, second]), graph.constant(lead)])
    length = graph.add("ReduceL2", [features], axes=[1], keepdims=1)
    unit = graph.add("Div", [features, graph.add("Max", [length, graph.constant(1e-12)])])
    cosines = graph.add("MatMul", [unit, graph.constant(doubt.centres.T.contiguous().float())])
    nearest = graph.add("ReduceMax", [cosines], axes=[1], keepdims=0)
    towards = graph.add("Sub", [nearest, graph.constant(cosine)])
    parts = [(above, 1 / lead_deviation), (towards, DIRECTION / cosine_deviation)]
    return graph.add("Add", [graph.add("Mul", [part, graph.constant(factor)]) for part, factor in parts])


def _by_scores(graph: Graph, logits: str, doubt: DoubtByScores) -> str:
    there = doubt.means @ doubt.whitening
    # Relative to a point amid the classes, so that float32 is exact enough for the differences.
    centre = doubt.means.mean(dim=0)
    there = there - centre @ doubt.whitening
    moved = graph.add("Sub", [logits, graph.constant(centre.float())])
    here = graph.add("MatMul", [moved, graph.constant(doubt.whitening.float())])
    own = graph.add("ReduceSum", [graph.add("Mul", [here, here]), graph.constant([1])], keepdims=1)
    cross = graph.add("MatMul", [here, graph.constant((-2 * there.T).contiguous().float())])
    theirs = graph.constant((there**2).sum(dim=1).float())
    squares = graph.add("Add", [graph.add("Add", [cross, own]), theirs])
    squares = graph.add("Max", [squares, graph.constant(1e-9)])
    first, second = (graph.add("Log", [value]) for value in _extremes(graph, squares, largest=0))
    return graph.add("Sub", [second, graph.add("Mul", [first, graph.constant(2.0)])])


def _extremes(graph: Graph, values: str, largest: int) -> tuple[str, str]:
    """Add the first and the second of each row's values, from the largest down or from the smallest up."""
    near = [graph.add("TopK", [values, graph.constant([count])], axis=1, largest=largest) for count in (1, 2)]
    last = "ReduceMin" if largest else "ReduceMax"
    first, second = (graph.add(last, [part], axes=[1], keepdims=0) for part in near)
    return first, second


def _images_to_check(model: Model) -> Images:
    """Return held-out images or exemplars, if there are any, and noise."""
    assert model.learner is not None
    height, width = model.config.image_size
    noise = np.random.default_rng(0).integers(0, 256, (CHECKED // 2, height, width, 3), dtype=np.uint8)
    samples = model.heldout.samples() or model.learner.memory.samples()
    if samples is None:
        return noise
    step = max(1, len(samples) // (CHECKED // 2))
    return np.concatenate([samples.pixels[::step][: CHECKED // 2].numpy(), noise])


def _difference(model: Model, content: bytes, images: Images, by: str) -> float:
    """Return the largest difference of the probabilities, in batches of different sizes."""
    runtime: Any = importlib.import_module("onnxruntime")
    parts = [images[:1], images[1:]]
    with _refusing("onnxruntime"):
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
        theirs = np.concatenate([session.run([OUTPUTS[0]], {INPUT: part})[0] for part in parts])
    return float(np.abs(theirs - model.probabilities(images, by)).max())
