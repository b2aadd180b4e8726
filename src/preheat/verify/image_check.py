"""The check at boot for models that see images.

A context with an image has the same logits by every path. An image has the same embeddings whatever is encoded with it.
The same holds for the pieces of prompts that are embeddings, and rows of the embedding table have the logits of their
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from preheat.core import Image, Segment
from preheat.errors import NotInvariant
from preheat.execution.encoder import Given
from preheat.frontend.prompt_embeds import PromptEmbeds
from preheat.limits import CHECKED_GRID
from preheat.ops.embedding import rows_of
from preheat.plan.programs import ENCODER_SIZES
from preheat.schedule.images import EncoderCache
from preheat.verify.check_runner import CheckRunner, Row
from preheat.verify.names import BEFORE_IMAGE, image_context


class ImageCheck:
    """Compares the context's logits with the first run of the process, see :meth:`first`."""

    def __init__(self, runner: CheckRunner) -> None:
        encoder, rng = runner.executor.encoder, np.random.default_rng(1)
        assert encoder is not None, "the model sees no images"
        self._name = encoder.tower.name
        self._runner, self._encoder, limits = runner, encoder, runner.plan.limits
        self._tokens = rng.integers(runner.vocab_size, size=image_context(limits), dtype=np.int32)
        grid = CHECKED_GRID if limits.rungs else None
        self._images = [encoder.noise(number, grid) for number in range(ENCODER_SIZES[0])]
        self._segments = [Segment(BEFORE_IMAGE, BEFORE_IMAGE + limits.checked_image, self._images[0])]
        self._expected: Tensor | None = None

    def first(self) -> Tensor:
        """Return the context's logits in as few steps as hold it.

        They are fp32 [vocab] on the host, computed once.
        """
        if self._expected is None:
            self._expected = self._logits([self._most()] * 2)
        return self._expected

    def run(self) -> int:
        """Compare and return how often. Raises NotInvariant."""
        expected, count = self.first(), 0
        for way, logits in self._ways():
            if not torch.equal(logits.view(torch.int32), expected.view(torch.int32)):
                gap = (logits - expected).abs().max().item()
                raise NotInvariant(f"{self._name}: a context with one has other logits {way}, by up to {gap:.3g}")
            count += 1
        if isinstance(self._encoder.tower, Given):
            count += self._compare_tokens()
        return count + self._compare_embeddings()

    def _ways(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the context's logits by each way.

        It is cut into ragged chunks, some of which end within the image, and read behind cached blocks.
        """
        yield "when it is computed again", self._logits([self._most()] * 2)
        tokens, size = self._runner.plan.limits.checked_image, self._runner.slots.block_size
        if min(self._most(), tokens) > 1:
            sizes = (BEFORE_IMAGE + tokens // 3, max(tokens // 3, 1))
            yield "in chunks", self._logits([min(size, self._most()) for size in sizes])
        within = (BEFORE_IMAGE + tokens // 2) // size * size
        for cached in dict.fromkeys((within, (len(self._tokens) - 1) // size * size)):
            if cached and self._runner.slots.num_free > 1:
                yield f"behind {cached} cached tokens", self._behind(cached)

    def _behind(self, cached: int) -> Tensor:
        """Return the logits with the first ``cached`` tokens in the blocks of another sequence."""
        with self._runner.sequence(self._tokens, segments=self._segments) as first:
            self._read(first, [self._most()] * 2)
            with self._runner.sequence(self._tokens, cached=cached, of=first, segments=self._segments) as slot:
                return self._read(slot, [self._most()] * 2)

    def _logits(self, sizes: list[int], segments: list[Segment] | None = None) -> Tensor:
        with self._runner.sequence(self._tokens, segments=self._segments if segments is None else segments) as slot:
            return self._read(slot, sizes)

    def _compare_tokens(self) -> int:
        """Compare some tokens with their rows of the embedding table."""
        table, piece = self._runner.executor.decoder.weights.embedding, self._segments[0]
        ids = torch.from_numpy(self._tokens[piece.start : piece.end]).to(table.device)
        (given,) = PromptEmbeds(table.shape[-1], lambda: len(ids)).of_tensor(rows_of(table, ids)).segments
        rows = Segment(piece.start, piece.end, given.image)
        tokens, embeds = (self._logits([self._most()] * 2, segments) for segments in ([], [rows]))
        if not torch.equal(tokens.view(torch.int32), embeds.view(torch.int32)):
            raise NotInvariant(f"{self._name}: rows of the table have other logits than their tokens")
        return 1

    def _read(self, slot: int, sizes: list[int]) -> Tensor:
        """Return the logits after steps of the given sizes.

        The first step has the first size, all others the second one; the last step has the rest. The image is encoded
        again.
        """
        runner = self._runner
        runner.images = EncoderCache(runner.plan.limits.max_images, runner.plan.limits.image_tokens)
        left, size = len(self._tokens) - int(runner.slots.cached_len[slot]), sizes[0]
        while left > size:
            runner.read(slot, size)
            left, size = left - size, sizes[1]
        return runner.step(slot)

    def _most(self) -> int:
        """Return how many tokens a step can have."""
        size, length = len(self._tokens), len(self._tokens)
        while size > 1 and not self._runner.bucket_of([Row(length - size, size)]):
            size //= 2
        return size

    def _compare_embeddings(self) -> int:
        """Compare each program's embeddings, at each index, with the image's alone.

        Returns how many were compared.
        """
        if self._runner.plan.limits.rungs:
            return self._compare_padding()
        expected = [self._encoded([image])[0] for image in self._images]
        count = 0
        for size in ENCODER_SIZES:
            if size == 1 or size > self._runner.plan.limits.max_images:
                continue
            for turn in range(size):
                order = [(turn + place) % size for place in range(size)]
                for place, found in zip(order, self._encoded([self._images[place] for place in order]), strict=True):
                    if not torch.equal(found, expected[place]):
                        raise NotInvariant(f"{self._name}: one has other embeddings among {size} than alone")
                    count += 1
        return count

    def _compare_padding(self) -> int:
        """Compare an image's embeddings behind others, with more and with fewer patches, with the first ones.

        Padding has the patches of others then, of two images at least. Returns how many were compared.
        """
        image, limits = self._images[0], self._runner.plan.limits
        expected, count = self._cells(image), 0
        for number, cells in enumerate((limits.rungs[0], limits.rungs[0], 1), 1):
            self._encoded([self._encoder.noise(number, (1, cells))])
            if not torch.equal(self._cells(image), expected):
                raise NotInvariant(f"{self._name}: one has other embeddings behind one of {cells} cells")
            count += 1
        return count

    def _cells(self, image: Image) -> Tensor:
        """Return the bits of all embeddings of an image of any size, without padding."""
        self._encoded([image])
        deep = self._encoder.deep
        tables = [self._encoder.embeddings, *([] if deep is None else deep.kept.unbind(0))]
        return torch.stack([table[: image.cells] for table in tables]).view(torch.uint8).cpu().clone()

    def _encoded(self, images: list[Image]) -> list[Tensor]:
        """Return the bits of the embeddings of ``images``, encoded together."""
        self._runner.executor.encode(list(enumerate(images)))
        kept = self._encoder.embeddings.view(torch.uint8).view(self._runner.plan.limits.max_images, -1)
        return list(kept[: len(images)].cpu().clone().unbind(0))
