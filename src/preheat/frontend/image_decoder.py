"""Decode images into the model's form with Pillow and numpy. No torch here, nor the model.

Pixels are equal to those of transformers' image processor of the Pillow backend. Transparency is put on white, then the
image is converted to RGB. The shortest side is resized and the center is cropped, black where the image ends. Values
are rescaled in float64, rounded to float32, less the mean, divided by the deviation. A value has 8 bits, so the last
steps are a table.

An image's hash is the hash of the encoder's input: the 8-bit pixels after the crop, the processor's config, and the
grid of an image of any size. The sender's words about the image are not part of it.

The cost of an image is checked before it is decoded: its pixels, its positions in a prompt and, for a JPEG,
its scans. Each scan goes over all pixels once more, however few bytes it has.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from hashlib import blake2b

import numpy as np
import PIL.Image
import PIL.ImageOps

from preheat.core import Image
from preheat.errors import InvalidRequest
from preheat.frontend.grid_config import GridConfig
from preheat.frontend.image_config import PixelConfig
from preheat.frontend.video import FRAMES, Frames, VideoConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are decoded. Pillow knows more, and starts programs for some of them."""

MAX_SCANS = 64
"""Most scans of a JPEG. Encoders write about ten; one for each bit of each color would be 42."""

HASH_BYTES = 16

Size = Callable[[int, int], tuple[int, int]]
"""Returns width and height after resizing."""

_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)  # RST and stuffed bytes are within a scan
_JPEG = b"\xff\xd8"
_SOI, _EOI, _SOS, _FIRST_WITH_LENGTH = 0xD8, 0xD9, 0xDA, 0xC0
_MOST_MARKERS = 100_000


class TooManyPixels(Exception):
    """An image with more ``pixels`` than may be decoded in this process."""

    def __init__(self, pixels: int) -> None:
        super().__init__(pixels)
        self.pixels = pixels


class TooManyPositions(Exception):
    """An image that takes more ``positions`` of its prompt than are left."""

    def __init__(self, positions: int) -> None:
        super().__init__(positions)
        self.positions = positions


class Decoder:
    """Decoder of files by ``config``, of at most ``max_pixels`` before and after resizing.

    Frames of a video have the sizes that ``video`` says; None for a model that sees no videos.
    """

    def __init__(self, config: PixelConfig | GridConfig, max_pixels: int, video: VideoConfig | None = None) -> None:
        self.config, self.max_pixels, self.video = config, max_pixels, video
        self._table, self._name = config.table(), json.dumps(asdict(config)).encode()

    def decode(self, data: bytes | PIL.Image.Image, most: int | None = None, room: int | None = None) -> Image:
        """Return a file, or an image, in the model's form.

        Raises InvalidRequest, with the reason, if it cannot be decoded. Raises TooManyPixels if a file has more than
        ``most`` pixels, TooManyPositions if an image takes more than ``room`` positions.
        """
        return self._decoded(data, most, room, self.config.size_of)

    def decode_frames(self, frames: Frames, most: int | None = None, room: int | None = None) -> Image:
        """Return two frames of a video, each a file or an image, as one image. Raises as :meth:`decode` does."""
        video = self.video
        if video is None:
            raise InvalidRequest("The model sees no videos: send images, or text alone", param="messages")

        def size(width: int, height: int) -> tuple[int, int]:
            return video.size_of(width, height, frames.total)

        half = self.max_pixels // FRAMES if most is None else most // FRAMES
        try:
            first, second = (self._decoded(each, half, room, size) for each in (frames.first, frames.second))
        except TooManyPixels as error:
            if FRAMES * error.pixels <= self.max_pixels:
                raise TooManyPixels(FRAMES * error.pixels) from error
            raise InvalidRequest(
                f"Two frames of {error.pixels:,} pixels are larger than the {self.max_pixels:,} pixels that "
                "--max-image-pixels allows",
                param="messages",
            ) from error
        if first.grid != second.grid:
            raise InvalidRequest("The frames of a video differ in size: send frames of one size", param="messages")
        digest = blake2b(first.hash + second.hash, digest_size=HASH_BYTES).digest()
        return Image(digest, first.pixels + second.pixels, grid=first.grid)

    def _decoded(self, data: bytes | PIL.Image.Image, most: int | None, room: int | None, size: Size) -> Image:
        """Return a file or an image in the model's form; ``size`` returns its sides after resizing."""
        if not isinstance(data, bytes | PIL.Image.Image):
            raise InvalidRequest(f"An image must be a PIL.Image, not {type(data).__name__}", param="prompt")
        try:
            image = self._opened(data, most, room, size) if isinstance(data, bytes) else self._checked(data, room, size)
            pixels = self._pixels(image, size)
        except (InvalidRequest, TooManyPixels, TooManyPositions, MemoryError):
            raise
        except Exception as error:  # decoders raise anything
            raise _undecodable(error) from error
        planes = [table[plane] for table, plane in zip(self._table, pixels.transpose(2, 0, 1), strict=True)]
        values, grid = self.config.arranged(np.stack(planes))
        digest = blake2b(self._name if grid is None else self._name + b"%d x %d" % grid, digest_size=HASH_BYTES)
        digest.update(pixels.tobytes())
        return Image(digest.digest(), values.tobytes(), grid=grid)

    def _opened(self, data: bytes, most: int | None, room: int | None, size: Size) -> PIL.Image.Image:
        image: PIL.Image.Image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)  # reads the header alone
        pixels = self._cost(self._checked(image, room, size), size)
        if data.startswith(_JPEG) and scans_of(data) > MAX_SCANS:
            raise InvalidRequest(
                f"The image has more than {MAX_SCANS} scans, and each takes as long to decode as a whole image: save "
                "it without progressive scans",
                param="messages",
            )
        if most is not None and pixels > most:
            raise TooManyPixels(pixels)
        image.load()
        turned = PIL.ImageOps.exif_transpose(image)
        return image if turned is None else turned

    def _cost(self, image: PIL.Image.Image, size: Size) -> int:
        """Return the pixels of ``image``, as it is or resized, whichever is larger."""
        width, height = size(*image.size)
        return max(image.width * image.height, width * height)

    def _checked(self, image: PIL.Image.Image, room: int | None, size: Size) -> PIL.Image.Image:
        """Return ``image``.

        Raises InvalidRequest if it is empty, or too large as it is or resized. Raises TooManyPositions.
        """
        if not image.width or not image.height:
            raise InvalidRequest("The image is empty", param="messages")
        if self._cost(image, size) > self.max_pixels:
            width, height = size(*image.size)
            raise InvalidRequest(
                f"The image of {image.width} x {image.height} pixels, resized to {width} x {height}, is larger than "
                f"the {self.max_pixels:,} pixels that --max-image-pixels allows",
                param="messages",
            )
        if room is not None and (positions := self.config.positions(*size(*image.size))) > room:
            raise TooManyPositions(positions)
        return image

    def _pixels(self, image: PIL.Image.Image, size: Size) -> np.ndarray:
        """Return the pixels, uint8 [height, width, 3], resized and cropped."""
        image = _rgb(image)
        resized = size(*image.size)
        if resized != image.size or self.config.resizes:
            image = image.resize(resized, PIL.Image.Resampling(self.config.resample))
        if self.config.crop is None:
            return np.asarray(image)
        return _centre(np.asarray(image), *self.config.crop)


def _rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
    return PIL.Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _centre(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the center of ``pixels`` [rows, columns, channels], padded with black."""
    for axis, size in enumerate((height, width)):
        if (lacking := size - pixels.shape[axis]) > 0:
            before = -(-lacking // 2)
            pads = [(0, 0)] * 3
            pads[axis] = before, lacking - before
            pixels = np.pad(pixels, pads)
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])


def scans_of(data: bytes) -> int:
    """Return the number of scans of a JPEG file.

    Any number above :data:`MAX_SCANS` stands for too many. Scans are counted as libjpeg finds them, up to the end of
    the image.
    """
    at = found = 0
    for _ in range(_MOST_MARKERS):
        marker = _MARKER.search(data, at)
        if marker is None or marker[1][0] == _EOI or found > MAX_SCANS:
            return found
        kind, at = marker[1][0], marker.end()
        found += kind == _SOS
        if kind >= _FIRST_WITH_LENGTH and kind != _SOI:
            at += int.from_bytes(data[at : at + 2])
    return MAX_SCANS + 1


def samples() -> list[bytes]:
    """Return a small image of each format. Decoding it loads the format's decoder."""
    files = [io.BytesIO() for _ in FORMATS]
    for form, file in zip(FORMATS, files, strict=True):
        PIL.Image.new("RGB", (16, 16)).save(file, form)
    return [file.getvalue() for file in files]


def _undecodable(error: Exception) -> InvalidRequest:
    known = isinstance(error, PIL.UnidentifiedImageError)
    reason = f"it is no {', '.join(FORMATS)}" if known else f"{type(error).__name__}: {error}"
    return InvalidRequest(f"The image cannot be decoded: {reason}", param="messages")
