"""Images of requests: read, decode and place them in a prompt. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import PIL.Image

from preheat.core import Image, Segment
from preheat.errors import InvalidRequest, ModelError, SettingsError
from preheat.frontend.grid_config import GridConfig
from preheat.frontend.image_config import CLIP_MEAN, CLIP_STD, PixelConfig
from preheat.frontend.image_decoder import Decoder, TooManyPositions, samples
from preheat.frontend.image_processes import ImageProcesses
from preheat.frontend.media import MediaReader
from preheat.frontend.room import Room
from preheat.frontend.video import Frames, VideoConfig
from preheat.utils.files import read_json

__all__ = ["CLIP_MEAN", "CLIP_STD", "Images", "PixelConfig", "Source", "check_positions"]

Source = str | PIL.Image.Image | Frames
"""A URL, or the image itself, or two frames of a video."""

Read = bytes | PIL.Image.Image | Frames
"""A file, an image, or two of them."""


class Images:
    """Images of one model's requests.

    Each image takes ``tokens`` positions of ``token_id`` in a prompt; an image of any size takes at least as many.
    ``size``: the side of the image that the model needs, 0 for any size. ``limit``: the most images in a prompt, None
    for as many as fit. ``max_pixels``: the most pixels of an image. ``video``: the sizes of videos, if the model sees
    them. Raises ModelError if ``config`` makes images of
    another size, SettingsError if ``max_pixels`` is less than the smallest image.
    """

    def __init__(
        self,
        config: PixelConfig | GridConfig,
        reader: MediaReader,
        *,
        size: int,
        tokens: int,
        token_id: int,
        limit: int | None = None,
        max_pixels: int,
        video: VideoConfig | None = None,
    ) -> None:
        least = config.least if isinstance(config, GridConfig) else size**2
        if isinstance(config, PixelConfig) and (found := config.crop or (config.height, config.width)) != (size, size):
            raise ModelError(f"the image processor makes images of {found}, and the vision tower needs {(size, size)}")
        if max_pixels < least:
            raise SettingsError(
                f"max_image_pixels {max_pixels} is less than the {least} pixels that every image is resized to: raise "
                "it",
                param="max_image_pixels",
            )
        self.tokens, self.token_id, self.limit = tokens, token_id, limit
        self.decoder, self.reader = Decoder(config, max_pixels, video), reader
        self._warm_up()

    @cached_property
    def processes(self) -> ImageProcesses:
        """The processes that decode images from clients."""
        return ImageProcesses(self.decoder)

    def read(self, source: Source) -> Read:
        """Return the file behind a URL, or the image itself. May wait for the network."""
        if isinstance(source, Frames):
            return source._replace(first=self.read(source.first), second=self.read(source.second))
        return self.reader.read(source) if isinstance(source, str) else source

    def decode(self, data: Read, room: int | None = None) -> Image:
        """Return a file, an image or two frames in the model's form.

        Raises InvalidRequest, with the reason, and TooManyPositions for more than ``room``.
        """
        if isinstance(data, Frames):
            return self.decoder.decode_frames(data, room=room)
        return self.decoder.decode(data, room=room)

    def load(self, sources: Sequence[Source], room: Room) -> list[Image]:
        """Read and decode ``sources``, in order. Raises ContextTooLong before an image for which ``room`` has none."""
        found = []
        for source in sources:
            try:
                found.append(self.decode(self.read(source), room.left_for(source)))
            except TooManyPositions as error:
                raise room.lacking(source, error.positions) from error
            room.take(found[-1].cells or self.tokens)
        return found

    def place(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], list[Segment]]:
        """Return ``ids`` with all positions of the images, and the images' segments.

        Each image's token is repeated for each of its positions. Raises InvalidRequest unless there is one token for
        each image.
        """
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
                image = images[len(segments)]
                tokens = image.cells or self.tokens
                segments.append(Segment(len(found), len(found) + tokens, image))
                found += [id] * tokens
            else:
                found.append(id)
        return found, segments

    def _warm_up(self) -> None:
        for sample in samples():
            self.decode(sample)


def check_positions(folder: Path, patches: int, tokens: int) -> None:
    """Raise ModelError if ``processor_config.json`` counts an image's positions differently.

    The model has ``tokens`` positions for ``patches`` patches. Source: ``LlavaProcessor`` of transformers.
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
