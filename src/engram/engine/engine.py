"""Engine: runs phases, sweeps and inference on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engram.contract.learner import Learner
from engram.contract.phase import Phase, Step
from engram.core.errors import EngramError, described
from engram.data.image_rows import Pixels
from engram.data.stage import Stage
from engram.engine.capture import CapturedStep
from engram.engine.forward import Inference
from engram.engine.loop import PhaseLoop, PhaseState
from engram.engine.planning import plan_sweep
from engram.engine.runtime import Runtime
from engram.engine.sensitivity import sensitivity
from engram.engine.tune import tune
from engram.nn.network import Network
from engram.nn.views import View


class Engine(Runtime):
    """Executes phases, and the passes that a method may use (`Passes`), on one device at one precision."""

    def start(
        self,
        learner: Learner,
        stage: Stage,
        phase: Phase,
        index: int,
        resume: PhaseState | None = None,
        reads_maps: bool = True,
    ) -> PhaseLoop:
        """A loop over the steps of a phase (number `index` of the stage), from its start or from a saved state.

        reads_maps: whether the loss reads feature maps; if not, several processes do not exchange them.
        """
        return PhaseLoop(self, learner, stage, phase, index, resume, reads_maps)

    def inference(self, network: Network) -> Inference:
        """Inference with the network's current weights."""
        return Inference(self, network)

    def infer(self, network: Network, images: Pixels, mirror: bool = False) -> tuple[Tensor, Tensor]:
        """Embeddings (N, D) and scores (N, K) of uint8 images (N, H, W, 3) in eval mode."""
        return self.inference(network)(images, mirror)

    def embed(self, network: Network, images: Pixels, mirror: bool = False) -> Tensor:
        """Embeddings (N, D) of uint8 images (N, H, W, 3) in eval mode, not normalised."""
        return torch.cat([output.embedding for output in self.inference(network).outputs(images, View(mirror))])

    def features(
        self, network: Network, images: Pixels, mirror: bool = False, shift: tuple[int, int] = (0, 0)
    ) -> Tensor:
        """The inputs of the head (N, D') for uint8 images (N, H, W, 3) in eval mode."""
        outputs = self.inference(network).outputs(images, View(mirror, *shift))
        return torch.cat([output.features for output in outputs if output.features is not None])

    def sweep(
        self,
        learner: Learner,
        stage: Stage,
        rows: Tensor,
        visit: Callable[[Step], Sequence[Tensor]],
        batch_size: int,
    ) -> list[Tensor]:
        """See `Passes.sweep`.

        Every image is used once; the last batch may be smaller. (A single last image is left out if
        `drops_last_image` says so.) The running statistics change, as in the released code.
        """
        assert len(rows) > 0, "a sweep needs at least one row"
        size = min(batch_size, len(rows))
        full, rest = divmod(len(rows), size)
        if self.drops_last_image(learner.network, size, rest or size):
            rest = 0
        forward = self.bind(learner, size)
        forward.refresh()
        buffers = self.buffers
        processes = self.processes
        parts = [*[processes.share(size).own] * full, *[processes.share(rest).own] * bool(rest)]
        pool = buffers.pool(stage, max(part.stop - part.start for part in parts))
        plan, counter = buffers.plan(full + 1, size), buffers.counter
        seen, of_files = self.image_size, buffers.photographs is not None
        planned = plan_sweep(self.augmentation, rows, size, stage.index, learner.seed, seen, of_files)
        plan.load(planned)
        arrival = buffers.arrival(stage, learner.network.head.capacity)

        def take(size: int, totals: list[Tensor]) -> list[Tensor]:
            share = processes.share(size)
            if share.is_split:
                images = forward.images(pool, plan.part(counter, share.own), buffers.first_step, share.count)
            else:
                images = forward.images(pool, plan, counter, size)
            with self.synchronised(share):
                output = forward.student(images, train_backbone=True)
            picked = plan.rows.index_select(0, counter)[0, :size][share.own]
            labels, exemplar = pool.labels[picked], pool.exemplar[picked]
            sums = visit(
                Step(labels, exemplar, output, None, {}, learner.buffers, arrival=arrival, stage=buffers.stage)
            )
            if not isinstance(sums, (list, tuple)) or not all(isinstance(value, Tensor) for value in sums):
                raise EngramError(
                    f"the visit of a sweep must return a list of tensors, sums over the images, but it returned "
                    f"{described(sums)}; with names, keep them in an order of your own"
                )
            if not totals:
                totals += [torch.zeros_like(value) for value in sums]
            for total, value in zip(totals, sums, strict=True):
                # A batch that is not split is counted by each of several processes.
                once = share.is_split or processes.count == 1
                total += value.detach() if once else value.detach() / processes.count
            counter.add_(1)
            return totals

        counter.zero_()
        what = "the sweep after a stage"
        with learner.network.in_training(), buffers.feeding(stage, plan, planned, parts) as next_images:
            step = self.record(("sweep", size), (visit, size), partial(take, size, []), learner, what)
            if isinstance(step, CapturedStep):
                for total in step.returned:
                    total.zero_()
            else:
                step = partial(take, size, [])  # with new sums: the attempt to record may have added to the others
            totals: list[Tensor] = []
            for _ in range(full):
                with next_images():
                    totals = step()
            totals = [total.clone() for total in totals]
            if rest:
                with next_images():
                    totals = take(rest, totals)
            self.average_norms(learner.network)
            return [processes.sum(total) for total in totals]

    # See `Passes`.
    sensitivity = sensitivity
    tune = tune
