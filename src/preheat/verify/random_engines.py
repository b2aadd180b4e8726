"""The random features of an engine of ``preheat verify --fuzz`` besides plain decoding.

They are adapters, drafts, rounded weights and cache, ranks, and blocks on the host. No torch here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from preheat.pooling.encoders import encoder_name
from preheat.verify.random_models import EVEN, WHOLE_NORMS, WITH_SINKS, WITH_STATES, write_draft

HOST_GIB = 0.02

METHODS = ("ngram", "own", "target")
"""Ways to draft: n-grams, an own model, or the target itself."""


class Features(NamedTuple):
    """The random settings of a round's engines.

    ``both`` are settings of both engines that may change bits. ``loaded`` are settings of the engine under load alone
    and must change no bit.
    """

    both: dict[str, Any]
    loaded: dict[str, Any]


def random_features(draw: random.Random, folder: Path, config: dict[str, Any] | None) -> Features:
    """Return features for the model of ``config``, or for an unknown one.

    A draft model goes into ``folder``.
    """
    both, loaded = dict[str, Any](), dict[str, Any]()
    if config is not None and encoder_name(config["architectures"][0]) is not None:
        return Features(_of_an_encoder(draw, config), loaded)
    if config is not None and config["architectures"][0] in WITH_STATES:
        return _with_states(draw, folder, config)
    plain = config is not None and "quantization_config" not in config and config["architectures"][0] != WITH_SINKS
    if plain and draw.random() < 0.15:
        both["quantization"] = "fp8"
    if draw.random() < 0.2:
        both["kv_cache_dtype"] = draw.choice(("fp8", "fp8_e5m2"))
    adapted = draw.random() < 0.25
    if adapted:
        both |= {"enable_lora": True, "max_loras": draw.randint(1, 3), "max_lora_rank": draw.choice((4, 16, 24, 70))}
    if config is not None and not both and _divides(config) and draw.random() < 0.4:
        both["tp_invariant"] = True
        if config["architectures"][0] == WITH_SINKS:  # ranks have its experts whole, or not at all
            both["enable_expert_parallel"] = True
        loaded["tensor_parallel_size"] = 2
        return Features(both, loaded)
    if draw.random() < 0.25:
        loaded["speculative_config"] = _drafts(draw, folder, config)
    if draw.random() < 0.2:
        loaded["kv_offloading_size"] = HOST_GIB
    return Features(both, loaded)


def _of_an_encoder(draw: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Return how an encoder pools, and the type of its cache."""
    found: dict[str, Any] = {"kv_cache_dtype": draw.choice(("fp8", "fp8_e5m2"))} if draw.random() < 0.2 else {}
    if "num_labels" not in config:
        kind = draw.choice(("CLS", "LAST", "MEAN", "MAX", "WEIGHTEDMEAN"))
        found["pooler_config"] = {"pooling_type": kind, "normalize": False}
    return found


def _with_states(draw: random.Random, folder: Path, config: dict[str, Any]) -> Features:
    """Return features for a model with states: other kept states under load, and drafts."""
    both = {"kv_cache_dtype": "fp8"} if draw.random() < 0.2 else {}
    loaded: dict[str, Any] = {"mamba_cache_mode": draw.choice(("align", "all", "all", "none"))}
    if draw.random() < 0.5:
        loaded["max_kept_states"] = draw.randint(1, 12)
    if draw.random() < 0.4:
        loaded["speculative_config"] = _drafts(draw, folder, config, ("ngram", "own"))
    return Features(both, loaded)


def _drafts(
    draw: random.Random, folder: Path, config: dict[str, Any] | None, methods: Sequence[str] = METHODS
) -> dict[str, Any]:
    """Return options to draft by one of the ``methods``.

    These are n-grams, an own model, or the target itself, which is always right.
    """
    count = {"num_speculative_tokens": draw.randint(1, 5)}
    if config is None or (by := draw.choice(methods)) == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 1, **count}
    if by == "own":
        write_draft(folder / "draft", config, draw)
    return {"method": "draft_model", "model": str(folder / ("draft" if by == "own" else "model")), **count}


def _divides(config: dict[str, Any]) -> bool:
    """Return whether two ranks can share the model."""
    names = ("intermediate_size", "vocab_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    heads = config["num_attention_heads"] % 4 == config["num_key_value_heads"] % 2 == 0
    plain = "attn_config" not in config and "quantization_config" not in config
    plain = plain and config["architectures"][0] not in WHOLE_NORMS
    return heads and plain and all(config.get(name, 0) % EVEN == 0 for name in names)
