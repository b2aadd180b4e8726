"""How an image becomes pixels: the image processor of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from preheat.errors import ModelError

KINDS = ("CLIPImageProcessor", "LlavaImageProcessor")
ANY_SIZE = "Qwen2VLImageProcessor"
"""The processor of images of any size, see :mod:`preheat.frontend.grid_config`."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class PixelConfig:
    """How an image becomes pixels.

    A step with a field None is left out. The image is resized by ``resample``, a filter of Pillow: its shortest side to
    ``shortest_edge``, or both sides to ``height`` and ``width``. ``crop`` is the height and width of the part in the
    middle that is kept.
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
    def read(cls, folder: Path, *, any_size: bool = False) -> PixelConfig | None:
        """Read the config from the files of a checkpoint; with ``any_size`` without the size of images.

        Return None if they have no config. Raises ModelError if a value is not supported.
        """
        from preheat.utils.files import read_json  # imported here: a process that only decodes needs no tokenizer

        values = read_json(folder / "preprocessor_config.json")
        values = values or read_json(folder / "processor_config.json").get("image_processor") or {}
        if not values:
            return None
        kind = str(values.get("image_processor_type", KINDS[0])).removesuffix("Fast").removesuffix("Pil")
        kinds = (ANY_SIZE,) if any_size else KINDS
        if kind not in kinds:
            only = " and ".join(kinds)
            raise ModelError(f"{folder}: image_processor_type {kind!r} is not supported, only {only} are")
        for name, usual in (("do_pad", False), ("do_convert_rgb", True)):
            if values.get(name, usual) not in (None, usual):
                raise ModelError(f"{folder}: {name} {values[name]!r} of the image processor is not supported")
        if any_size:
            if not values.get("do_resize", True):
                raise ModelError(f"{folder}: do_resize false of the image processor is not supported")
            values = {**values, "do_resize": False, "do_center_crop": False}
        return _pixel_config(folder, values)

    def arranged(self, planes: np.ndarray) -> tuple[np.ndarray, None]:
        """Return ``planes`` [channels, height, width] as the model's input; there is no grid."""
        return planes, None

    @property
    def resizes(self) -> bool:
        """Whether an image is resized, whatever its size."""
        return self.shortest_edge is not None or self.width is not None

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after resizing."""
        if self.shortest_edge is None:
            return self.width or width, self.height or height
        short, long = min(width, height), max(width, height)
        resized = int(self.shortest_edge * long / short)
        return (self.shortest_edge, resized) if width <= height else (resized, self.shortest_edge)

    def positions(self, width: int, height: int) -> int:
        """Return 0: all images take as many positions, so their number is checked before they are read."""
        return 0

    def table(self) -> np.ndarray:
        """Return the final value of each 8-bit value, by channel: float32 [channels, 256]."""
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
    """Return ``shortest_edge``, or ``height`` and ``width``, as a dictionary. Raises ModelError for other values."""
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
        raise ValueError(f"{value!r} must have three channels")
    return channels
