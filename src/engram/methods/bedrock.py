"""Bedrock: one network, trained as well as possible on the base classes, and a head in closed form on all its levels.

1. The base stage is AFC's, but long and with strong augmentation.
2. The network is frozen. Its features are the embedding and three statistics of each channel of the last maps. They are
   averaged over views of the image (mirrored, moved by a pixel), standardised and expanded at random, as in analytic
   class-incremental learning (Zhuang et al., NeurIPS 2022).
3. The head is the ridge regression of one-hot labels on these, over all images seen. What is kept of an image is its
   features, as half-precision numbers or as a few bytes (product quantisation), and no pixel.

How the classes after the base are divided into stages makes no difference but rounding, and a class can be removed as
if it had never come after the base stage.

Legend: B batch, N images, L features of all levels, M random features, K capacity in classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.contract import (
    Learner,
    Network,
    Passes,
    Phase,
    RecipeHints,
    Stage,
    Training,
    register,
    setting,
)
from engram.core.errors import EngramError
from engram.core.memory_limits import check_memory
from engram.core.rng import generator
from engram.methods.blocks.closed_form import AveragingNetwork, check_classes, check_tensors, ridge_weights
from engram.methods.blocks.feature_codes import CENTRES as FEATURE_CENTRES
from engram.methods.blocks.feature_codes import Codebook, decode, encode, make_codebook
from engram.methods.blocks.lsc import LSCMethod, LSCSettings
from engram.nn.backbone import Backbone
from engram.nn.heads import Head, LSCHead
from engram.nn.views import MIRRORED, PLAIN, SHIFTED, View

# What is kept of the images: features, float16 (N, L), or codes, uint8 (N, P); the class of each, int32 (N,); and how
# many rows came with each stage.
ROWS, CLASSES, SIZES = "bedrock.rows", "bedrock.classes", "bedrock.sizes"
ROTATION, CENTRES = "bedrock.rotation", "bedrock.centres"  # of the codes
SUMS = "bedrock.sums"  # computed from the rows, and not kept
TRIED_SIDE = 32  # of the image with which the number of features is found
LEVELS = 3  # last maps whose statistics are features, beside the embedding
SCALE, OFFSET = 0.5, 0.5  # spread of the random features' inputs and offsets
SMALLEST = 1e-6  # spread of a feature; smaller ones are constant
CHUNK = 4096  # rows whose random features are held at a time
MATRICES = 4  # of (M, M) in float64 at the same time
VIEWS: dict[str, tuple[View, ...]] = {"one": (PLAIN,), "mirror": MIRRORED, "shifts": SHIFTED}


def level_features(embedding: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """The embedding, then of the channels of the last maps: the mean and the spread of the positive part, the mean.

    (B, L) in float32.
    """
    pixels = [each.float().flatten(2) for each in maps[-LEVELS:]]
    positive = [each.relu() for each in pixels]
    statistics = [
        *(each.mean(dim=2) for each in positive),
        *((each - each.mean(dim=2, keepdim=True)).square().mean(dim=2).sqrt() for each in positive),
        *(each.mean(dim=2) for each in pixels),
    ]
    return torch.cat([embedding.float(), *statistics], dim=1)


def pack_signs(signs: Tensor) -> Tensor:
    """Signs (L, M), true for plus, as bits: uint8 (L, M / 8), rounded up."""
    padded = F.pad(signs.to(torch.uint8), (0, -signs.shape[1] % 8)).unflatten(1, (-1, 8))
    return (padded << torch.arange(8, dtype=torch.uint8, device=signs.device)).sum(dim=2, dtype=torch.uint8)


def unpack_signs(packed: Tensor, width: int) -> Tensor:
    """The signs (L, width) that `pack_signs` was given, as 1 and -1 in float32."""
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return 2 * bits.flatten(1)[:, :width].float() - 1


class BedrockHead(LSCHead):
    """An LSC head until `expand`; from then on, a weight per class over random features of all levels.

    width: M. signs: of the random matrix, packed. centre, spread: of the features, (L,). offset: (M,). All are None
    until `expand`. projection: (L, M), made from them and not saved.
    """

    signs: Tensor | None
    centre: Tensor
    spread: Tensor
    offset: Tensor
    projection: Tensor

    def __init__(self, width: int, dim: int, capacity: int, proxies: int, sharpness: float, *others: Any) -> None:
        super().__init__(dim, capacity, proxies, sharpness, *others)
        self.width, self.dim = width, dim
        for name in ("signs", "centre", "spread", "offset"):
            self.register_buffer(name, None)  # until `expand`, the state is that of an LSC head
        self.register_buffer("projection", None, persistent=False)

    def expand(self, signs: Tensor, centre: Tensor, spread: Tensor, offset: Tensor) -> None:
        """Replace the proxies by weights over random features; the weights are zero."""
        device = self.weight.device
        self.signs, self.centre, self.spread, self.offset = (
            each.to(device).clone() for each in (signs, centre, spread, offset)
        )
        size = len(self.centre)
        self.projection = unpack_signs(self.signs, self.width) * (SCALE / math.sqrt(size)) / self.spread[:, None]
        self.weight = nn.Parameter(self.weight.new_zeros(self.capacity, self.width))
        self.scale = None

    def prepare_for_state(self, state: Mapping[str, Tensor]) -> None:
        if "projection" in state:
            raise EngramError(
                "this was saved by an earlier version of bedrock, which kept sums over products; run or learn it again"
            )
        if "signs" in state:
            self.expand(state["signs"], state["centre"], state["spread"], state["offset"])

    @torch.no_grad()
    def check_expanded(self, network: Network) -> int:
        """Refuse random features that do not fit the features of the network; return the number of these."""
        image = self.centre.new_zeros(1, 3, TRIED_SIDE, TRIED_SIDE)
        maps, embedding = network.backbone(image)
        size = level_features(embedding, maps).shape[1]
        expected = {
            "signs": (torch.uint8, (size, math.ceil(self.width / 8))),
            "centre": (torch.float32, (size,)),
            "spread": (torch.float32, (size,)),
            "offset": (torch.float32, (self.width,)),
        }
        check_tensors({name: self.get_buffer(name) for name in expected}, expected)
        if not bool((self.spread > 0).all()):
            raise EngramError("the spread of its features is not above 0; the model is damaged")
        return size

    def input_features(self, embedding: Tensor, maps: Sequence[Tensor], ends_in_relu: bool) -> Tensor:
        """The features of all levels, of which the embedding is first; while the base stage trains, only that."""
        return embedding.float() if self.training else level_features(embedding, maps)

    def random_features(self, features: Tensor) -> Tensor:
        """gelu of a random linear map of the standardised features (B, L), (B, M)."""
        return F.gelu(torch.addmm(self.offset, features - self.centre, self.projection))

    def forward(self, features: Tensor) -> Tensor:
        if self.signs is None:
            return super().forward(features[:, : self.dim])
        return F.linear(self.random_features(features), self.weight)


class ViewsNetwork(AveragingNetwork):
    """A network whose features are averaged over views once its head is a closed form."""

    @property
    def views(self) -> tuple[View, ...]:
        assert isinstance(self.head, BedrockHead)
        return (PLAIN,) if self.head.signs is None else super().views


@dataclass(frozen=True)
class BedrockSettings(LSCSettings):
    """Bedrock's settings; the defaults are those of CIFAR-100.

    width: the number M of random features. gamma: the penalty on the squared weights. views: "one" (the image),
    "mirror" (and its mirror image) or "shifts" (both, and moved by a pixel in four directions). code_bytes: bytes that
    are kept of each image's features; 0: half-precision numbers. train: of the base stage.
    """

    width: int = setting(12288, at_least=1, at_most=65536, after_base=True)
    gamma: float = setting(20.0, above=0, after_base=True)
    views: Literal["one", "mirror", "shifts"] = setting("shifts", after_base=True, role="views")
    code_bytes: int = setting(0, at_least=0, at_most=4096, after_base=True)
    train: Training = setting(factory=partial(Training, epochs=640), role="main")


@dataclass(eq=False)
class Sums:
    """Sums over the rows that are kept. products: (M, M), of h h^T. targets: (K, M), of h for each class.

    rows: the tensor that they are of; stages: how many stages of it they have.
    """

    products: Tensor
    targets: Tensor
    rows: Tensor
    stages: int


@final
@register(
    "bedrock",
    settings=BedrockSettings,
    title="A strong frozen network, and ridge regression on random features of all its levels",
    paper="this project",
    memory="optional",
    recipes=RecipeHints(
        augmentation={"policy": "trivial", "cutout": 8},
        small={"width": 1024, "views": "mirror", "code_bytes": 64},
    ),
)
class Bedrock(LSCMethod[BedrockSettings]):
    """Trains in the base stage only; every stage adds the features of its images, and solves for the head."""

    predictors = ("cnn",)
    uses_teacher = False
    returning_classes = True
    keeps_statistics = True

    def head(self, dim: int, capacity: int) -> Head:
        settings = self.settings
        lsc = (settings.proxies, settings.sharpness, settings.reading("similarity"), settings.learned_scale)
        return BedrockHead(settings.width, dim, capacity, *lsc)

    def network(self, backbone: Backbone, head: Head, mean: Sequence[float], std: Sequence[float]) -> Network:
        return ViewsNetwork(VIEWS[self.settings.views], backbone, head, mean, std)

    def grow(self, learner: Learner, stage: Stage, passes: Passes) -> None:
        """Proxies for the base classes; empty rows for later ones."""
        if stage.is_base:
            super().grow(learner, stage, passes)
        else:
            learner.network.head.grow(stage.num_new, generator(learner.seed, "head", stage.index))

    def phases(self, learner: Learner, stage: Stage, passes: Passes) -> list[Phase]:
        """The training of the base stage. Refused if the sums have no room."""
        width = self.settings.width
        what = f"sums over products of {width} random features"
        check_memory(MATRICES * width**2 * 8, what, "give a smaller width", learner.network.mean.device)
        return super().phases(learner, stage, passes) if stage.is_base else []

    def feature_views(self) -> tuple[View, ...]:
        return VIEWS[self.settings.views]

    @torch.no_grad()
    def fit(self, learner: Learner, stage: Stage, features: Tensor, labels: Tensor) -> None:
        """Keep the features of the stage's images, and set the head to the solution over all that are kept."""
        head, held = learner.network.head, learner.buffers
        assert isinstance(head, BedrockHead)
        if head.signs is None:
            self._expand(learner, features)
        rows = self._kept(learner, (features - head.centre) / head.spread)
        classes, size = labels.to(rows.device, torch.int32), torch.tensor([len(rows)], device=rows.device)
        for name, new in ((ROWS, rows), (CLASSES, classes), (SIZES, size)):
            before = held.get(name)
            held[name] = new if before is None else torch.cat([before, new])
            if name == ROWS and (sums := learner.scratch.get(SUMS)) is not None and sums.rows is before:
                sums.rows = held[name]
        self.solve(learner)

    def merge(self, learner: Learner, label: int, into: int) -> None:
        classes = learner.buffers[CLASSES]
        classes[classes == label] = into
        learner.scratch.pop(SUMS, None)

    def check_buffers(self, learner: Learner, buffers: Mapping[str, Tensor]) -> None:
        network, head, known = learner.network, learner.network.head, learner.num_classes
        assert isinstance(head, BedrockHead)
        if head.signs is None:
            return
        size = head.check_expanded(network)
        parts = min(self.settings.code_bytes, size)
        row = (torch.uint8, (-1, parts)) if parts else (torch.float16, (-1, size))
        expected = {ROWS: row, CLASSES: (torch.int32, (-1,)), SIZES: (torch.int64, (-1,))}
        if parts:
            expected[ROTATION] = (torch.float16, (size, size))
            expected[CENTRES] = (torch.float32, (parts, FEATURE_CENTRES, math.ceil(size / parts)))
        check_tensors(buffers, expected)
        check_classes(buffers[CLASSES], len(buffers[ROWS]), known)
        sizes = buffers[SIZES]
        if bool((sizes < 0).any()) or int(sizes.sum()) != len(buffers[ROWS]):
            raise EngramError("the sizes of its stages do not add up to the rows that it keeps; the model is damaged")

    @torch.no_grad()
    def remove(self, learner: Learner, labels: Sequence[int]) -> None:
        """Drop the rows of the classes, and set the head to the solution over the others."""
        held = learner.buffers
        gone = torch.tensor(sorted(labels), device=held[CLASSES].device)
        kept = ~torch.isin(held[CLASSES], gone)
        classes = held[CLASSES][kept]
        sizes = [int(part.sum()) for part in kept.split(held[SIZES].tolist())]
        held[SIZES] = torch.tensor(sizes, device=kept.device)
        held[ROWS] = held[ROWS][kept]
        held[CLASSES] = classes - torch.searchsorted(gone, classes).to(torch.int32)
        learner.scratch.pop(SUMS, None)
        if learner.num_classes:
            self.solve(learner)

    def _expand(self, learner: Learner, features: Tensor) -> None:
        """Draw the random features, for features that are standardised over the images of the base stage."""
        head, settings = learner.network.head, self.settings
        assert isinstance(head, BedrockHead)
        draws, size = generator(learner.seed, "random features"), features.shape[1]
        signs = torch.rand(size, head.width, generator=draws) < 0.5
        offset = OFFSET * torch.randn(head.width, generator=draws)
        centre, spread = features.mean(dim=0), features.std(dim=0, correction=0).clamp(min=SMALLEST)
        head.expand(pack_signs(signs), centre, spread, offset)
        if settings.code_bytes:
            parts = min(settings.code_bytes, size)
            codebook = make_codebook((features - centre) / spread, parts, generator(learner.seed, "codes"))
            # Half precision is enough: rows are encoded and decoded by the same numbers.
            learner.store(ROTATION, codebook.rotation.half())
            learner.store(CENTRES, codebook.centres)

    def _codebook(self, learner: Learner) -> Codebook:
        return Codebook(learner.buffers[ROTATION].float(), learner.buffers[CENTRES])

    def _kept(self, learner: Learner, standardised: Tensor) -> Tensor:
        """Standardised features (N, L) in the form in which they are kept."""
        if not self.settings.code_bytes:
            return standardised.clamp(-65504, 65504).half()
        return encode(standardised, self._codebook(learner))

    def _features(self, learner: Learner, rows: Tensor) -> Tensor:
        """The features (N, L) of rows that are kept, as the head sees them."""
        head = learner.network.head
        assert isinstance(head, BedrockHead)
        standardised = decode(rows, self._codebook(learner)) if self.settings.code_bytes else rows.float()
        return standardised * head.spread + head.centre

    @torch.no_grad()
    def solve(self, learner: Learner, features: Tensor | None = None, labels: Tensor | None = None) -> None:
        """Set the head to the ridge regression over all rows, and over these further images."""
        sums, head = self._sums(learner), learner.network.head
        assert isinstance(head, BedrockHead)
        products, targets = sums.products, sums.targets
        if features is not None and labels is not None:
            products, targets = products.clone(), targets.clone()
            self._add(head, features, labels.to(features.device), products, targets)
        head.weight.copy_(ridge_weights(products, targets, self.settings.gamma))

    def _add(self, head: BedrockHead, features: Tensor, labels: Tensor, products: Tensor, targets: Tensor) -> None:
        """Add features (N, L) to the sums, in place."""
        random = head.random_features(features).double()
        products.addmm_(random.T, random)
        targets.addmm_(F.one_hot(labels, head.capacity).to(random).T, random)

    def _sums(self, learner: Learner) -> Sums:
        """The sums over all rows. Those of earlier stages are computed again only if they are not at hand."""
        head, held = learner.network.head, learner.buffers
        assert isinstance(head, BedrockHead)
        sums, shape = learner.scratch.get(SUMS), (head.capacity, head.width)
        if sums is None or sums.rows is not held[ROWS] or sums.targets.shape != shape:
            like = {"dtype": torch.float64, "device": head.weight.device}
            sums = Sums(torch.zeros(head.width, head.width, **like), torch.zeros(shape, **like), held[ROWS], 0)
            learner.scratch[SUMS] = sums
        sizes = held[SIZES].tolist()
        rows, classes = held[ROWS].split(sizes), held[CLASSES].long().split(sizes)
        for stage in range(sums.stages, len(sizes)):  # stage by stage: the same bits as if none was at hand
            for part, own in zip(rows[stage].split(CHUNK), classes[stage].split(CHUNK), strict=True):
                self._add(head, self._features(learner, part), own, sums.products, sums.targets)
        sums.stages = len(sizes)
        return sums
