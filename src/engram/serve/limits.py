"""Limits of what a request may send, and the error of a request that is refused."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.exceptions import HTTPException


@dataclass(frozen=True)
class Limits:
    """Limits of requests and of drafts. Images are also bounded by the decoder (`data/decode/image.py`).

    files, file_bytes, request_bytes: of one upload. json_bytes: of a JSON body with images; json_other: of any other.
    spool_bytes, memory_bytes: of all uploads that are being received at the same time, in all and in memory.
    waiting_images: accepted for prediction and not answered yet. requests: predictions at the same time.
    draft_images, draft_bytes: of all images that wait to be taught to one model.
    header_seconds, header_bytes: of a header. idle_seconds: between two parts of a body. body_seconds: for a whole
    body, and one second more for each `slowest` bytes.
    streams: clients that follow lessons at the same time. connections: at the same time.
    decode_seconds: to decode one image.
    """

    files: int = 500
    file_bytes: int = 64 * 2**20
    request_bytes: int = 512 * 2**20
    json_bytes: int = 64 * 2**20
    json_other: int = 2**20
    spool_bytes: int = 2 * 2**30
    memory_bytes: int = 256 * 2**20
    waiting_images: int = 2048
    requests: int = 512
    draft_images: int = 20_000
    draft_bytes: int = 20 * 2**30
    header_seconds: float = 10.0
    header_bytes: int = 32 * 2**10
    idle_seconds: float = 10.0
    body_seconds: float = 30.0
    slowest: int = 16 * 2**10
    streams: int = 64
    connections: int = 1024
    decode_seconds: float = 60.0


class Refused(HTTPException):
    """A request that is answered with a status and one sentence."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, sentence, headers)


def busy(sentence: str) -> Refused:
    """Return the error of a server that has too much to do now."""
    return Refused(503, sentence, {"Retry-After": "1"})
