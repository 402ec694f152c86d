"""Measures a CPU pass of a pretrained network: python tools/measure_inference.py MODEL FOLDER OUT.json [--rounds N]

MODEL is a model of one's own images on a pretrained network, FOLDER has class folders of test images. The same images
are passed in turn, round by round, by

- the network alone: by torch's modules as they are, as engram runs them (channels last, norms folded, four images at
  a time), the same in bfloat16, compiled by torch, in onnxruntime, and there with 8-bit integers (weights and maps,
  calibrated on a quarter of the images);
- commands: `engram predict` with the model and with its exported file, and `engram learn` of a new model.

A model passes each image once for each of its views; rates are passes a second. Of each way of the network the file
also has the largest difference of an embedding from that of float32, relative to its length, and the share of the
images whose class is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime
import torch
from onnxruntime import quantization
from torch import Tensor

from engram import open_model
from engram.core.memory_limits import keep_freed_memory
from engram.core.provenance import hardware, processor_name, versions
from engram.data.augment import to_unit
from engram.data.sources.folder import walk_images
from engram.models.inputs import read_images
from engram.models.onnx_export import export_onnx
from engram.nn.folding import fold_norms

BATCH = 4
Embed = Callable[[Tensor], Tensor]  # normalised images (N, 3, H, W) to embeddings (N, D)


class Calibration(quantization.CalibrationDataReader):
    """Batches of images, one after the other."""

    def __init__(self, images: Tensor) -> None:
        self._parts = iter(images.split(BATCH))

    def get_next(self) -> Any:
        part = next(self._parts, None)
        return None if part is None else {"images": part.numpy()}


class Bare(torch.nn.Module):
    """A backbone that returns its embedding alone."""

    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)[1]


def ways_of(backbone: torch.nn.Module, folded: torch.nn.Module, images: Tensor, work: Path) -> dict[str, Embed]:
    """The ways to pass images through the network."""
    plain, merged = Bare(backbone), Bare(folded)
    compiled = torch.compile(merged)

    def last(images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last)

    def reduced(images: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return merged(last(images)).float()

    float_file, small_file = work / "network.onnx", work / "int8.onnx"
    torch.onnx.export(
        merged, (images[:BATCH],), float_file, input_names=["images"], dynamic_axes={"images": {0: "N"}}, dynamo=False
    )
    quantization.quantize_static(float_file, small_file, Calibration(images[::4]))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    sessions = [onnxruntime.InferenceSession(file, options) for file in (float_file, small_file)]

    def session(number: int) -> Embed:
        return lambda images: torch.from_numpy(sessions[number].run(None, {"images": images.numpy()})[0])

    return {
        "torch, as it is": plain,
        "torch, as engram runs it": lambda images: merged(last(images)),
        "the same, bfloat16": reduced,
        "the same, compiled": lambda images: compiled(last(images)),
        "onnxruntime": session(0),
        "onnxruntime, 8-bit integers": session(1),
    }


def command(*arguments: object) -> float:
    """Run a command of engram, and return its seconds."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "engram", *map(str, arguments), "--threads", str(torch.get_num_threads())],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_grad_enabled(False)
    keep_freed_memory()  # as the command line does
    model, _ = open_model(options.model, "cpu")
    assert model.learner is not None
    network, size = model.learner.network, model.config.image_size
    files = list(walk_images(options.folder))
    images = network.normalised(to_unit(torch.from_numpy(read_images(files, size))))
    rates: dict[str, list[float]] = {}
    embeddings: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        exported = work / "model.onnx"
        export_onnx(model, exported)
        ways = ways_of(network.backbone, fold_norms(network.backbone, size), images, work)
        for number in range(options.rounds + 1):
            for name, embed in ways.items():
                started = time.perf_counter()
                embeddings[name] = torch.cat([embed(part) for part in images.split(BATCH)])
                seconds = time.perf_counter() - started
                if number:  # the first one warms up
                    rates.setdefault(name, []).append(len(images) / seconds)
            if number:
                passes = len(network.views) * len(images)
                for name, file in (("engram predict", options.model), ("engram predict, exported", exported)):
                    seconds = command("predict", file, options.folder, "--quiet")
                    rates.setdefault(name, []).append(passes / seconds)
                seconds = command("learn", work / f"model-{number}", options.folder, "--quiet")
                rates.setdefault("engram learn", []).append(passes / seconds)
    whole = embeddings["torch, as it is"]

    def classes(embedding: Tensor) -> Tensor:
        return network.classify((), embedding).scores.argmax(dim=1)

    found: dict[str, Any] = {
        "command": " ".join(["python", "tools/measure_inference.py", *sys.argv[1:]]),
        "versions": versions(),
        "images": len(images),
    }
    found |= {"hardware": hardware("cpu", processor_name(), torch.get_num_threads()), "image_size": size}
    found["passes_per_second"] = {
        name: {"median": round(median(each), 2), "rounds": [round(rate, 2) for rate in each]}
        for name, each in rates.items()
    }
    found["difference"] = {
        name: {
            "largest": round(float(((own - whole).norm(dim=1) / whole.norm(dim=1)).max()), 6),
            "same_class": round(float((classes(own) == classes(whole)).double().mean()), 4),
        }
        for name, own in embeddings.items()
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("passes_per_second", "difference")}, indent=1))


if __name__ == "__main__":
    main()
