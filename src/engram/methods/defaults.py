"""Methods that the package uses when none is given."""

from __future__ import annotations

DEFAULT_METHOD = "afc"
PRETRAINED_METHOD = "lda"  # for a new model of files of images, where pretrained weights are there
# The methods that the demo compares; {kept} is the number of exemplars per class.
DEMO_METHODS = {
    "naive": "trains only on the new images: no memory, no distillation",
    "replay": "keeps {kept} images of each old class and trains on them too",
    "afc": "keeps the same {kept} and also preserves the features that mattered",
    "bedrock": "freezes the first network, and keeps features instead of images",
}
