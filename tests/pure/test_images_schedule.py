"""Images on the paper device: wherever chunks end, whatever is encoded when, each position sees its own embedding."""

from __future__ import annotations

import random

import pytest

from preheat.core import Image, Request, Segment
from preheat.errors import InvalidRequest
from preheat.plan.programs import encoder_programs
from preheat.schedule import prefix
from preheat.schedule.images import EncoderCache
from preheat.schedule.scheduler import Caching
from tests.controls import fails
from tests.pure.paper import Harness, Scripted, limits, request

TOKENS, TOKEN = 5, 2
GRIDS = (1, 5), (5, 1), (1, 3), (2, 1)
IMAGES = [Image(bytes([number]) * 16, b"", grid=grid) for number, grid in enumerate(GRIDS)]
"""Images of up to ``TOKENS`` cells."""


def with_parts(number: int, parts: list[int | Image], max_tokens: int, **more) -> Request:
    """Return a request of tokens and images, in order.

    All image positions hold the same token.
    """
    prompt: list[int] = []
    segments = []
    for part in parts:
        if isinstance(part, Image):
            tokens = part.cells or TOKENS
            segments.append(Segment(len(prompt), len(prompt) + tokens, part))
            prompt += [TOKEN] * tokens
        else:
            prompt.append(part)
    asked = request(number, prompt, max_tokens, **more)
    asked.segments = segments
    return asked


def round_of(seed: int, fails: float = 0.05) -> Harness:
    """Run random requests under random limits, mostly cramped."""
    draw = random.Random(seed)
    size, seqs, chunked = draw.randint(1, 6), draw.randint(1, 4), draw.random() < 0.8
    longest = 44
    most = draw.choice((seqs + 1, 7, 12, 30)) if chunked else 64
    harness = Harness(
        limits(
            max_model_len=longest, max_num_seqs=seqs, max_num_batched_tokens=max(most, seqs), block_size=size,
            num_blocks=1 + -(-longest // size) + draw.randint(0, 12), image_tokens=TOKENS,
        ),
        caching=Caching(draw.random() < 0.7),
        enable_chunked_prefill=chunked,
        mixed_steps=(mixed := draw.random() < 0.7),
        proposer=Scripted(draw.choice((0, 2)), right=0.7) if mixed else None,
        overlap=draw.random() < 0.5,
        defrag_threshold=draw.choice((None, 0)),
    )  # fmt: skip
    for number in range(draw.randint(3, 9)):
        images = draw.choices(IMAGES[: draw.randint(1, 4)], k=draw.choice((0, 1, 1, 2, 4)))
        texts = [[draw.randrange(2) for _ in range(draw.choice((0, 1, 3)))] for _ in range(len(images) + 1)]
        parts = [*texts[0], *(each for image, text in zip(images, texts[1:], strict=True) for each in (image, *text))]
        wanted = draw.choice((None, None, 0))
        harness.add(with_parts(number, parts or [1], draw.randint(1, 8), prompt_logprobs=wanted))
        for _ in range(draw.randint(0, 3)):
            where = draw.choice(("pack", "launch", "listener", "result"))
            harness.step(*(("out of paper", where) if draw.random() < fails else ()))
    harness.run()
    return harness


def test_each_position_sees_its_own_embedding():
    done = [round_of(seed) for seed in range(160)]
    for harness in done:
        harness.verify()
    assert sum(harness.scheduler.stats().preemptions for harness in done) > 0
    assert sum(harness.scheduler.stats().prefix_hits for harness in done) > 0


def never_loses(patch):
    """Plant a failed step whose images count as encoded."""
    patch.setattr(EncoderCache, "lose", lambda *_: ())


def loses_too_little(patch):
    """Plant steps in flight that go on although they see a failed step's images."""
    patch.setattr(EncoderCache, "lose", lambda self, *_: self.forget() or ())


def no_pixels(patch):
    """Plant block hashes without the image."""
    patch.setattr(prefix, "_images", lambda *_: b"")


def no_offset(patch):
    """Plant block hashes without the place of the block in its image."""
    hashes = lambda request, first, size: b"".join(  # noqa: E731
        each.image.hash for each in request.segments if each.start < first + size and each.end > first
    )
    patch.setattr(prefix, "_images", hashes)


def evicts_what_is_needed(patch):
    """Plant an encoder cache that gives away its oldest place, whoever needs it."""

    def keep(self, images):
        encode = []
        for key, image in images.items():
            if key not in self._kept:
                self._kept[key] = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
                encode.append((self._kept[key], image))
        return encode

    patch.setattr(EncoderCache, "_keep", keep)


@pytest.mark.parametrize("plant", [never_loses, loses_too_little, no_pixels, evicts_what_is_needed])
def test_planted_faults_are_noticed(plant, monkeypatch):
    plant(monkeypatch)
    noticed = 0
    for seed in range(400):
        try:
            round_of(seed, fails=0.3).verify()
        except (AssertionError, KeyError):  # the key of an image that was given away
            noticed += 1
            break
    assert noticed


def test_a_hash_knows_where_an_image_begins(monkeypatch):
    """A hash knows where in an image a block begins.

    Here two equal images lie at different offsets of blocks.
    """

    def hits() -> Harness:
        harness = Harness(limits(block_size=2, image_tokens=TOKENS))
        first, second = [IMAGES[0], 1, 1, 1], [TOKEN, IMAGES[0], 1, 1]
        for number, parts in enumerate((first, second)):
            harness.add(with_parts(number, parts, 3))
            harness.run()
        return harness

    hits().verify()
    no_offset(monkeypatch)
    with fails():
        hits().verify()


def test_text_before_an_image_is_shared():
    harness = Harness(limits(image_tokens=TOKENS))
    text = [0, 1, 1, 0, 1, 0, 0, 1]
    for number, image in enumerate([IMAGES[0], IMAGES[1], IMAGES[0]]):
        harness.add(with_parts(number, [*text, image, 1], 2))
        harness.run()
    harness.verify()
    assert [harness.outcomes[number].starts for number in range(3)] == [[0], [8], [12]]
    assert harness.device.encoded == 2  # it is still kept, though half of it is computed again


def test_pixels_are_kept_once():
    harness = Harness(limits(image_tokens=TOKENS))
    asked = [with_parts(number, [Image(b"one", b"pixels"), 1], 1) for number in range(3)]
    harness.add(*asked)
    assert len({id(each.segments[0].image) for each in asked}) == 1


def test_a_model_without_images_takes_none():
    with pytest.raises(InvalidRequest, match="sees no images"):
        Harness(limits()).add(with_parts(0, [IMAGES[0]], 1))


def test_every_number_of_images_is_a_sum_of_programs():
    for count in range(40):
        assert sum(program.size for program in encoder_programs(count)) == count
    assert [program.size for program in encoder_programs(7)] == [4, 2, 1]
