"""A request: one sequence to run, with its images and its limits."""

from __future__ import annotations

from typing import Literal

import msgspec

from preheat.core.sampling import SamplingParams

MAX_STOP_IDS = 1024

OWN_ID = -2
"""The first id of dummy requests, which count down.

Ids of clients' requests are positive, and -1 is the sampler's empty row.
"""

PIECE = 64
"""Most positions of a piece of a prompt's embeddings."""


class Image(msgspec.Struct, array_like=True, weakref=True, frozen=True):
    """An image as the model's input, or a piece of a prompt's embeddings.

    ``pixels`` of an image are fp32 [channels, height, width]. An image of any size has a ``grid`` of rows and columns
    of cells, a position of a prompt each: its pixels are fp32 [patches, channels * size * size], cell by cell. Two
    frames of a video follow one another. A piece is [positions, hidden], at most :data:`PIECE` positions, of torch's
    type ``dtype``. An equal ``hash`` means equal pixels, and an equal grid.
    """

    hash: bytes
    pixels: bytes
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    grid: tuple[int, int] | None = None

    @property
    def cells(self) -> int:
        """Positions of an image with a grid."""
        return 0 if self.grid is None else self.grid[0] * self.grid[1]


class Segment(msgspec.Struct, array_like=True):
    """The positions of a prompt from ``start`` up to ``end``, for ``image``.

    There is one position for each of the image's embeddings.
    """

    start: int
    end: int
    image: Image


class Thinking(msgspec.Struct, array_like=True, frozen=True):
    """The limit on a text's reasoning.

    ``left`` more tokens may come, then the tokens ``last``, which end the reasoning.

    With ``within`` the text begins in its reasoning. Otherwise the token ``start`` begins the reasoning, if it comes
    first, white space aside. ``ends`` are the tokens that end reasoning without a limit.
    """

    left: int
    within: bool
    start: int
    ends: tuple[int, ...]
    last: tuple[int, ...]


BACKGROUND_PRIORITY = 2**62
"""Priority from which requests yield.

A request that yields gives up its slot when another request waits for one.
"""

_SPAN = 2**60


def in_background(priority: int) -> int:
    """Return the priority of a request that yields to others.

    Yielding requests keep their order.
    """
    return BACKGROUND_PRIORITY + _SPAN + max(-_SPAN, min(priority, _SPAN))


class Resume(msgspec.Struct, array_like=True, frozen=True):
    """The output that a request's client has already; the sequence goes on behind it.

    ``tokens`` follow the prompt, and count as output: in noise, penalties, grammars, lengths and stops. ``adapter`` is
    the digest of the adapter that gave them, empty for the base model; None: any adapter of the request's name.
    """

    tokens: list[int]
    adapter: str | None = None


POOLS = ("MEAN", "MAX", "WEIGHTEDMEAN", "MEAN_SQRT_LEN", "ALL")
"""The ways to pool the states of all tokens. The ``prompt_logprobs`` of a pooling request is a place in this list."""


class BlockSource(msgspec.Struct, frozen=True):
    """An engine that read a prompt: where its blocks are, and the number of tokens that they cover."""

    host: str
    port: int
    tokens: int
    engine_id: str = ""


class Request(msgspec.Struct, tag="request"):
    """One sequence to run: a client's request with ``n`` choices becomes ``n`` of these.

    ``id`` is unique in a frontend and increases with arrival. ``seed`` is in [0, 2**64). ``max_tokens`` fits the
    model's length. ``stop_ids`` (at most ``MAX_STOP_IDS``) end the sequence after ``min_tokens``: the end-of-sequence
    ids, unless ``ignore_eos``, and ``stop_token_ids``. ``segments`` are in order and do not overlap.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    choice: int = 0
    stop_ids: list[int] = []
    cache_salt: str = ""  # part of every block's hash
    segments: list[Segment] = []
    bad_words: list[list[int]] = []  # token ids of the texts that params.bad_words forbid
    priority: int = 0  # lower values go first, and are preempted last; see BACKGROUND_PRIORITY
    lora_name: str = ""  # the adapter; empty: the base model
    data_parallel_rank: int | None = None  # the replica for it; None: the server's router chooses
    thinking: Thinking | None = None  # with params.thinking_token_budget
    resume: Resume | None = None  # the rest of the fields stay as they were when the sequence began
    source: BlockSource | None = None  # blocks of the prompt are pulled from there

    @property
    def delivered(self) -> list[int]:
        """The output tokens that the client has already."""
        return [] if self.resume is None else self.resume.tokens
