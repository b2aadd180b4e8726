"""Messages from the engine to the frontend."""

from __future__ import annotations

from typing import Literal

import msgspec

from preheat.core.requests import BlockSource
from preheat.core.stats import Stats
from preheat.errors import WireError
from preheat.utils.contract import Contract

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class EngineState(msgspec.Struct):
    """The state of an engine.

    With ``paused`` no step runs. ``sleeping`` is the level of the sleep. ``weight_version`` names the weights;
    ``digest`` covers the logits of the boot check with them. ``blocked_reason``, if any, is the reason why no request
    is taken. ``contract`` has the engine's parts, None before the boot.
    """

    paused: bool = False
    sleeping: int | None = None
    weight_version: str = "default"
    digest: str = ""
    blocked_reason: str = ""
    contract: Contract | None = None


class Outcome(msgspec.Struct, tag="outcome"):
    """The answer to the Command ``id``.

    It has the state after the command, and the error if it failed.
    """

    id: int
    state: EngineState
    error: WireError | None = None


class Finish(msgspec.Struct, array_like=True):
    """The end of a sequence.

    ``stop_id`` is the stop token that ended it; ``error`` is set for reason "error".
    """

    reason: FinishReason
    stop_id: int | None = None
    error: WireError | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Natural logarithms of the model's distribution, before penalties and temperature, at one position.

    ``rank`` counts from 1. ``top`` has the most likely tokens in order; in a tie, the lowest id first. If a request has
    ``logprob_token_ids``, ``top`` has these instead, in their order.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # the garbage collector soon leaves tuples of numbers out, and never lists


class Delta(msgspec.Struct, tag="delta"):
    """The results of one step: token ``tokens[i]`` for sequence ``ids[i]``.

    An id occurs k times for k tokens. ``tokens`` includes stop tokens. ``logprobs`` is by index i, ``finished`` and
    ``prompt_logprobs`` by id. ``started`` has, for each sequence that started in this step, the number of tokens found
    in the prefix cache.
    """

    ids: list[int] = []
    tokens: list[int] = []
    finished: dict[int, Finish] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    started: dict[int, int] = {}
    stats: Stats | None = None
    pooled: dict[int, bytes] = {}  # of a pooling engine: fp32 [hidden], by id
    adapters: dict[int, str] = {}  # the digests of the adapters of started sequences, by id; none for the base model
    digests: bytes = b""  # 8 for each token: of the logits behind it, little-endian; empty if nobody wants a receipt


class Progress(msgspec.Struct, tag="progress"):
    """Progress of the engine's start: ``done`` of ``total`` items.

    ``eta_s`` is None while it cannot be estimated.
    """

    done: int
    total: int
    current: str
    eta_s: float | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The engine can run, within these limits. ``record`` is the warm-up record, as JSON.

    ``blocked_reason``, if any, is the reason why it takes no requests: a check at boot failed. ``max_prompt_len`` is
    None if only ``max_model_len`` limits the prompt. ``num_blocks`` counts blocks of all layers. ``digest`` covers the
    logits of the check. ``engine`` is the replica of the ``record``, as in Report. ``spare``: places behind
    ``max_model_len`` for a token that is never computed. ``contract`` has the engine's parts. ``sends``: where
    other engines get blocks, if this engine sends them.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    seconds: float
    record: bytes = b""
    blocked_reason: str = ""
    max_prompt_len: int | None = None
    digest: str = ""
    engine: int = 0
    spare: int = 0
    contract: Contract | None = None
    sends: BlockSource | None = None

    @property
    def places(self) -> int:
        """Places for a prompt and the tokens that follow it."""
        return self.max_model_len + self.spare


class Report(msgspec.Struct, tag="report"):
    """The answer to Ask: the current warm-up record, as JSON. The server sets ``engine``, the replica."""

    record: bytes
    engine: int = 0


class AdapterReport(msgspec.Struct, tag="adapter_report"):
    """The answer to LoadAdapter or UnloadAdapter ``id``: done, unless there is an ``error``."""

    name: str
    id: int = 0
    error: WireError | None = None


class Died(msgspec.Struct, tag="died"):
    """The engine's last message: ``error`` ended it."""

    error: WireError


class Leaving(msgspec.Struct, tag="leaving"):
    """The engine was asked to end: it wants to finish its requests and to get no others."""


class Declined(msgspec.Struct, tag="declined"):
    """A member has no room for the request ``id`` now, or has ``lost`` it though others go on."""

    id: int
    lost: bool = False


FromEngine = Delta | Progress | Ready | Report | AdapterReport | Died | Leaving | Outcome | Declined
