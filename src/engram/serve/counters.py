"""Counters of the server in Prometheus' text format."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: Labels) -> Iterable[str]:
        """Yield the lines of Prometheus' text format."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            limit = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f"{name}_bucket{_braces({**labels, 'le': limit})} {below}"
        yield f"{name}_sum{_braces(labels)} {self.total:.9g}"
        yield f"{name}_count{_braces(labels)} {below}"


class Metrics:
    """Counters of the server's work. Every method may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._images: Counter[str] = Counter()
        self._batches: dict[str, Histogram] = {}

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        with self._lock:
            self._requests[method, route, status] += 1
            self._seconds.setdefault(route, Histogram(LATENCIES)).add(seconds)

    def batch(self, model: str, images: int) -> None:
        """Count a batch of predictions."""
        with self._lock:
            self._images[model] += images
            self._batches.setdefault(model, Histogram(BATCHES)).add(images)

    def text(self, gauges: Iterable[tuple[str, str, Labels, float]]) -> str:
        """Return everything as text. gauges: name, help, labels and value of what is so at the moment."""
        with self._lock:
            lines = [*_head("engram_http_requests_total", "counter", "Requests by route and status.")]
            for (method, route, status), count in sorted(self._requests.items()):
                labels = {"method": method, "route": route, "status": str(status)}
                lines.append(f"engram_http_requests_total{_braces(labels)} {count}")
            lines += _head("engram_http_request_seconds", "histogram", "Seconds from a request to its answer.")
            for route, histogram in sorted(self._seconds.items()):
                lines += histogram.lines("engram_http_request_seconds", {"route": route})
            lines += _head("engram_images_predicted_total", "counter", "Images predicted.")
            for model, count in sorted(self._images.items()):
                lines.append(f"engram_images_predicted_total{_braces({'model': model})} {count}")
            lines += _head("engram_batch_images", "histogram", "Images in a batch of predictions.")
            for model, histogram in sorted(self._batches.items()):
                lines += histogram.lines("engram_batch_images", {"model": model})
        seen: set[str] = set()
        for name, about, labels, value in gauges:
            lines += _head(name, "gauge", about) if name not in seen else ()
            seen.add(name)
            lines.append(
                f"{name}{_braces(labels)} {value:g}" if value < 1e6 else f"{name}{_braces(labels)} {value:.0f}"
            )
        return "\n".join(lines) + "\n"


def resident_bytes(process: int | str = "self") -> int:
    """Return the resident memory of a process in bytes; 0 if the system does not say."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _braces(labels: Labels) -> str:
    parts = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(parts)}}}" if parts else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
