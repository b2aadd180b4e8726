"""The images and videos in a conversation's messages. No torch here, nor Pillow: all models use this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from preheat.errors import InvalidRequest
from preheat.frontend.video import frames_of

IMAGE = {"type": "image"}
"""The part that a chat template sees in place of an image."""


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return the messages with `IMAGE` in place of images, and the images.

    The images are in order. An image is a URL, or the image itself if its part is an ``image_pil`` part. A video is the
    time of each two frames as a text, and the two frames in place of an image (:mod:`preheat.frontend.video`). Raises
    InvalidRequest if a part has no image or no frames.
    """
    sources: list[Any] = []
    return [_without(message, sources) for message in messages], sources


def _without(message: Mapping[str, Any], sources: list[Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("video_url", "video"):
            times, frames = frames_of(part)
            sources += frames
            parts += [each for time in times for each in ({"type": "text", "text": time}, IMAGE)]
            continue
        if kind in ("image_url", "image_pil"):
            sources.append(_source(part, kind))
            part = IMAGE  # noqa: PLW2901
        elif kind == "image":
            raise InvalidRequest("Give images as parts of type 'image_url'", param="messages")
        parts.append(part)
    return {**message, "content": parts}


def _source(part: Mapping[str, Any], kind: str) -> Any:
    given = part.get(kind)
    if kind == "image_pil":
        if given is None:
            raise InvalidRequest("A part of type 'image_pil' needs image_pil, a PIL.Image", param="messages")
        return given
    url = given.get("url") if isinstance(given, Mapping) else None
    if not isinstance(url, str):
        raise InvalidRequest("A part of type 'image_url' needs image_url.url, a text", param="messages")
    return url
