"""Videos of conversations: frames, two of them in each image. No torch here, nor Pillow.

A video is a list of frames. A prompt has a text with the time of each two frames, then their positions. Nobody cuts a
video file into frames here: a client sends the frames that the model should see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from preheat.errors import InvalidRequest, ModelError
from preheat.utils.files import read_json

FRAMES = 2
"""Frames of an image."""

FPS = 2.0
"""Frames of a second, unless the client says another number: the rate of the families' video processor."""

LEAST_FPS = 1e-6
"""Fewest frames of a second, one in eleven days: times of still fewer would be endless texts."""

MOST_FRAMES = 768
"""Most frames of a video: the bound of the families' video processor."""

_JPEGS = "data:video/jpeg;base64,"
_SEND = f"send its frames: {_JPEGS}FRAME,FRAME,…, or a part of type 'video' with a list of the frames' URLs"


class Frames(NamedTuple):
    """Two frames of a video of ``total`` frames, each a URL, a file or an image."""

    first: Any
    second: Any
    total: int


def frames_of(part: Mapping[str, Any]) -> tuple[list[str], list[Frames]]:
    """Return the times of each two frames of a part of a message, as texts, and the frames.

    The last frame stands twice if their number is odd. Raises InvalidRequest, with the remedy.
    """
    given, fps = _given(part)
    if not FRAMES <= len(given) <= MOST_FRAMES:
        raise InvalidRequest(
            f"A video needs {FRAMES} to {MOST_FRAMES} frames, and this one has {len(given)}: send other frames, or an "
            "image",
            param="messages",
        )
    if not (type(fps) in (int, float) and LEAST_FPS <= fps < math.inf):
        raise InvalidRequest(f"fps of a video must be a number of {LEAST_FPS:g} or more, got {fps!r}", param="messages")
    last = len(given) - 1
    pairs = [(at, min(at + 1, last)) for at in range(0, len(given), FRAMES)]
    times = [f"<{(first / fps + second / fps) / 2:.1f} seconds>" for first, second in pairs]
    return times, [Frames(given[first], given[second], len(given)) for first, second in pairs]


def _given(part: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """Return the frames of a part, and how many of them a second has."""
    if part.get("type") == "video":
        frames = part.get("video")
        if not isinstance(frames, list | tuple):
            raise InvalidRequest(f"A part of type 'video' needs a list of frames: {_SEND}", param="messages")
        return frames, _rate(part)
    given = part.get("video_url")
    url = given.get("url") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(url, str):
        raise InvalidRequest("A part of type 'video_url' needs video_url.url, a text", param="messages")
    if url[: len(_JPEGS)].lower() != _JPEGS:
        raise InvalidRequest(
            f"The video at {url[:40]!r} is not read, as video files are not decoded: {_SEND}", param="messages"
        )
    count = url.count(",")
    if count > MOST_FRAMES:
        raise InvalidRequest(f"A video has at most {MOST_FRAMES} frames, and this one has {count}", param="messages")
    return [f"data:image/jpeg;base64,{each}" for each in url[len(_JPEGS) :].split(",")], _rate(given)


def _rate(part: Mapping[str, Any]) -> Any:
    fps = part.get("fps")
    return FPS if fps is None else fps


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """The fewest and the most pixels of all frames of a video, and the size of a cell in pixels.

    A frame has at most as many pixels as an image, ``frame``.
    """

    least: int
    most: int
    unit: int
    frame: int

    @classmethod
    def read(cls, folder: Path, *, unit: int, frame: int) -> VideoConfig:
        """Read the bounds from the files of a checkpoint. Raises ModelError for bounds that are no whole numbers."""
        values = read_json(folder / "video_preprocessor_config.json")
        values = values or read_json(folder / "processor_config.json").get("video_processor") or {}
        size = values.get("size") or {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
        least, most = (
            size.get(name) if isinstance(size, Mapping) else None for name in ("shortest_edge", "longest_edge")
        )
        if not (type(least) is int and type(most) is int and 0 < least <= most):
            raise ModelError(f"{folder}: size {size!r} of the video processor is not supported")
        return cls(least=least, most=most, unit=unit, frame=frame)

    def size_of(self, width: int, height: int, count: int) -> tuple[int, int]:
        """Return width and height of each of ``count`` frames after resizing.

        The rule is ``smart_resize`` of transformers for videos, in the same floating-point operations, with the bound
        of a frame besides. Raises InvalidRequest for a side that is far longer than the other.
        """
        unit = self.unit
        if min(width, height) < unit:
            scale = max(unit / height, unit / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > 200 * min(width, height):
            raise InvalidRequest(
                f"A frame of {width} x {height} pixels has a side more than 200 times as long as the other: crop it",
                param="messages",
            )
        whole = round(count / FRAMES) * FRAMES
        most = min(self.most, self.frame * whole)
        sides = [round(side / unit) * unit for side in (width, height)]
        if whole * sides[0] * sides[1] > most:
            beta = math.sqrt((count * height * width) / most)
            sides = [max(unit, math.floor(side / beta / unit) * unit) for side in (width, height)]
        elif whole * sides[0] * sides[1] < self.least:
            beta = math.sqrt(self.least / (count * height * width))
            sides = [math.ceil(side * beta / unit) * unit for side in (width, height)]
        if sides[0] * sides[1] > self.frame:
            raise InvalidRequest(
                f"A frame of {sides[0]} x {sides[1]} pixels, after resizing, has more than the {self.frame} of an "
                "image: send more frames, or frames with sides of more similar lengths",
                param="messages",
            )
        return sides[0], sides[1]
