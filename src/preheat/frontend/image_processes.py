"""Decode images from clients in separate processes, with bounded time and memory."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from preheat.core import Image
from preheat.errors import InvalidRequest, WireError
from preheat.frontend.image_decoder import Decoder, TooManyPixels, TooManyPositions, samples
from preheat.frontend.video import Frames
from preheat.utils.helper import Helper, HelperEnded, Helpers, Kind, Work

SMALL_SHARE = 4
"""Divisor of the allowed pixels: an image with at most this share of them is small."""

AT_ONCE = 2
"""Processes for small images, and as many for large images."""

SMALL_SECONDS, LARGE_SECONDS = 2.0, 10.0
"""CPU seconds that an image may take: several times the time of the slowest ordinary image."""

_BYTES_PER_PIXEL = 32  # of the copies made by decoding, turning and removing transparency
_MORE_BYTES = 1 << 28  # the file, its metadata, and a decoder's other memory


class _Job(msgspec.Struct, array_like=True):
    """A file, or two frames of a video of ``total`` frames, and the positions that are left for it."""

    room: int | None
    data: bytes
    second: bytes | None = None
    total: int = 0


class _Answer(msgspec.Struct, array_like=True):
    """The result of a process: an image, an error, or the number of pixels or positions if too many."""

    image: Image | None = None
    error: WireError | None = None
    pixels: int = 0
    positions: int = 0


_asked = msgspec.msgpack.Decoder(_Job).decode
_decoded = msgspec.msgpack.Decoder(_Answer).decode


class ImageProcesses:
    """Processes that decode as ``decoder`` does: some for images of at most ``small_pixels``, some for larger ones."""

    def __init__(self, decoder: Decoder) -> None:
        self.max_pixels, self.small_pixels = decoder.max_pixels, decoder.max_pixels // SMALL_SHARE
        self.small = _helpers(decoder, self.small_pixels, SMALL_SECONDS)
        self.large = _helpers(decoder, self.max_pixels, LARGE_SECONDS)

    def warm_up(self) -> None:
        """Start all processes and load every decoder in them."""
        for helpers in (self.small, self.large):
            for sample in samples():
                helpers.run_on_each(job_of(sample, None))


def _helpers(decoder: Decoder, most: int, seconds: float) -> Helpers:
    config = pickle.dumps((decoder.config, decoder.max_pixels, most, decoder.video))
    memory = most * _BYTES_PER_PIXEL + _MORE_BYTES
    return Helpers(Kind("preheat.frontend.image_processes:make_work", config, seconds, memory), AT_ONCE)


def job_of(data: bytes | Frames, room: int | None) -> bytes:
    """Return the job of a helper that decodes ``data`` into at most ``room`` positions."""
    parts: Any = (data.first, data.second, data.total) if isinstance(data, Frames) else (data,)
    return msgspec.msgpack.encode(_Job(room, *parts))


def decode(helper: Helper, data: bytes | Frames, room: int | None = None) -> Image:
    """Return the image in ``data``.

    Raises InvalidRequest, with the reason, TooManyPixels, or TooManyPositions for more than ``room``.
    """
    try:
        answer = _decoded(helper.run(job_of(data, room)))
    except HelperEnded as ended:
        said = {"time": "more CPU time", "memory": "more memory"}.get(ended.reason)
        reason = f"it takes {said} than an image of its size needs" if said else "its decoder failed"
        raise InvalidRequest(f"The image cannot be decoded: {reason}", param="messages") from ended
    if answer.error is not None:
        raise answer.error.restore()
    if answer.positions:
        raise TooManyPositions(answer.positions)
    if answer.image is None:
        raise TooManyPixels(answer.pixels)
    return answer.image


# --- in a helper process ---


def make_work(config: bytes) -> Work:
    """Return the function that decodes a file, for a config of :func:`_helpers`."""
    pixel_config, max_pixels, most, video = pickle.loads(config)
    decoder = Decoder(pixel_config, max_pixels, video)

    def work(data: bytes) -> bytes:
        job = _asked(data)
        try:
            if job.second is None:
                answer = _Answer(image=decoder.decode(job.data, most, job.room))
            else:
                frames = Frames(job.data, job.second, job.total)
                answer = _Answer(image=decoder.decode_frames(frames, most, job.room))
        except TooManyPixels as error:
            answer = _Answer(pixels=error.pixels)
        except TooManyPositions as error:
            answer = _Answer(positions=error.positions)
        except InvalidRequest as error:
            answer = _Answer(error=WireError.of(error))
        return msgspec.msgpack.encode(answer)

    return work
