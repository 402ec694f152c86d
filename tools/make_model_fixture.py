"""Make the model kept in the tests: python tools/make_model_fixture.py [OUT].

A model directory as this version writes it, packed as tests/fixtures/model-format1.tar.xz, and what it answers about
its own pictures in model-format1.json. Later versions must open it and answer the same; so it is made once for each
format, and never again. To be small it learns five classes of the embedded set with two exemplars each; then half of
its weights are set to zero and the others rounded, which the packing makes use of.
"""

from __future__ import annotations

import io
import json
import lzma
import sys
import tarfile
import tempfile
from collections.abc import Hashable
from pathlib import Path

import numpy as np
import torch

from engram import learn_into, read_mini
from engram.contract.exemplars import class_means
from engram.models.edit import save_model
from engram.models.labels import encode_label
from engram.models.model import Model
from engram.models.model_config import ModelConfig
from engram.models.store.codec import open_model
from engram.models.store.generations import FORMAT

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
LABELS: tuple[Hashable, ...] = ("first", 2, ("third", 3.5), None, True)
KEPT, MANTISSA = 0.5, 16  # the share of a large layer's weights that stay, and the steps between two powers of two


def teach(path: Path) -> None:
    """Two lessons, of three and of two classes."""
    store = read_mini()
    config = ModelConfig.choose(image_size=16, images=300, memory=2, epochs=12, validation=0.02, device="cpu")
    for ids in (range(3), range(3, 5)):
        rows = np.flatnonzero(np.isin(store.train.class_ids, ids))
        labels = [LABELS[store.train.class_ids[row]] for row in rows]
        given = config if ids.start == 0 else None
        for _ in learn_into(path, store.train.images[rows], labels, config=given, device="cpu"):
            pass


@torch.no_grad()
def thin(model: Model) -> None:
    """Zeros for the smallest weights of the large layers, and few bits for all others."""
    assert model.learner is not None
    for parameter in model.learner.network.parameters():
        if parameter.numel() > 2000:
            parameter[parameter.abs() < parameter.abs().flatten().quantile(1 - KEPT)] = 0
        mantissa, exponent = torch.frexp(parameter)
        parameter.copy_(torch.ldexp((mantissa * MANTISSA).round() / MANTISSA, exponent))
    model.learner.class_means = class_means(model.learner, model.engine)
    model.learner.snapshot_teacher()
    model.measure()


def answers(model: Model) -> dict[str, object]:
    """Return the model's predictions for its own pictures."""
    assert model.learner is not None
    shares: dict[str, list[list[float]]] = {}
    for by in model.predictors:
        pictures = [memory.samples() for memory in (model.learner.memory, model.heldout)]
        images = torch.cat([samples.pixels for samples in pictures if samples is not None])
        shares[by] = [[round(share, 6) for share in row] for row in model.probabilities(images, by).tolist()]
    return {"labels": [encode_label(label) for label in model.labels], "shares": shares}


def pack(path: Path) -> bytes:
    """The directory as an archive that is the same whenever it is made of the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for file in sorted(path.rglob("*")):
            if file.name != ".lock":
                entry = archive.gettarinfo(file, str(file.relative_to(path)))
                entry.uid = entry.gid = entry.mtime = 0
                entry.uname = entry.gname = ""
                with file.open("rb") if file.is_file() else io.BytesIO() as content:
                    archive.addfile(entry, content)
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    """Writes both files."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        teach(path)
        model, _ = open_model(path, "cpu")
        thin(model)
        save_model(model, path, overwrite=True)
        packed = pack(path)
        (out / f"model-format{FORMAT}.tar.xz").write_bytes(packed)
        (out / f"model-format{FORMAT}.json").write_text(json.dumps(answers(model)) + "\n")
    print(f"{len(packed)} bytes in {out / f'model-format{FORMAT}.tar.xz'}")


if __name__ == "__main__":
    main()
