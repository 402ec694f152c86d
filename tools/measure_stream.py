"""Measures ImageNet's size of training: python tools/measure_stream.py OUT.json FOLDER [--parts decode,steps,...]

FOLDER is one of tools/make_jpegs.py (or ImageNet itself). OUT.json is written after every part:

decode    files a second from JPEGs into the cache, and the seconds of a start with a finished cache
steps     images a second of the base stage's step, and of the step with a teacher after it, resident and streamed;
          the ratio; the peak of GPU memory beside its estimate, and of RAM
sharing   whether recordings that share memory give the same weights, and what they save
stem      the streamed steps with torch's stem in place of ours
profile   milliseconds of each kernel in the streamed steps
photographs  images a second if crops come from the JPEGs themselves (`--crops photograph`), and the cores that it takes
limited   the base stage streamed with `--gpu-gb` of GPU memory allowed: images a second, peaks; in a process of its own
resnet18  forward and backward passes of the backbone alone: torch's modules, recorded, and compiled by torch, with
          batches of 128 and 16; the share of the floor

    python tools/make_jpegs.py /scratch/jpegs
    python tools/measure_stream.py results/stream-h200.json /scratch/jpegs

Every time is a ratio to another of the same file, or an images-per-second of this machine with nothing else on it.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engram import recipe
from engram.core.io import write_json
from engram.core.provenance import hardware, processor_name, versions
from engram.data.sources.load import DataConfig, load_store
from engram.data.store import ImageStore
from engram.engine import Engine
from engram.engine.compiled import CompiledForward
from engram.experiment.image_placement import ImagePlacement
from engram.experiment.run_config import RunConfig
from engram.experiment.session import Session
from engram.experiment.stage_work import StageWork
from engram.nn.backbones import build_backbone

FLOPS_PER_IMAGE = 41.0e9  # forward and backward of `resnet18` at 224 pixels; with a teacher's forward pass 54.8e9
FLOPS_TAUGHT = 54.8e9
PEAK_FLOPS = 790e12  # of an H200 in bf16, by arithmetic
PROFILED_STEPS = 10
KERNELS = 40  # listed in a profile


def peaks(device: torch.device) -> dict[str, float]:
    """The most memory used so far, in GB: of the process, and of the GPU since `forget`."""
    used = {"ram_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    if device.type == "cuda":
        used |= {
            "gpu_allocated_gb": torch.cuda.max_memory_allocated(device) / 1e9,
            "gpu_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9,
        }
    return used


def forget(device: torch.device) -> None:
    """Frees what the last measurement held, and starts to count anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Measurement:
    """Shared by the parts: the options, the images and the recipe."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.config: RunConfig = replace(
            recipe(options.recipe),
            data=DataConfig(options.recipe.split("-")[1], str(options.folder), image_size=options.image_size),
            device=options.device,
        )
        if options.batch is not None:
            self.config = self.config.with_settings(train__batch_size=options.batch, finetune__batch_size=options.batch)
        self._store: ImageStore | None = None

    @property
    def store(self) -> ImageStore:
        if self._store is None:
            self._store = load_store(self.config.data)
        return self._store

    def decode(self) -> dict[str, Any]:
        started = time.perf_counter()
        store = load_store(self.config.data)
        first = time.perf_counter() - started
        started = time.perf_counter()
        self._store = load_store(self.config.data)
        again = time.perf_counter() - started
        files = len(store.train) + len(store.test)
        return {"files": files, "files_per_second": files / first, "seconds": first, "seconds_again": again}

    def steps(self) -> dict[str, Any]:
        resident, streamed = self._placed("resident"), self._placed("streamed")
        ratios = {
            kind: streamed[kind]["images_per_second"]["median"] / resident[kind]["images_per_second"]["median"]
            for kind in ("base", "teacher")
        }
        return {"resident": resident, "streamed": streamed, "streamed_to_resident": ratios}

    def sharing(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        weights: list[dict[str, torch.Tensor]] = []
        for shares in (False, True):
            Engine.shares_memory = shares
            part, session = self._measure("streamed", keep=True)
            assert session is not None
            weights.append({name: value.cpu().clone() for name, value in session.learner.network.state_dict().items()})
            found["shared" if shares else "separate"] = part
            del session
        found["equal"] = all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
        return found

    def stem(self) -> dict[str, Any]:
        CompiledForward.own_stem = False
        try:
            return self._placed("streamed")
        finally:
            CompiledForward.own_stem = True

    def profile(self) -> dict[str, Any]:
        return self._measure("streamed", profiled=True)[0]

    def photographs(self) -> dict[str, Any]:
        config, store = self.config, self._store
        self.config, self._store = replace(config, data=replace(config.data, crops="photograph")), None
        try:
            return self._placed("streamed")
        finally:
            self.config, self._store = config, store

    def limited(self) -> dict[str, Any]:
        if not torch.cuda.is_available():
            return {"left out": "there is no GPU to limit"}
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.options.gpu_gb * 1e9 / total))
        try:  # streamed, as ImageNet's own base stage would be
            return {"gpu_gb": self.options.gpu_gb, **self._placed("streamed")}
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def resnet18(self) -> dict[str, Any]:
        device = Session(self.config, self.store).engine.device
        side = self.config.augmentation.view_size(self.store.image_size)[0]
        found: dict[str, Any] = {}
        for batch in self.options.resnet_batches:
            for name, make in VARIANTS.items():
                forget(device)
                try:
                    seconds = self._time_passes(make, batch, side, device)
                except Exception as error:  # the others are still measured
                    traceback.print_exc()
                    found[f"{name}, {batch}"] = {"error": f"{type(error).__name__}: {error}"}
                    continue
                rate = batch / seconds
                share = rate * FLOPS_PER_IMAGE / PEAK_FLOPS
                found[f"{name}, {batch}"] = {"images_per_second": rate, "share_of_floor": share, **peaks(device)}
                print(f"  {name}, batches of {batch}: {rate:,.0f} images/s, {share:.0%} of the floor", flush=True)
        return found

    def _placed(self, placement: ImagePlacement) -> dict[str, Any]:
        return self._measure(placement)[0]

    def _measure(
        self, placement: ImagePlacement, keep: bool = False, profiled: bool = False
    ) -> tuple[dict[str, Any], Session | None]:
        """The step of the base stage, then the step with a teacher."""
        session = Session(self.config, self.store, placement)
        device = session.engine.device
        forget(device)
        plans = session.plan()
        found: dict[str, Any] = {"estimate": asdict(session.memory_of(plans[0]))}
        for index, kind in enumerate(("base", "teacher")):
            stage = session.stage(index)
            work = StageWork(session.method, session.learner, session.engine, stage, 2)
            session.method.grow(session.learner, stage, session.engine)
            phase = session.method.phases(session.learner, stage, session.engine)[0]
            loop = session.engine.start(session.learner, stage, phase, 0)
            steps = iter(loop)
            assert isinstance(steps, Generator)
            with closing(steps):
                rates, cores = self._time_steps(steps, loop.batch_size, device)
                kernels = self._profile(steps, device) if profiled else None
            flops = FLOPS_TAUGHT if index else FLOPS_PER_IMAGE
            median = sorted(rates)[len(rates) // 2]
            found[kind] = {
                "placement": session.placed,
                "images": len(stage.pool),
                "batch_size": loop.batch_size,
                "images_per_second": {"median": median, "min": min(rates), "max": max(rates), "n": len(rates)},
                "share_of_floor": median * flops / PEAK_FLOPS,
                "cores_busy": cores,
                **peaks(device),
            }
            if kernels is not None:
                found[kind]["milliseconds"] = kernels
            print(f"  {placement}, {kind}: {median:,.0f} images/s", flush=True)
            if index == 0:
                started = time.perf_counter()
                list(work.finish())  # importance, exemplars, class means, teacher
                synchronise(device)
                found["seconds_after_the_base_stage"] = time.perf_counter() - started
        return found, session if keep else None

    def _time_steps(self, steps: Iterator[None], batch_size: int, device: torch.device) -> tuple[list[float], float]:
        """Images a second of each repetition, and the cores that this process kept busy in them."""
        options, rates = self.options, list[float]()
        for _ in range(options.warm_up):
            next(steps)
        synchronise(device)
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(options.repetitions):
            started = time.perf_counter()
            for _ in range(options.steps):
                next(steps)
            synchronise(device)
            rates.append(options.steps * batch_size / (time.perf_counter() - started))
        return rates, (time.process_time() - cpu) / (time.perf_counter() - began)

    def _profile(self, steps: Iterator[None], device: torch.device) -> dict[str, Any]:
        """Milliseconds of a step: of all kernels, and of each (on a CPU, of operations); the longest first."""
        on_gpu = device.type == "cuda"
        activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
        synchronise(device)
        with torch.profiler.profile(activities=[activity]) as recorded:
            for _ in range(PROFILED_STEPS):
                next(steps)
            synchronise(device)
        spent: dict[str, float] = {
            str(each.key): (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1000 / PROFILED_STEPS
            for each in recorded.key_averages()
        }
        longest = sorted(spent, key=spent.__getitem__, reverse=True)[:KERNELS]
        return {
            "all": round(sum(spent.values()), 4),
            "by_kernel": {name[:120]: round(spent[name], 4) for name in longest},
        }

    def _time_passes(self, make: Callable[..., Callable[[], object]], batch: int, side: int, device: Any) -> float:
        """Seconds of one forward and backward pass."""
        step = make(batch, side, device)
        for _ in range(5):
            step()
        synchronise(device)
        started = time.perf_counter()
        for _ in range(self.options.passes):
            step()
        synchronise(device)
        return (time.perf_counter() - started) / self.options.passes


def backbone_pass(batch: int, side: int, device: torch.device, compiled: str | None = None) -> Callable[[], object]:
    """A forward and backward pass of the backbone in bf16 and channels-last, as the engine makes them."""
    backbone = build_backbone("resnet18", torch.Generator().manual_seed(0))
    backbone = backbone.train().to(device)
    for weight in backbone.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    images = torch.rand(batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    forward = backbone if compiled is None else torch.compile(backbone, mode=compiled)

    def step() -> object:
        for parameter in backbone.parameters():
            parameter.grad = None
        with torch.autocast(device.type, torch.bfloat16):
            maps, embedding = forward(images)
        (embedding.float().square().mean() + sum(each.float().square().mean() for each in maps)).backward()
        return embedding

    return step


def recorded_pass(batch: int, side: int, device: torch.device) -> Callable[[], object]:
    """The same as a CUDA graph."""
    step = backbone_pass(batch, side, device)
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


VARIANTS: dict[str, Callable[..., Callable[[], object]]] = {
    "modules": backbone_pass,
    "modules, recorded": recorded_pass,
    "compiled": lambda *where: backbone_pass(*where, compiled="default"),
    "compiled, recorded": lambda *where: backbone_pass(*where, compiled="reduce-overhead"),
    "compiled, tuned": lambda *where: backbone_pass(*where, compiled="max-autotune"),
}
PARTS = ("decode", "steps", "sharing", "stem", "profile", "photographs", "limited", "resnet18")


@contextmanager
def in_part(record: dict[str, Any], part: str, out: Path) -> Iterator[None]:
    """Keeps what the other parts measured if this one fails."""
    print(f"measuring: {part}", flush=True)
    started = time.perf_counter()
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        record[part] = {"error": f"{type(error).__name__}: {error}"}
    print(f"{part} took {time.perf_counter() - started:.0f} s", flush=True)
    write_json(out, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--recipe", default="afc-imagenet1000-b500-s10")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--batch", type=int, help="images of a batch, such as 16: what one of eight GPUs would do")
    parser.add_argument("--gpu-gb", type=float, default=24.0)
    parser.add_argument("--warm-up", type=int, default=30)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--passes", type=int, default=50)
    parser.add_argument("--resnet-batches", type=int, nargs="*", default=[128, 16])
    options = parser.parse_args()
    measurement = Measurement(options)
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else processor_name()
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(device, name, torch.get_num_threads()) | {"cores": os.cpu_count()},
        "versions": versions(),
    }
    for part in options.parts.split(","):
        with in_part(record, part, options.out):
            record[part] = getattr(measurement, part)()


if __name__ == "__main__":
    main()
