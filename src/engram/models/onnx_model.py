"""An exported model: a file of `engram export`, which predicts image files by onnxruntime."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.core.errors import EngramError, option
from engram.core.io import reading
from engram.data.decode.prefetch import decode_stream
from engram.models.doubt import FEWEST
from engram.models.inputs import file_side
from engram.models.labels import decode_label
from engram.models.model import refuse_not_finite
from engram.models.onnx_export import FAMILIARITY, INPUT, OUTPUTS, require_onnx
from engram.models.prediction import Predicted

BATCH = 4  # images: with more, the results of the first ones come later, and no faster


class ExportedModel:
    """A network, its class names and its limits for unknown images, on the CPU.

    labels: of the classes, in the order of the probabilities. by: the predictor. image_size: height and width.
    """

    def __init__(self, path: Path) -> None:
        require_onnx("onnxruntime")
        runtime: Any = importlib.import_module("onnxruntime")
        with reading(path):
            content = path.read_bytes()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # files are decoded meanwhile
        try:
            self._session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has many types, and no common one
            reason = next(iter(str(error).splitlines()), "")[:200]
            raise EngramError(f"onnxruntime cannot read {path} ({reason})") from None
        about = self._session.get_modelmeta().custom_metadata_map
        try:
            self.labels = [decode_label(label) for label in json.loads(about["classes"])]
            self.by: str = about["predictor"]
            height, width = json.loads(about["image_size"])
            self._limits = {float(rate): limit for rate, limit in json.loads(about.get("unknown_below", "{}")).items()}
            (taken,) = self._session.get_inputs()
            given = {output.name: output.shape[1:] for output in self._session.get_outputs()}
            fits = (taken.name, taken.type, taken.shape[1:]) == (INPUT, "tensor(uint8)", [height, width, 3])
            if not fits or given[OUTPUTS[0]] != [len(self.labels)]:
                raise ValueError("other inputs or outputs")
        except (KeyError, TypeError, ValueError, AttributeError, EngramError):
            raise EngramError(f"{path} is not a file that 'engram export' wrote") from None
        self.image_size = (height, width)
        self._can_doubt = FAMILIARITY in given

    def threshold(self, rate: float) -> float:
        """Return the familiarity below which an image is called unknown; the file has it for a few rates."""
        if not self._can_doubt or not self._limits:
            raise EngramError(
                f"this file cannot tell unknown images, as the model could not when it was exported: that needs at "
                f"least {FEWEST} held-out images; leave out {option('unknown')}"
            )
        if rate not in self._limits:
            rates = ", ".join(f"{known:g}" for known in sorted(self._limits))
            raise EngramError(f"{option('unknown', f'{rate:g}')}: an exported model has limits for {rates} only")
        return self._limits[rate]

    def predict_files(
        self, paths: Iterable[str | None], batch: int | None = None, doubt: bool = False
    ) -> Iterator[Predicted]:
        """Predict files in their order, as `prediction.predict_files` does. doubt: return the familiarity too."""
        wanted = [OUTPUTS[0], *([FAMILIARITY] if doubt else [])]
        for part in decode_stream(paths, file_side(self.image_size), batch=batch or BATCH):
            shares, *familiarity = (
                self._session.run(wanted, {INPUT: part.images})
                if part.paths
                else (np.empty((0, len(self.labels)), np.float32), *[np.empty(0, np.float32)] * doubt)
            )
            yield Predicted(part.paths, refuse_not_finite(shares), part.skipped, *map(refuse_not_finite, familiarity))
