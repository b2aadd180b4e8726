"""The encoder cache: the images with embeddings on the device, and their places.

There are few places, and a step may need no more images than places. Images that are not kept are encoded right before
the step, into the least recently used places. As steps run in order, a place may be given away while steps in flight
still read it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakValueDictionary

import numpy as np

from preheat.core import Image, ImageSpan, Request, Schedule, Segment, StepImages
from preheat.schedule.slots import Slots


class EncoderCache:
    """``places`` for images of ``image_tokens`` embeddings each."""

    def __init__(self, places: int, image_tokens: int) -> None:
        self._tokens = image_tokens
        self._free = list(range(places))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # the place of each image, the least recently used first
        self._known: WeakValueDictionary[bytes, Image] = WeakValueDictionary()
        self.places = places

    def share(self, request: Request) -> None:
        """Let all requests with an image have its pixels in common."""
        for segment in request.segments:
            segment.image = self._known.setdefault(segment.image.hash, segment.image)

    def reach(self, needed: frozenset[bytes], request: Request, first: int, wanted: int) -> int:
        """Return how many of ``wanted`` tokens from position ``first`` a row may have.

        The row ends before the first image without a place, beside rows that need the images ``needed``.
        """
        hashes = set(needed)
        for segment in inside(request.segments, first, first + wanted):
            hashes.add(segment.image.hash)
            if len(hashes) > self.places:
                return max(segment.start - first, 0)
        return wanted

    def attach(self, schedule: Schedule, slots: Slots) -> None:
        """Give ``schedule`` its images, and keep the images that it encodes."""
        parts = list(_parts(schedule, slots))
        if not parts:
            return
        images = {segment.image.hash: segment.image for _, segment, _, _ in parts}
        encode = self._keep(images)
        spans = [
            ImageSpan(row, first, last, self._kept[segment.image.hash] * self._tokens + first - segment.start)
            for row, segment, first, last in parts
        ]
        schedule.images = StepImages(encode, spans)

    def forget(self) -> None:
        """Forget all embeddings, so that the next images are encoded again."""
        self._free += self._kept.values()
        self._kept.clear()

    def lose(self, failed: StepImages, in_flight: Iterable[Schedule]) -> Iterator[tuple[Schedule, np.ndarray]]:
        """Handle a failed step, which may not have encoded its images.

        Yields each later step ``in_flight`` with its rows that see such an image.
        """
        lost = {place for place, _ in failed.encode}
        if lost:
            self.forget()
        for later in in_flight:
            if later.images is not None:
                lost -= {place for place, _ in later.images.encode}
                rows = {span.row for span in later.images.spans if span.source // self._tokens in lost}
                yield later, np.array(sorted(rows), np.int64)

    def _keep(self, images: dict[bytes, Image]) -> list[tuple[int, Image]]:
        """Keep ``images`` and return the images to encode, with their places."""
        for key in images.keys() & self._kept.keys():
            self._kept.move_to_end(key)
        encode = []
        for key, image in images.items():
            if key not in self._kept:
                self._kept[key] = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
                encode.append((self._kept[key], image))
        return encode


def inside(segments: Iterable[Segment], first: int, last: int) -> Iterator[Segment]:
    """Return the segments with a position from ``first`` up to ``last``."""
    return (segment for segment in segments if segment.start < last and segment.end > first)


def _parts(schedule: Schedule, slots: Slots) -> Iterator[tuple[int, Segment, int, int]]:
    """Yield the parts of segments in the step's rows.

    A part is a row, its segment, and the first and last position of the row's tokens in the segment.
    """
    rows: Sequence[int] = range(schedule.num_decode, schedule.rows)
    for row in rows:
        request, first, end = slots.request[schedule.slots[row]], int(schedule.first[row]), int(schedule.ends[row])
        for segment in inside(request.segments if request else (), first, end):
            yield row, segment, max(segment.start, first), min(segment.end, end)
