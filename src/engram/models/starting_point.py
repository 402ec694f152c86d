"""The start of a new model for which neither method nor network was chosen: a pretrained network if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from engram.core.errors import option, spelled
from engram.methods.defaults import PRETRAINED_METHOD
from engram.nn.pretrained import how_to_get, known_weights

WEIGHTS: Final = "efficientnet-lite0"
BETTER: Final = "efficientnet-lite0-lite2"  # used where both packages are installed, as by the extra `pretrained`
SMALLEST_SIDE: Final = 96  # in pixels; for smaller images the network is too coarse
_CHOICES: Final = ("method", "backbone", "weights")
_OF_TRAINING: Final = ("settings", "augmentation", "augment")


def starting_point(
    chosen: Mapping[str, Any], files: Sequence[str], training: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return arguments of `ModelConfig.choose` to add for a new model, and a sentence for the user; empty if none.

    A pretrained network is frozen and used by PRETRAINED_METHOD. It is not used for arrays, whose size is fixed, for
    a small image size that was asked for, and where something was chosen that only training uses.

    chosen: arguments of the user. files: of the images, empty for arrays. training: options of the lesson that only
    training uses, by name.
    """
    trained = [*(name for name in _OF_TRAINING if name in chosen), *training]
    if files and "weights" in chosen and "method" not in chosen and not trained:
        return {"method": PRETRAINED_METHOD}, ""
    if not files or any(name in chosen for name in _CHOICES) or not _is_large(chosen.get("image_size")):
        return {}, ""
    here = known_weights()
    weights = BETTER if here.get(BETTER) else WEIGHTS
    if not here[weights]:
        return {}, (
            "the network is trained from scratch; a pretrained one recognises photographs better and learns faster: "
            f"{how_to_get(WEIGHTS)}, and start a new model"
        )
    if trained:
        names = " and ".join(option(name) for name in trained)
        return {}, spelled(
            f"the network is trained from scratch, because of {names}; without, the pretrained {weights} would be "
            "used, which recognises photographs better"
        )
    return {"method": PRETRAINED_METHOD, "weights": weights}, ""


def _is_large(side: Any) -> bool:
    sides = side if isinstance(side, (tuple, list)) else [side]
    return all(each is None or (isinstance(each, int) and each >= SMALLEST_SIDE) for each in sides)
