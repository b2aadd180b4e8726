"""The options of bucket ranges, and the choice of a bucketing policy from other settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preheat.options.environment import warn
from preheat.options.options import option

_COUNTED = {
    "prompt_bs": "prompts in a step (with `unified`, the largest is `--max-num-prefill-seqs`)",
    "prompt_seq": "tokens of a prompt (with `unified`, of a step with prompts)",
    "decode_bs": "decoding rows",
    "decode_block": "KV blocks, summed over decoding rows",
    "decode_seq": "tokens of a decoding row, instead of KV blocks",
}
_PARTS: dict[str, tuple[str, int, int | None]] = {
    "min": ("Smallest bucket of {}.", 1, None),
    "step": ("Step between buckets of {}.", 1, None),
    "max": ("Largest bucket of {}.", 1, None),
    "pad_max": ("Maximum padding of `padding_aware` buckets of {}; 0 is no limit.", 0, None),
    "pad_percent": ("Maximum padding of `padding_aware` buckets of {}, in percent.", 0, 50),
}
DEFAULT_POLICY = "unified"
"""The bucketing policy where neither an option nor the platform names one."""

SPLIT_OPTIONS = (
    "bucketing_from_file",
    *(f"prompt_bs_bucket_{part}" for part in _PARTS if part != "max"),
    *(f"{name}_bucket_{part}" for name in ("prompt_seq", "decode_block", "decode_seq") for part in _PARTS),
)
"""Options of buckets that have their meaning only under the split policy."""


def bucket_range(dimension: str, part: str) -> Any:
    """Return the option for a ``part`` of a ``dimension``'s range of buckets.

    Its names are the variables of vLLM on Gaudi. Later versions call the length of prompts query.
    """
    text, low, high = _PARTS[part]
    query = f"VLLM_PROMPT_QUERY_BUCKET_{part}".upper() if dimension == "prompt_seq" else None
    name = f"VLLM_{dimension}_BUCKET_{part}".upper()
    text = text.format(_COUNTED[dimension])
    return option(None, text, group="Buckets", env=name, later_env=query, low=low, high=high)


def strategy_named(text: str) -> str:
    """Return the strategy of this name; names of vLLM on Gaudi are understood too."""
    return {"exp": "exponential", "lin": "linear", "pad": "padding_aware"}.get(text, text)


def with_bucketing_policy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the policy that understands their bucket ranges.

    The choice is logged once. Ranges of prompts and blocks come from vLLM on Gaudi, with steps that read prompts or
    decode: the split policy. The unified policy counts if an option asks for it; there, the largest prompt batch is the
    most prompts in a step.
    """
    chosen = dict(values)
    given = [name for name in SPLIT_OPTIONS if chosen.get(name) is not None]
    unified = chosen.get("max_num_mixed_tokens") is not None
    if given and chosen.get("bucketing_policy") is None and not unified:
        chosen["bucketing_policy"] = "split"
        named = ", ".join(f"VLLM_{name.upper()}" for name in given)
        warn(
            f"{named}: bucketing policy split, with separate steps for prompts and decoding; --bucketing-policy picks "
            "another"
        )
    if unified and chosen.get("bucketing_policy") is None:
        chosen["bucketing_policy"] = DEFAULT_POLICY
    if chosen.get("bucketing_policy") == "split":
        return chosen
    if (prompts := chosen.pop("prompt_bs_bucket_max", None)) is not None:
        asked = chosen.get("max_num_prefill_seqs")
        chosen["max_num_prefill_seqs"] = prompts if asked is None else min(prompts, asked)
        most = chosen["max_num_prefill_seqs"]
        warn(f"VLLM_PROMPT_BS_BUCKET_MAX: the unified policy reads it as --max-num-prefill-seqs {most}")
    return chosen
