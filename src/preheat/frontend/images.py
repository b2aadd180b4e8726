"""Images of requests: decoded and brought into the model's form with Pillow and numpy. No torch here.

Contract. Pixels are those of transformers' image processor of the Pillow backend: transparency is put on white, then
RGB; the shortest side is resized, the centre is cropped (what lies outside is black), values are rescaled in float64,
rounded to float32, less the mean, divided by the deviation. A value has 8 bits, so the last steps are a table.

An image's hash is that of its 8-bit pixels after the crop and of the processor's config: what the encoder reads, and
nothing that a sender says of it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps

from preheat.core import Image, Segment
from preheat.errors import InvalidRequest, ModelError, SettingsError
from preheat.frontend.media import MediaReader
from preheat.utils.files import read_json

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is decoded; Pillow knows more, some of which start programs."""

HASH_BYTES = 16
KINDS = ("CLIPImageProcessor", "LlavaImageProcessor")
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

Source = str | PIL.Image.Image
"""A URL, or the image itself."""


@dataclass(frozen=True, kw_only=True)
class PixelConfig:
    """How an image becomes pixels. ``shortest_edge`` is what the shortest side is resized to by ``resample``, one of
    Pillow's filters; ``height`` and ``width``: both sides. ``crop`` is the height and width of what is kept. None: not
    done.
    """

    shortest_edge: int | None
    height: int | None
    width: int | None
    resample: int
    crop: tuple[int, int] | None
    rescale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @classmethod
    def read(cls, folder: Path) -> PixelConfig | None:
        """From the files of a checkpoint; None if there are none. Raises ModelError for what is not supported."""
        values = read_json(folder / "preprocessor_config.json")
        values = values or read_json(folder / "processor_config.json").get("image_processor") or {}
        if not values:
            return None
        kind = str(values.get("image_processor_type", KINDS[0])).removesuffix("Fast").removesuffix("Pil")
        if kind not in KINDS:
            only = " and ".join(KINDS)
            raise ModelError(f"{folder}: image_processor_type {kind!r} is not supported, only {only} are")
        for name, usual in (("do_pad", False), ("do_convert_rgb", True)):
            if values.get(name, usual) not in (None, usual):
                raise ModelError(f"{folder}: {name} {values[name]!r} of the image processor is not supported")
        return _pixel_config(folder, values)

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing."""
        if self.shortest_edge is None:
            return self.width or width, self.height or height
        short, long = min(width, height), max(width, height)
        resized = int(self.shortest_edge * long / short)
        return (self.shortest_edge, resized) if width <= height else (resized, self.shortest_edge)

    def table(self) -> np.ndarray:
        """float32 [channels, 256]: what the values of each channel become."""
        values = np.arange(256, dtype=np.uint8)
        found = (values if self.rescale is None else values.astype(np.float64) * self.rescale).astype(np.float32)
        wide = np.broadcast_to(found, (3, 256))
        if self.mean is None or self.std is None:
            return wide.copy()
        mean, std = (np.array(each, np.float32)[:, None] for each in (self.mean, self.std))
        table: np.ndarray = (wide - mean) / std
        return table


def _pixel_config(folder: Path, values: Mapping[str, Any]) -> PixelConfig:
    size = _sides(folder, "size", values.get("size"), 224) if values.get("do_resize", True) else {}
    crop = _sides(folder, "crop_size", values.get("crop_size"), 224) if values.get("do_center_crop", True) else {}
    side = crop.get("shortest_edge")
    normalizes = values.get("do_normalize", True)
    try:
        return PixelConfig(
            shortest_edge=size.get("shortest_edge"),
            height=size.get("height"),
            width=size.get("width"),
            resample=int(PIL.Image.Resampling(values.get("resample", PIL.Image.Resampling.BICUBIC))),
            crop=(side or crop["height"], side or crop["width"]) if crop else None,
            rescale=float(values.get("rescale_factor", 1 / 255)) if values.get("do_rescale", True) else None,
            mean=_channels(values.get("image_mean", CLIP_MEAN)) if normalizes else None,
            std=_channels(values.get("image_std", CLIP_STD)) if normalizes else None,
        )
    except (ValueError, TypeError) as error:
        raise ModelError(f"{folder}: the image processor's config cannot be used: {error}") from error


def _sides(folder: Path, name: str, value: object, default: int) -> dict[str, int]:
    """``shortest_edge``, or ``height`` and ``width``."""
    sides = {"shortest_edge": default} if value is None else {"shortest_edge": value} if type(value) is int else value
    sides = {key: side for key, side in sides.items() if side is not None} if isinstance(sides, dict) else {}
    if set(sides) not in ({"shortest_edge"}, {"height", "width"}) or not all(
        type(side) is int and 0 < side < 1 << 14 for side in sides.values()
    ):
        raise ModelError(f"{folder}: {name} {value!r} of the image processor is not supported")
    return sides


def _channels(value: Any) -> tuple[float, ...]:
    channels = tuple(float(each) for each in value)
    if len(channels) != 3:
        raise ValueError(f"{value!r} has not three channels")
    return channels


class Images:
    """The images of one model's requests, each of which takes ``tokens`` positions of a prompt, where ``token_id``
    stands for it. Raises ModelError unless its pixels have the ``size`` that the model needs, SettingsError if no image
    may be so large.

    ``limit``: the most images in a prompt, None for as many as fit. ``max_pixels``: the most pixels of one.
    """

    def __init__(
        self,
        config: PixelConfig,
        reader: MediaReader,
        *,
        size: int,
        tokens: int,
        token_id: int,
        limit: int | None = None,
        max_pixels: int,
    ) -> None:
        found = config.crop or (config.height, config.width)
        if found != (size, size):
            raise ModelError(f"the image processor makes images of {found}, and the vision tower needs {(size, size)}")
        if max_pixels < size**2:
            raise SettingsError(
                f"max_image_pixels {max_pixels} is less than the {size} x {size} that every image is resized to",
                param="max_image_pixels",
            )
        self.tokens, self.token_id, self.limit = tokens, token_id, limit
        self._config, self._reader, self._max_pixels = config, reader, max_pixels
        self._table, self._name = config.table(), json.dumps(asdict(config)).encode()
        self._warm_up()

    def read(self, source: Source) -> bytes | PIL.Image.Image:
        """The file behind a URL, or the image itself. May wait for the network."""
        return self._reader.read(source) if isinstance(source, str) else source

    def decode(self, data: bytes | PIL.Image.Image) -> Image:
        """A file, or an image, in the model's form. Raises InvalidRequest, saying what is wrong with it."""
        if not isinstance(data, bytes | PIL.Image.Image):
            raise InvalidRequest(f"An image must be one of Pillow, not {type(data).__name__}", param="prompt")
        try:
            image = self._opened(data) if isinstance(data, bytes) else self._checked(data)
            pixels = self._pixels(image)
        except InvalidRequest:
            raise
        except Exception as error:  # decoders raise anything
            raise _undecodable(error) from error
        digest = blake2b(self._name, digest_size=HASH_BYTES)
        digest.update(pixels.tobytes())
        planes = [table[plane] for table, plane in zip(self._table, pixels.transpose(2, 0, 1), strict=True)]
        return Image(digest.digest(), np.stack(planes).tobytes())

    def load(self, sources: Sequence[Source]) -> list[Image]:
        """All of ``sources``, in order."""
        return [self.decode(self.read(source)) for source in sources]

    def place(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], list[Segment]]:
        """``ids`` with each image's token repeated, once for each of its positions; and where the images are."""
        count = ids.count(self.token_id)
        if count != len(images):
            raise InvalidRequest(
                f"The prompt has {count} image tokens (id {self.token_id}) and the request {len(images)} images: there"
                " must be one for each",
                param="prompt",
            )
        found: list[int] = []
        segments: list[Segment] = []
        for id in ids:
            if id == self.token_id:
                segments.append(Segment(len(found), len(found) + self.tokens, images[len(segments)]))
                found += [id] * self.tokens
            else:
                found.append(id)
        return found, segments

    def _opened(self, data: bytes) -> PIL.Image.Image:
        image: PIL.Image.Image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)  # reads the header alone
        self._checked(image).load()
        turned = PIL.ImageOps.exif_transpose(image)
        return image if turned is None else turned

    def _checked(self, image: PIL.Image.Image) -> PIL.Image.Image:
        """Raise InvalidRequest for an image that is too large, as it is or resized."""
        width, height = image.size
        if not width or not height:
            raise InvalidRequest("The image is empty", param="messages")
        resized_width, resized_height = self._config.size_of(width, height)
        if max(width * height, resized_width * resized_height) > self._max_pixels:
            raise InvalidRequest(
                f"The image of {width} x {height} pixels, resized to {resized_width} x {resized_height}, is larger "
                f"than the {self._max_pixels:,} pixels that --max-image-pixels allows",
                param="messages",
            )
        return image

    def _pixels(self, image: PIL.Image.Image) -> np.ndarray:
        """uint8 [height, width, 3]."""
        image = _rgb(image)
        resized = self._config.size_of(*image.size)
        if resized != image.size or self._config.shortest_edge is not None or self._config.width is not None:
            image = image.resize(resized, PIL.Image.Resampling(self._config.resample))
        if self._config.crop is None:
            return np.asarray(image)
        return _centre(np.asarray(image), *self._config.crop)

    def _warm_up(self) -> None:
        """Decode one image of each format: decoders are loaded when they are first used."""
        for form in FORMATS:
            file = io.BytesIO()
            PIL.Image.new("RGB", (16, 16)).save(file, form)
            self.decode(file.getvalue())


def _rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
    return PIL.Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _centre(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The centre of ``pixels`` [rows, columns, channels], black where they end."""
    for axis, size in enumerate((height, width)):
        if (lacking := size - pixels.shape[axis]) > 0:
            before = -(-lacking // 2)
            pads = [(0, 0)] * 3
            pads[axis] = before, lacking - before
            pixels = np.pad(pixels, pads)
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])


def check_positions(folder: Path, patches: int, tokens: int) -> None:
    """Raise ModelError if ``processor_config.json`` counts other positions for an image than the model has: ``tokens``
    for so many ``patches``. Source: ``LlavaProcessor`` of transformers.
    """
    values = read_json(folder / "processor_config.json")
    if values.get("patch_size") is None:
        return
    more, strategy = values.get("num_additional_image_tokens") or 0, values.get("vision_feature_select_strategy")
    counted = patches + more - (strategy == "default")
    if counted != tokens:
        raise ModelError(
            f"{folder}: by num_additional_image_tokens {more} and vision_feature_select_strategy {strategy!r} of "
            f"processor_config.json an image has {counted} positions, but the model has {tokens}: correct the file "
            "(the class embedding is one additional token)"
        )


def _undecodable(error: Exception) -> InvalidRequest:
    known = isinstance(error, PIL.UnidentifiedImageError)
    reason = f"it is no {', '.join(FORMATS)}" if known else f"{type(error).__name__}: {error}"
    return InvalidRequest(f"The image cannot be decoded: {reason}", param="messages")
