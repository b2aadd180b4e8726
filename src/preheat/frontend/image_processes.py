"""Decode images from clients in separate processes, with bounded time and memory."""

from __future__ import annotations

import pickle

import msgspec

from preheat.core import Image
from preheat.errors import InvalidRequest, WireError
from preheat.frontend.image_decoder import Decoder, TooManyPixels, samples
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


class _Answer(msgspec.Struct, array_like=True):
    """The result of a process: an image, an error, or the number of pixels if too many."""

    image: Image | None = None
    error: WireError | None = None
    pixels: int = 0


_decoded = msgspec.msgpack.Decoder(_Answer).decode
_frames = msgspec.msgpack.Decoder(tuple[bytes, bytes, int]).decode
_FRAMES = b"two frames of a video"


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
                helpers.run_on_each(sample)


def _helpers(decoder: Decoder, most: int, seconds: float) -> Helpers:
    config = pickle.dumps((decoder.config, decoder.max_pixels, most, decoder.video))
    memory = most * _BYTES_PER_PIXEL + _MORE_BYTES
    return Helpers(Kind("preheat.frontend.image_processes:make_work", config, seconds, memory), AT_ONCE)


def decode(helper: Helper, data: bytes | Frames) -> Image:
    """Return the image in ``data``. Raises InvalidRequest, with the reason, or TooManyPixels."""
    try:
        answer = _decoded(helper.run(_FRAMES + msgspec.msgpack.encode(data) if isinstance(data, Frames) else data))
    except HelperEnded as ended:
        said = {"time": "more CPU time", "memory": "more memory"}.get(ended.reason)
        reason = f"it takes {said} than an image of its size needs" if said else "its decoder failed"
        raise InvalidRequest(f"The image cannot be decoded: {reason}", param="messages") from ended
    if answer.error is not None:
        raise answer.error.restore()
    if answer.image is None:
        raise TooManyPixels(answer.pixels)
    return answer.image


# --- in a helper process ---


def make_work(config: bytes) -> Work:
    """Return the function that decodes a file, for a config of :func:`_helpers`."""
    pixel_config, max_pixels, most, video = pickle.loads(config)
    decoder = Decoder(pixel_config, max_pixels, video)

    def work(data: bytes) -> bytes:
        try:
            if data.startswith(_FRAMES):  # no file of an image begins so
                frames = Frames(*_frames(data[len(_FRAMES) :]))
                answer = _Answer(image=decoder.decode_frames(frames, most))
            else:
                answer = _Answer(image=decoder.decode(data, most))
        except TooManyPixels as error:
            answer = _Answer(pixels=error.pixels)
        except InvalidRequest as error:
            answer = _Answer(error=WireError.of(error))
        return msgspec.msgpack.encode(answer)

    return work
