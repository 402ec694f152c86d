"""Where the images of a stage are while it is trained: all of them on the device, or streamed there batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from engram.contract import Method, Phase
from engram.contract.learner import Learner
from engram.core.errors import EngramError, UnknownNameError, option
from engram.core.memory_limits import MAX_SHARE, UNCHECKED_BYTES, free_device_memory
from engram.data.photographs import Photographs, decoding_threads
from engram.data.stage import Samples
from engram.data.store import ImageStore
from engram.engine import Engine
from engram.engine.image_feed import RING_BATCHES, STAGED_BATCHES
from engram.engine.runtime import RECORDINGS
from engram.experiment.run_config import RunConfig
from engram.nn.network import Network

ImagePlacement = Literal["auto", "resident", "streamed"]
# Factor for what a step holds besides the tensors that its backward pass needs: gradients of maps and the allocator's
# rounding. A guess that is to be replaced by a measurement on a GPU (tools/measure_stream.py prints both).
STEP_FACTOR = 1.3
COUNTED_IMAGES = 2  # that the tensors of a step are counted on


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a stage needs.

    images: all of them, as they are on the device. ring: the part of them that is there if they are streamed.
    staging: pinned main memory on their way. work: the network, its teacher, gradients and optimiser, and the
    activations of its steps, with one part for each recording unless they share it.
    """

    images: int
    ring: int
    staging: int
    work: int

    def device(self, placement: ImagePlacement) -> int:
        """Bytes on the device with the images placed like that."""
        return self.work + (self.ring if placement == "streamed" else self.images)


def check_placement(asked: str, phases: Sequence[Phase]) -> None:
    """Refuse a placement that does not exist, or that a phase cannot have."""
    if asked not in get_args(ImagePlacement):
        raise UnknownNameError("placement of images", asked, get_args(ImagePlacement))
    if asked == "streamed" and needs_all_images(phases):
        raise EngramError(
            "this method looks for neighbours among all images of a stage on the device, so its images cannot be "
            f"streamed; leave out {option('images', 'streamed')}, or use fewer or smaller images"
        )


def photographs_of(config: RunConfig, store: ImageStore) -> Photographs | None:
    """The photographs that training crops from, if the configuration asks for them; refuses images without them."""
    if config.data.crops != "photograph":
        return None
    if store.photographs is None:
        raise EngramError(
            f"{option('crops', 'photograph')} needs the files of the images, which the images that were given do not "
            "have; give load_store(config.data) or the folder of ImageNet, or leave it out"
        )
    if config.augmentation.view is None:
        raise EngramError(
            f"{option('crops', 'photograph')} needs an augmentation that resizes its crops, but augmentation.view is "
            "none; give it a share, as the ImageNet recipes do (0.875), or leave out the crops"
        )
    return store.photographs


def check_photographs(asked: str, method: Method, phases: Sequence[Phase]) -> None:
    """Refuse what cannot be trained on crops of photographs, which are decoded in every epoch."""
    crops = option("crops", "photograph")
    if asked == "resident":
        raise EngramError(
            f"{crops} decodes the images of every batch, so they cannot all stay on the device; leave out "
            f"{option('images', 'resident')}"
        )
    if needs_all_images(phases):
        raise EngramError(
            "this method looks for neighbours among all images of a stage on the device, so its crops cannot come from "
            f"the photographs; leave out {crops}"
        )
    if method.changes_images:
        refuse_changed_images(method)


def refuse_changed_images(method: Method, chosen: Iterable[Tensor | Samples] | None = None) -> None:
    """Refuse a method whose exemplars are changed images: there are no photographs of these.

    chosen: its exemplars, which are refused if images are among them; None: refuse in any case.
    """
    if chosen is None or any(isinstance(each, Samples) for each in chosen):
        raise EngramError(
            f"{type(method).__name__} changes the pixels of its exemplars, of which there are no photographs to crop "
            f"from; leave out {option('crops', 'photograph')}"
        )


def needs_all_images(phases: Sequence[Phase]) -> bool:
    """Whether a phase needs all images of its stage on the device."""
    return any(extension.needs_all_images for phase in phases for extension in phase.extensions)


def stage_memory(
    engine: Engine,
    learner: Learner,
    phases: Sequence[Phase],
    images: int,
    size: tuple[int, int],
    activation_bytes: float,
) -> StageMemory:
    """The memory of a stage with that many images of this height and width.

    activation_bytes: of a training step, per image (`count_activation_bytes`).
    """
    pad, device = engine.augmentation.pad, engine.device
    image = (size[0] + 2 * pad) * (size[1] + 2 * pad) * 3
    batches = [phase.batches(phase.images)[1:] for phase in phases if phase.images] or [(1, 1)]
    # Of several processes, each computes and reads its part of a batch, but all of one that is too small to be divided,
    # as a last one may be. It reads all of every batch if an extension may mix images.
    own = max(engine.processes.share(size).count for sizes in batches for size in sizes)
    is_whole = any(not extension.works_on_parts for phase in phases for extension in phase.extensions)
    read = max(map(max, batches)) if is_whole else own
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in learner.network.parameters())
    activations = own * activation_bytes * STEP_FACTOR
    recordings = 1
    if engine.capture and not engine.shares_memory:
        recordings = min(RECORDINGS, sum(len({*sizes}) for sizes in batches) + 1)  # and that of a sweep
    teacher = parameters if learner.uses_teacher else 0
    # Parameters, gradients, mask, momentum, and a rounded copy or one to record from.
    work = 5 * parameters + teacher + int(recordings * activations)
    staging = STAGED_BATCHES * read * image if device.type == "cuda" else 0
    return StageMemory(images * image, RING_BATCHES[device.type] * read * image, staging, work)


def count_activation_bytes(engine: Engine, network: Network) -> float:
    """Bytes per image that a training step of the backbone keeps for its backward pass, counted on a few images."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    images = torch.zeros(COUNTED_IMAGES, 3, *engine.image_size, device=engine.device)
    images = images.contiguous(memory_format=engine.layout)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), engine.autocast(), torch.enable_grad():
        _held = network.backbone(images)  # in eval mode: no running statistic changes
    return sum(kept.values()) / COUNTED_IMAGES


def place_images(
    asked: ImagePlacement,
    engine: Engine,
    phases: Sequence[Phase],
    subject: str,
    memory: StageMemory,
    decoded: bool = False,
) -> tuple[Literal["resident", "streamed"], str]:
    """Where to put the images of a stage, and a sentence about it.

    asked: "auto" streams them if they do not fit into most of the device's free memory together with the work.
    subject: the images, for the sentence. decoded: they are decoded in every epoch, which only works batch by batch.
    """
    free = free_device_memory(engine.device) + engine.buffers.image_bytes
    where = "on the GPU" if engine.device.type == "cuda" else "of memory"
    reason = "as asked"
    if decoded:
        threads = decoding_threads()
        reason, asked = f"and decoded in every epoch, by {threads} thread{'s' * (threads > 1)}", "streamed"
    elif asked == "auto":
        asked = "resident" if memory.device("resident") <= MAX_SHARE * free else "streamed"
        taken = f"{memory.images / 1e9:.1f} GB of images and about {memory.work / 1e9:.1f} GB for the steps"
        reason = f"{taken}; {free / 1e9:.1f} GB are free {where}"
        if asked == "streamed" and needs_all_images(phases):
            raise EngramError(
                f"{subject} do not fit ({reason}), and this method cannot stream them; give a smaller "
                f"{option('image_size')} or {option('base')}"
            )
    if asked == "resident":
        _refuse_too_many(
            memory.images, free, f"{subject} need", where, f"leave out {option('images', 'resident')} to stream them"
        )
        return "resident", f"{subject} are all {where.replace('of', 'in')} ({reason})"
    _refuse_too_many(memory.ring, free, "the batches that are streamed need", where, "use smaller batches")
    return "streamed", f"{subject} are streamed batch by batch {reason if decoded else f'({reason})'}"


def _refuse_too_many(need: int, free: int, subject: str, where: str, advice: str) -> None:
    if need >= UNCHECKED_BYTES and need > MAX_SHARE * free:
        raise EngramError(f"{subject} {need / 1e9:.1f} GB {where}, and {free / 1e9:.1f} GB are free; {advice}")
