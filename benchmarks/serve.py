"""`engram serve` under load: python -m benchmarks.serve [--seconds 60] [--connections 64] [--out FILE.json]

Clients send single images over connections that stay open, each the next one when it has its answer. In each round
`engram predict` reads the same images while the server is idle, and then the clients send them. After the last round a
lesson is taught while the clients go on. Server, clients and command share the cores of this machine. The clients are
plain sockets in one process of their own; the seconds of CPU that they take are recorded beside the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.scale import FULL
from benchmarks.timing import spread
from engram.core.io import write_json
from engram.core.provenance import hardware, processor_name, versions
from engram.core.rng import generator
from engram.models.learning import learn_into
from engram.models.model_config import ModelConfig

TARGET = 0.8
CLASSES, PER_CLASS = 6, 10
NEW = ("new a", "new b")
BOUNDARY = "engram-benchmark"
KINDS = {
    "small": "32x32 PNG, resnet32, 32x32 pixels",
    "photographs": "640x480 JPEG, a pretrained network at its own size (lda)",
}


def picture(kind: str, number: int, label: int) -> bytes:
    """An image file: a smooth pattern of its class under noise."""
    draw = generator(1, "benchmark", label, number)
    side, high = (32, 32) if kind == "small" else (640, 480)
    coarse = torch.randint(0, 256, (6, 8, 3), generator=generator(1, "class", label), dtype=torch.uint8).numpy()
    image = np.asarray(Image.fromarray(coarse).resize((side, high), Image.Resampling.BICUBIC)).astype(np.int64)
    noise = torch.randint(-20, 21, (high, side, 3), generator=draw).numpy()
    file = io.BytesIO()
    Image.fromarray((image + noise).clip(0, 255).astype(np.uint8)).save(file, "PNG" if kind == "small" else "JPEG")
    return file.getvalue()


def make_model(path: Path, kind: str, threads: int | None) -> None:
    """A model that has learned CLASSES classes."""
    folder = path.parent / "learned"
    paths, labels = [], []
    for label in range(CLASSES):
        for number in range(PER_CLASS):
            file = folder / f"{label}-{number}.img"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(picture(kind, number, label))
            paths.append(str(file))
            labels.append(f"class {label}")
    config: Any = {"validation": 0.2}
    if kind == "small":
        config = ModelConfig.choose(
            "afc", image_size=32, images=len(paths), backbone=FULL.backbone, validation=0.2, epochs=1, device="cpu"
        )
    if threads:
        torch.set_num_threads(threads)
    for _ in learn_into(path, paths, labels, config=config, device="cpu"):
        pass


@dataclass
class Load:
    """What clients saw. seconds: of each request. problems: how often each happened."""

    seconds: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    span: float = 0.0

    def summary(self) -> dict[str, Any]:
        values = np.array(self.seconds) if self.seconds else np.zeros(1)
        return {
            "images": len(self.seconds),
            "seconds": self.span,
            "images_per_second": len(self.seconds) / self.span,
            "milliseconds": {f"p{part}": 1000 * float(np.percentile(values, part)) for part in (50, 90, 99)},
            "failed": dict(self.problems),
        }


def request_bytes(host: str, model: str, name: str, content: bytes) -> bytes:
    """A whole HTTP request with one image."""
    body = (
        (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        + content
        + f"\r\n--{BOUNDARY}--\r\n".encode()
    )
    head = (
        f"POST /api/v1/models/{model}/predict?top=1 HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def client(
    address: tuple[str, int], requests: Sequence[bytes], first: int, load: Load, until: list[float]
) -> None:
    """Send requests one after the other until the time is over."""
    reader, writer = await asyncio.open_connection(*address)
    number = first
    try:
        while time.perf_counter() < until[0]:
            started = time.perf_counter()
            writer.write(requests[number % len(requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 200 "):
                load.problems[head.partition(b"\r\n")[0].decode()] += 1
            elif b'"error"' in body:
                load.problems["an image was refused"] += 1
            else:
                load.seconds.append(time.perf_counter() - started)
            number += 1
    except (OSError, asyncio.IncompleteReadError) as error:
        load.problems[type(error).__name__] += 1
    finally:
        writer.close()


async def put_load(address: tuple[str, int], requests: Sequence[bytes], connections: int, until: list[float]) -> Load:
    """Send requests over that many connections until a time, which may be moved meanwhile."""
    load, started = Load(), time.perf_counter()
    await asyncio.gather(*(client(address, requests, 7 * number, load, until) for number in range(connections)))
    load.span = time.perf_counter() - started
    return load


def command_rate(model: Path, files: Path, threads: int | None) -> tuple[float, float, float]:
    """Images a second of `engram predict`, from its first answers to its last; its milliseconds of CPU for an image;
    and how many cores something else took meanwhile."""
    flags = [] if threads is None else ["--threads", str(threads)]
    command = [sys.executable, "-m", "engram", "predict", str(model), str(files), "--quiet", *flags]
    times: list[float] = []
    marks: list[tuple[int, float, float]] = []  # images, and its and all seconds of CPU, when a batch's first line came
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            times.append(time.perf_counter())
            if len(times) == 1 or times[-1] - times[-2] > 0.005:
                with suppress(OSError):  # it ends
                    marks.append((len(times), cpu_seconds(process.pid), machine_seconds()))
    first = sum(at <= times[0] + 0.02 for at in times)  # the first batch: started before its lines came
    one, last = marks[0], marks[-2]  # at the last batch its processes may be gone
    images, own, everything = (b - a for a, b in zip(one, last, strict=True))
    others = (everything - own) / (times[last[0] - 1] - times[0])
    return (len(times) - first) / (times[-1] - times[0]), 1000 * own / images, others


def memory_of(process: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def call(url: str, data: Any = None, method: str | None = None, boundary: str | None = None) -> Any:
    """The answer of the API as JSON."""
    kind = "application/json" if boundary is None else f"multipart/form-data; boundary={boundary}"
    body = data if isinstance(data, bytes) or data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def add_to_draft(url: str, kind: str) -> None:
    """Upload the images of two new classes."""
    for place, name in enumerate(NEW, start=CLASSES):
        parts = [f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="class"\r\n\r\n{name}\r\n'.encode()]
        for number in range(PER_CLASS):
            head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{number}"\r\n\r\n'
            parts.append(head.encode() + picture(kind, number, place) + b"\r\n")
        call(f"{url}/draft/images", b"".join(parts) + f"--{BOUNDARY}--\r\n".encode(), boundary=BOUNDARY)


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """The load on one kind of model and images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, files = folder / "model", folder / "files"
        make_model(model, kind, options.threads)
        files.mkdir()
        contents = [picture(kind, 1000 + number, number % CLASSES) for number in range(options.files)]
        for number, content in enumerate(contents):
            (files / f"{number:05d}.{'png' if kind == 'small' else 'jpg'}").write_bytes(content)
        flags = [] if options.threads is None else ["--threads", str(options.threads)]
        command = [sys.executable, "-m", "engram", "serve", str(model), "--no-browser", "--json", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                found = under_load(server, kind, model, files, options)
            finally:
                server.terminate()
    shares = spread([part["of_predict"] for part in found["rounds"]])
    failed = any(part["failed"] for part in [*found["rounds"], found["during_lesson"]])
    return {
        "what": KINDS[kind],
        "files": options.files,
        "share_of_predict": shares,
        "target": TARGET,
        "within_target": shares["median"] >= TARGET and not failed,
        **found,
    }


def under_load(
    server: subprocess.Popen[str], kind: str, model: Path, files: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Rounds of command and load, then load during a lesson; and the memory of the server."""
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["address"]
    host = url.removeprefix("http://").rstrip("/")
    address = (host.partition(":")[0], int(host.partition(":")[2]))
    requests = [request_bytes(host, "model", file.name, file.read_bytes()) for file in sorted(files.iterdir())]
    place = f"{url}api/v1/models/model"

    def load_for(seconds: float) -> Load:
        return asyncio.run(put_load(address, requests, options.connections, [time.perf_counter() + seconds]))

    load_for(options.warm_up)
    memory = {"after_warm_up": memory_of(server.pid)}
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        rate, alone, beside = command_rate(model, files, options.threads)
        before = cpu_seconds(server.pid), time.process_time(), machine_seconds()
        load = load_for(options.seconds)
        after = cpu_seconds(server.pid), time.process_time(), machine_seconds()
        count = max(1, len(load.seconds))
        server_cpu, clients_cpu, all_cpu = (b - a for a, b in zip(before, after, strict=True))
        rounds.append(
            {
                "engram_predict_images_per_second": rate,
                **load.summary(),
                "of_predict": count / load.span / rate,
                "cpu_milliseconds_per_image": {
                    "engram_predict": alone,
                    "server": 1000 * server_cpu / count,
                    "clients": 1000 * clients_cpu / count,
                },
                "cores_taken_by_others": {
                    "engram_predict": beside,
                    "load": (all_cpu - server_cpu - clients_cpu) / load.span,
                },
                "memory_bytes_after": memory_of(server.pid),
            }
        )
    add_to_draft(place, kind)
    states: list[str] = []

    async def during() -> Load:
        until = [float("inf")]

        async def teach() -> None:
            await asyncio.to_thread(call, f"{place}/lesson", {"epochs": 2} if kind == "small" else {}, "POST")
            end = time.perf_counter() + options.lesson_seconds
            while True:
                await asyncio.sleep(0.5)
                states.append((await asyncio.to_thread(call, f"{place}/lesson"))["state"])
                if states[-1] != "running" or time.perf_counter() > end:
                    break
            until[0] = time.perf_counter() + 2.0

        load, _ = await asyncio.gather(put_load(address, requests, options.connections, until), teach())
        return load

    busy_load = asyncio.run(during())
    memory["after_lesson"] = memory_of(server.pid)
    return {
        "rounds": rounds,
        "during_lesson": busy_load.summary() | {"lesson": states[-1], "generation": call(place)["generation"]},
        "memory_bytes": memory,
    }


def machine_seconds() -> float:
    """Seconds of CPU of everything on this machine."""
    user, nice, system, _, _, interrupts, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: int) -> float:
    """Seconds of CPU of a process and of the processes that it started."""
    total = 0
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            total += _ticks(int(child))
    return (total + _ticks(process)) / os.sysconf("SC_CLK_TCK")


def _ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if every target was reached."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description="engram serve under load")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of load in each round")
    parser.add_argument("--lesson-seconds", type=float, default=600.0, help="to wait for the end of the lesson")
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    found = {kind: measure(kind, options) for kind in options.kinds}
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.serve", *given]),
        "versions": versions() | {name: _version(name) for name in ("fastapi", "uvicorn", "httptools")},
        "hardware": hardware("cpu", processor_name(), options.threads or torch.get_num_threads()),
        "connections": options.connections,
        **found,
    }
    print(json.dumps(record, indent=1))
    if options.out is not None:
        write_json(options.out, record)
    return 0 if all(part["within_target"] for part in found.values()) else 1


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    sys.exit(main())
