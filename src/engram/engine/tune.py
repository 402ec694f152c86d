"""Tuning of images: steps of an optimiser on pixels, with gradients through a network that does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from engram.contract.batch_plan import BatchPlan
from engram.contract.learner import Learner
from engram.contract.optimisers import SGD, find_optimiser, new_state
from engram.contract.passes import ImageTuningStep
from engram.contract.settings import Training
from engram.core.errors import EngramError
from engram.data.augment import apply, to_unit
from engram.data.image_rows import Pixels, read_pixels
from engram.data.stage import Stage
from engram.engine.planning import plan_epochs
from engram.engine.runtime import Runtime
from engram.nn.network import Network

# Pixels in one pass with gradients. More images are split into parts, which the backward pass computes again.
GRADIENT_PIXELS = {"cpu": 512 * 32 * 32, "cuda": 2048 * 32 * 32}


def tune(
    runtime: Runtime,
    learner: Learner,
    stage: Stage,
    images: Pixels,
    rows: Tensor,
    objective: Callable[[ImageTuningStep], Tensor],
    training: Training,
    purpose: str,
) -> Tensor:
    """See `Passes.tune`. Returns levels from 0 to 255, on the CPU.

    Uses torch's modules in float32 (TF32 if that is the engine's precision).
    """
    assert len(rows) > 0, "tuning images needs at least one row"
    network, device = learner.network, runtime.device
    start = to_unit(read_pixels(images).to(device)).contiguous(memory_format=runtime.layout)
    # The change is kept apart from the image: added to it, changes far below one level would be rounded away.
    change, momentum = torch.zeros_like(start), torch.zeros_like(start)
    rule = find_optimiser(training.optimiser)
    held = {} if isinstance(rule, SGD) else new_state(rule, change.flatten())
    normalised = (start - network.mean) / network.std
    assert not network.training
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    passes = partial(_passes, network, parameters, GRADIENT_PIXELS[device.type])
    labels, (steps, size) = stage.pool.labels.to(device), training.batches(len(rows))
    for epoch in range(training.epochs):
        named = (stage.index, "tune", purpose)
        seen = runtime.image_size
        epochs = range(epoch, epoch + 1)
        plan = plan_epochs(training, runtime.augmentation, rows, epochs, named, learner.seed, image_size=seen)
        on_device = BatchPlan.allocate(steps, size, device, runtime.augmentation.numbers)
        on_device.load(plan)
        counter = torch.zeros(1, dtype=torch.int64, device=device)
        for step in range(steps):
            picked = plan.rows[step, : min(size, len(rows) - step * size)]
            padded, places = runtime.buffers.batch_images(stage, picked)
            draws = on_device.row(counter, len(picked))[1]
            batch = apply(runtime.augmentation, padded, places, draws, runtime.image_size)
            batch = batch.contiguous(memory_format=runtime.layout)
            with torch.enable_grad():
                learned = change.requires_grad_()
                tuned = start + learned * network.std
                seen = ImageTuningStep(tuned, batch, labels[picked], parameters, passes)
                (gradient,) = torch.autograd.grad(objective(seen), learned)
            change = change.detach()
            if training.clip is not None:
                gradient = gradient.clamp(-training.clip, training.clip)
            if isinstance(rule, SGD):
                momentum = training.momentum * momentum + gradient + training.weight_decay * (normalised + change)
                direction = momentum
            else:
                values = (normalised + change).flatten()
                direction = rule.direction(values, gradient.flatten(), held, training).view(change.shape)
            change = change - on_device.learning_rate(counter) * direction
            counter += 1
    if not bool(change.isfinite().all()):
        raise EngramError(
            f"the tuned exemplars of stage {stage.index} are not finite; nothing was saved after the training of the "
            f"stage: try a lower learning rate than {training.lr:g} for the exemplars"
        )
    return read_pixels(images).float() + (255 * network.std * change).permute(0, 2, 3, 1).cpu()


def _passes(
    network: Network, parameters: Mapping[str, Tensor], pixels: int, images: Tensor, changed: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Embedding and logits of the images with some parameters changed, in parts of at most `pixels` pixels."""
    held = {**parameters, **changed}

    def part(images: Tensor) -> tuple[Tensor, Tensor]:
        output = functional_call(network, held, (images,))
        return output.embedding, output.logits

    size = max(1, pixels // (images.shape[2] * images.shape[3]))
    if len(images) <= size:
        return part(images)
    parts = [checkpoint(part, some, use_reentrant=False) for some in images.split(size)]
    return torch.cat([embedding for embedding, _ in parts]), torch.cat([logits for _, logits in parts])
