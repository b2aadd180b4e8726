"""The items of a plan: everything that may ever run, each on one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from preheat.core import SAMPLING_FIELDS, SamplingParams
from preheat.plan.buckets import Bucket

Kind = Literal["prompt", "decode", "mixed", "sampler", "swap", "determinism", "check"]
Stage = Literal["before_cache", "after_cache", "last"]

SWAP_SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Pairs of blocks that one compaction step swaps are padded to one of these."""

MAX_DETERMINISM_TOKENS = 128


class SamplerKey(NamedTuple):
    """``rows`` of logits, sampled under a setting of `SAMPLER_SETTINGS`; ``batch_changed``: the rows are new ones."""

    rows: int
    setting: str
    batch_changed: bool


def _setting(temperature: float, top_p: float, top_k: int) -> tuple[str, SamplingParams]:
    name = f"temp={temperature}, top_p={top_p}, top_k={top_k}"
    return name, SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)


GAUDI_SETTINGS: Mapping[str, SamplingParams] = MappingProxyType(
    dict(
        (
            _setting(0.0, 1.0, 0),
            _setting(1.0, 1.0, 0),
            _setting(0.7, 0.9, 50),
            _setting(0.3, 0.95, 20),
            _setting(1.2, 0.8, 100),
            _setting(0.8, 0.85, 0),
        )
    )
)
"""The settings of the sampler warm-up of vLLM on Gaudi, by their log text, in its order."""

BRANCH_SETTINGS: Mapping[str, SamplingParams] = MappingProxyType(
    {
        "min_p": SamplingParams(min_p=0.1),
        "penalties": SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
        "logit_bias": SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
        "min_tokens": SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[0]),
        "seed": SamplingParams(seed=1),
        "logprobs": SamplingParams(temperature=0.0, logprobs=5),
        "prompt_logprobs": SamplingParams(temperature=0.0, prompt_logprobs=5),
        "everything": SamplingParams(
            temperature=0.9,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            logit_bias={0: 1.0},
            min_tokens=2,
            stop_token_ids=[0],
            seed=1,
            logprobs=5,
        ),
    }
)
"""The branches of the sampler that those settings do not reach, each alone and all at once."""

SAMPLER_SETTINGS: Mapping[str, SamplingParams] = MappingProxyType({**GAUDI_SETTINGS, **BRANCH_SETTINGS})

NOT_SAMPLED = frozenset(name for name, field in SAMPLING_FIELDS.items() if field.acts != "sampler")
"""Fields of SamplingParams that no sampling code looks at. Every other field is in a setting."""


def level(params: SamplingParams) -> str:
    """How much of the sampler ``params`` need: each level at each size is one program."""
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    if penalised or params.logit_bias or params.min_tokens:
        return "full"
    return "greedy" if params.greedy else "filtered"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that may run. ``key`` is a Shape, a SamplerKey, the pairs of a swap, the number of a determinism pass
    or the name of a check. A ``fallback`` is what needs beyond the ladders run in.
    """

    kind: Kind
    key: Bucket | SamplerKey | int | str
    stage: Stage
    estimated_seconds: float = 0.0
    estimated_bytes: int = 0
    fallback: bool = False

    @property
    def name(self) -> str:
        """Unique within a plan and the same on every boot: what records are kept by."""
        return item_name(self.kind, self.key)

    @property
    def program(self) -> tuple[object, ...] | None:
        """The runnable program that the item stands for; None for those that only run others' programs again."""
        if isinstance(self.key, SamplerKey):
            return ("sampler", self.key.rows, level(SAMPLER_SETTINGS[self.key.setting]))
        return (self.kind, self.key) if self.kind not in ("determinism", "check") else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind,
            "name": self.name,
            "shape": key_dict(self.key),
            "stage": self.stage,
            "fallback": self.fallback,
            "estimated_seconds": round(self.estimated_seconds, 6),
            "estimated_bytes": self.estimated_bytes,
        }


@dataclass(frozen=True, slots=True)
class Dropped:
    """A candidate that will not run, and why."""

    kind: Kind
    key: Bucket
    reason: str

    @property
    def name(self) -> str:
        return item_name(self.kind, self.key)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "name": self.name, "shape": key_dict(self.key), "reason": self.reason}


def item_name(kind: Kind, key: Bucket | SamplerKey | int | str) -> str:
    """See `Item.name`."""
    if isinstance(key, Bucket):
        return str(key)
    if isinstance(key, SamplerKey):
        return f"(sampler, {key.rows}, {key.setting}, batch_changed={key.batch_changed})"
    return f"({kind}, {key})"


def key_dict(key: Bucket | SamplerKey | int | str) -> dict[str, Any]:
    """The parts of a key by name."""
    if isinstance(key, Bucket):
        return key.named_dims()
    if isinstance(key, SamplerKey):
        return key._asdict()
    return {"name": key} if isinstance(key, str) else {"size": key}


def sampler_sizes(decode: Iterable[Bucket], most: int) -> tuple[int, ...]:
    """Batch sizes that the sampler runs at: 0 and 1, then the distinct ones of the decode shapes, ascending.

    ``most``, the rows that any step may sample from, is there too.
    """
    return tuple(sorted({0, 1, most, *(shape.rows for shape in decode)}))


def sampler_keys(sizes: Iterable[int]) -> list[SamplerKey]:
    """For each size all settings with a changed batch, then all with an unchanged one, `GAUDI_SETTINGS` first."""
    return [
        SamplerKey(rows, setting, changed)
        for rows in sizes
        for settings in (GAUDI_SETTINGS, BRANCH_SETTINGS)
        for changed in (True, False)
        for setting in settings
    ]
