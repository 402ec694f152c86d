"""Makes tests/fixtures/ten-classes.tar.gz: small JPEG files of ten CIFAR-100 classes, for the walk-through's test.

    python tools/make_walkthrough_fixture.py cifar100-sample.tar.gz OUT.tar.gz

The sample holds train/CLASS/*.png and test/CLASS/*.png; the first files by name of each class are taken.
"""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from pathlib import Path, PurePosixPath

from PIL import Image

TRAIN, TEST, QUALITY = 16, 4, 80


def main(source: str, out: str) -> None:
    """Writes the archive; the same bytes every time."""
    kept: dict[tuple[str, str], list[tuple[str, bytes]]] = {}
    with tarfile.open(source) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            path = PurePosixPath(member.name)
            if member.isfile() and path.suffix == ".png":
                split, name = path.parts[-3:-1]
                files = kept.setdefault((split, name), [])
                file = archive.extractfile(member)
                if file is not None and len(files) < (TRAIN if split == "train" else TEST):
                    files.append((f"{split}/{name}/{path.stem}.jpg", to_jpeg(file.read())))
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for files in kept.values():
            for name, content in files:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    Path(out).write_bytes(gzip.compress(plain.getvalue(), 9, mtime=0))


def to_jpeg(png: bytes) -> bytes:
    """The picture as a JPEG file."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    main(*sys.argv[1:])
