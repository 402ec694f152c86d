"""Compare heads for Bedrock on base networks that are trained already; writes a CSV file.

    engram run bedrock-cifar100-b50-s5 --order 1 --holdout 0.1 --stop-after-stage 0 --out runs/base
    python tools/measure_bedrock_head.py OUT.csv runs/base [RUN ...]

The network of each run is frozen. For every head below, it is fitted to the training images of the first classes and
evaluated on the images that the run holds out, after the base classes and after each fifth of the others. The test
images are not read: a run without --holdout is refused.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.core.errors import EngramError
from engram.data.sources.load import load_store
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session
from engram.methods.bedrock import LEVELS, OFFSET, SCALE, SMALLEST, VIEWS
from engram.methods.blocks.closed_form import ridge_weights
from engram.methods.blocks.feature_codes import decode, encode, make_codebook
from engram.runs.reader import read_manifest
from engram.runs.run_checkpoint import read_run_checkpoint

KINDS: tuple[str, ...] = (
    "embedding",
    "positive",
    "spread",
    "mean",
    "largest",
)  # statistics of the last maps, besides the embedding
CHUNK = 8192


@dataclass(frozen=True)
class TriedHead:
    """A head to try. features: of KINDS. averaged: one row per image, of the mean over the views; else a row each."""

    features: tuple[str, ...] = ("embedding", "positive", "spread", "mean")
    views: str = "shifts"
    averaged: bool = True
    width: int = 8192
    gamma: float = 20.0
    code_bytes: int = 0


BEST = TriedHead()
HEADS = (
    *(replace(BEST, features=KINDS[:count]) for count in (1, 2, 3)),
    replace(BEST, features=("embedding", "positive", "spread", "largest")),
    *(replace(BEST, views=views) for views in ("one", "mirror")),
    replace(BEST, averaged=False),
    *(replace(BEST, gamma=gamma) for gamma in (0.5, 2.0, 6.0, 60.0)),
    *(replace(BEST, width=width) for width in (1024, 4096, 6144, 8192, 12288)),
    *(replace(BEST, code_bytes=count) for count in (16, 32, 64, 96)),
)


def statistics(embedding: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """All KINDS side by side, (B, L)."""
    pixels = [each.float().flatten(2) for each in maps[-LEVELS:]]
    positive = [each.relu() for each in pixels]
    parts = [
        [embedding.float()],
        [each.mean(dim=2) for each in positive],
        [each.std(dim=2, correction=0) for each in positive],
        [each.mean(dim=2) for each in pixels],
        [each.amax(dim=2) for each in pixels],
    ]
    return torch.cat([torch.cat(part, dim=1) for part in parts], dim=1)


class FrozenNetwork:
    """The features of a run's training and held-out images, in every view, and their labels."""

    def __init__(self, run: Path) -> None:
        manifest = read_manifest(run)
        config = RunConfig.from_plain(manifest.config)
        if config.data.holdout is None:
            raise EngramError(f"{run} has no held-out images; run it with --holdout 0.1")
        store = load_store(config.data)
        session = Session(config, store)
        session.learner.load_state_dict(read_run_checkpoint(run, manifest).tensors)
        network, self.base = session.learner.network, session.stream.sizes[0]
        read, self.device = session.engine.inference(network), session.engine.device
        each = sum(network.backbone.widths[-LEVELS:])
        self.sizes = dict(zip(KINDS, [network.backbone.dim, each, each, each, each], strict=True))
        self.labels = [
            torch.from_numpy(session.stream.labels_of(split.class_ids)).to(self.device)
            for split in (store.train, store.test)
        ]
        self.features = [  # of training and held-out images, (V, N, L)
            torch.stack(
                [
                    torch.cat([statistics(output.embedding, output.maps) for output in read.outputs(images, view)])
                    for view in VIEWS["shifts"]
                ]
            )
            for images in (torch.from_numpy(split.images) for split in (store.train, store.test))
        ]

    def accuracies(self, tried: TriedHead) -> Iterator[float]:
        """The accuracy of a head with the base classes, and after each fifth of the others, in percent."""
        starts = dict(zip(self.sizes, torch.tensor([0, *self.sizes.values()]).cumsum(0).tolist(), strict=False))
        columns = [column for kind in tried.features for column in range(starts[kind], starts[kind] + self.sizes[kind])]
        views = [VIEWS["shifts"].index(view) for view in VIEWS[tried.views]]
        train, held = (features[views][..., columns] for features in self.features)
        if tried.averaged:
            train, held = train.mean(dim=0, keepdim=True), held.mean(dim=0, keepdim=True)
        labels, targets = self.labels
        of_base = train[:, labels < self.base].flatten(0, 1)
        centre, spread = of_base.mean(dim=0), of_base.std(dim=0, correction=0).clamp(min=SMALLEST)
        train, held = (train - centre) / spread, (held - centre) / spread
        if tried.code_bytes:
            book = make_codebook(((of_base - centre) / spread), tried.code_bytes, torch.Generator().manual_seed(0))
            train = torch.stack([decode(encode(view, book), book) for view in train])
        draws = torch.Generator().manual_seed(0)
        signs = torch.rand(len(columns), tried.width, generator=draws).sub_(0.5).sign_().to(train)
        offset = (OFFSET * torch.randn(tried.width, generator=draws)).to(train)

        def random(rows: Tensor) -> Tensor:
            return F.gelu(torch.addmm(offset, rows, signs * (SCALE / math.sqrt(len(columns)))))

        products = torch.zeros(tried.width, tried.width, dtype=torch.float64, device=self.device)
        classes, done = int(labels.max()) + 1, 0
        sums = torch.zeros(classes, tried.width, dtype=torch.float64, device=self.device)
        for seen in range(self.base, classes + 1, max(1, (classes - self.base) // 5)):
            rows = (labels >= done) & (labels < seen)
            done = seen
            for part, own in zip(train[:, rows].split(CHUNK, 1), labels[rows].split(CHUNK), strict=True):
                for view in part:
                    h = random(view).double()
                    products.addmm_(h.T, h)
                    sums.addmm_(F.one_hot(own, classes).to(h).T, h)
            weights = ridge_weights(products, sums, tried.gamma * len(train))[:seen].float()
            asked = targets < seen
            scores = sum(F.linear(random(view[asked]), weights) for view in held)
            assert isinstance(scores, Tensor)
            yield 100 * float((scores.argmax(dim=1) == targets[asked]).double().mean())


def main(out: str, *runs: str) -> None:
    names = [field.name for field in fields(TriedHead)]
    with open(out, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", *names, "average", "first", "last"])
        for run in runs:
            network = FrozenNetwork(Path(run))
            for tried in dict.fromkeys(HEADS):
                found = list(network.accuracies(tried))
                described = asdict(tried) | {"features": " ".join(tried.features)}
                measured = [f"{value:.2f}" for value in (sum(found) / len(found), found[0], found[-1])]
                writer.writerow([Path(run).name, *(described[name] for name in names), *measured])
                file.flush()
                print(Path(run).name, tried, *measured)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except EngramError as error:
        sys.exit(str(error))
