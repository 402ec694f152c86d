"""Measures whether training a pretrained network further pays: tools/measure_plasticity.py OUT.csv NAME=FOLDER...

FOLDER has one folder of images per class, or folders lesson* of such. The network is EfficientNet-Lite0. Part of the
images of each class is learned, in three lessons (half of the classes, a quarter, a quarter, in the order of the draw),
and the others measure the accuracy after the last lesson; no test image is used. Ways:

- frozen: LDA on the embedding of the network as it comes, what `engram learn` does by default;
- last blocks, first lesson: the last blocks (--blocks) and the head convolution are trained on the first lesson
  (cross-entropy, and a penalty on the distance from the original embedding), then frozen; LDA on the new embedding.
  Later lessons cannot change the features, because of earlier images only statistics are kept;
- both: LDA on the original embedding and the trained one, concatenated;
- last blocks, all at once: the same training on the images of all lessons, which no lesson has: the limit of this way.

Batch norms keep the statistics that they come with. Images are learned and measured in two views, the image and its
mirror image.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.data.sources.folder import list_classes
from engram.data.store import stable_permutation
from engram.methods.lda import discriminants
from engram.models.inputs import read_images
from engram.nn.backbones import build_backbone
from engram.nn.efficientnet import EfficientNetLite
from engram.nn.pretrained import load_weights

WEIGHTS = "efficientnet-lite0"
LEARNED = {"many": 0.75, "few": 0.2}  # share of the images of a class
BATCH = 32


class LastBlocks(nn.Module):
    """The last blocks and what follows them: from the map before (N, C, H, W) to the embedding (N, 1280)."""

    def __init__(self, backbone: EfficientNetLite, count: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*list(backbone.blocks)[-count:])
        self.convolution, self.norm = backbone.conv_head, backbone.bn1

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.norm(self.convolution(self.blocks(x)))).mean(dim=(2, 3))


@torch.no_grad()
def maps_before(paths: list[str], count: int) -> tuple[Tensor, LastBlocks]:
    """The maps before the last blocks, (N, 2, C, H, W) of an image and its mirror image, and these blocks."""
    record, tensors = load_weights(WEIGHTS)
    backbone = build_backbone(WEIGHTS, torch.Generator())
    backbone.load_state_dict(tensors)
    assert isinstance(backbone, EfficientNetLite)
    backbone.eval()
    size = (record.image_size, record.image_size)
    mean, std = torch.tensor(record.mean), torch.tensor(record.std)
    parts: list[Tensor] = []
    for start in range(0, len(paths), 4):
        images = torch.from_numpy(read_images(paths[start : start + 4], size))
        x = ((images / 255 - mean) / std).permute(0, 3, 1, 2)
        views = []
        for view in (x, x.flip(3)):
            out = F.relu6(backbone.bn0(backbone.conv_stem(view.contiguous(memory_format=torch.channels_last))))
            for block in list(backbone.blocks)[:-count]:
                out = block(out)
            views.append(out.contiguous())
        parts.append(torch.stack(views, dim=1))
        if start % 200 == 0:
            print(f"{start} of {len(paths)} images", file=sys.stderr)
    return torch.cat(parts), LastBlocks(backbone, count)


def train(last: LastBlocks, maps: Tensor, labels: Tensor, options: argparse.Namespace, seed: int) -> LastBlocks:
    """A trained copy."""
    generator = torch.Generator().manual_seed(seed)
    original, trained = last, copy.deepcopy(last)
    classes = labels.unique()
    targets = torch.searchsorted(classes, labels)
    head = nn.Linear(1280, len(classes))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    groups = [{"params": trained.parameters(), "lr": options.lr}, {"params": head.parameters(), "lr": 20 * options.lr}]
    if options.sgd:
        optimiser: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-4)
    else:
        optimiser = torch.optim.AdamW(groups, weight_decay=1e-4)
    steps = options.epochs * ((len(labels) + BATCH - 1) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, [options.lr, 20 * options.lr], total_steps=steps)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH):
            own = maps[rows, torch.randint(2, (len(rows),), generator=generator)]
            with torch.no_grad():
                before = original(own)
            now = trained(own)
            loss = F.cross_entropy(head(now), targets[rows], label_smoothing=0.1)
            loss = loss + options.distil * (now - before).square().sum(dim=1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return trained


@torch.no_grad()
def embed(last: LastBlocks, maps: Tensor) -> Tensor:
    """Roots of the embedding, averaged over the views, as LDA sees them, (N, 1280)."""
    parts = [last(part.flatten(0, 1)).sqrt().view(len(part), 2, -1).mean(dim=1) for part in maps.split(BATCH)]
    return torch.cat(parts).double()


def accuracy(features: Tensor, labels: Tensor, learned: Tensor) -> float:
    """Percent of the other images that LDA predicts right."""
    classes = int(labels.max()) + 1
    own, known = features[learned], labels[learned]
    means = torch.stack([own[known == label].mean(dim=0) for label in range(classes)])
    weights, biases = discriminants(torch.bincount(known, minlength=classes), means, own - means[known], 0.5)
    others = ~learned
    return 100 * float(((features[others] @ weights.T + biases).argmax(dim=1) == labels[others]).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--blocks", type=int, default=1, help="trained blocks before the head convolution")
    parser.add_argument("--sgd", action="store_true", help="SGD with momentum 0.9 instead of AdamW")
    parser.add_argument("--distil", type=float, default=0.01)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for given in options.sets:
        name, _, folder = given.partition("=")
        lessons = sorted(Path(folder).glob("lesson*")) or [Path(folder)]
        found = [list_classes(str(part)) for part in lessons]
        paths, names = ([each for part in found for each in part[i]] for i in range(2))
        maps, last = maps_before(paths, options.blocks)
        places = torch.tensor(np.unique(names, return_inverse=True)[1])
        frozen = embed(last, maps)
        count = int(places.max()) + 1
        for draw in range(1, options.draws + 1):
            order = torch.from_numpy(np.argsort(stable_permutation(count, f"classes {draw}")))
            labels = order[places]
            drawn = torch.from_numpy(np.argsort(stable_permutation(len(labels), f"images {draw}")))
            for kind, share in LEARNED.items():
                learned = torch.zeros(len(labels), dtype=torch.bool)
                for label in range(count):
                    own = (labels == label).nonzero().flatten()
                    own = own[drawn[own].argsort()]
                    learned[own[: max(2, round(share * len(own)))]] = True
                first = learned & (labels < count // 2)
                embeddings = {"frozen": frozen}
                for way, used in {"last blocks, first lesson": first, "last blocks, all at once": learned}.items():
                    started = time.process_time()
                    trained = train(last, maps[used], labels[used], options, draw)
                    seconds = time.process_time() - started
                    embeddings[way] = embed(trained, maps)
                    print(f"{name} {kind} {draw} {way}: {seconds:.0f} CPU s of training", file=sys.stderr)
                embeddings["both"] = torch.cat([frozen, embeddings["last blocks, first lesson"]], dim=1)
                for way, features in embeddings.items():
                    value = round(accuracy(features, labels, learned), 2)
                    rows.append({"set": name, "learned": kind, "draw": draw, "way": way, "accuracy": value})
                    print(rows[-1], file=sys.stderr)
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
