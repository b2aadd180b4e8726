"""The sampling parameters of the sampler's warm-up, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from preheat.core import Level, SamplingParams

_GAUDI = ((0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.9, 50), (0.3, 0.95, 20), (1.2, 0.8, 100), (0.8, 0.85, 0))

GAUDI_SETTINGS: Mapping[str, SamplingParams] = MappingProxyType(
    {f"temp={t}, top_p={p}, top_k={k}": SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in _GAUDI}
)
"""The settings of the sampler warm-up of vLLM on Gaudi.

They are by their log text, in its order.
"""

BRANCH_SETTINGS: Mapping[str, SamplingParams] = MappingProxyType(
    {
        "min_p": SamplingParams(min_p=0.1),
        "penalties": SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
        "logit_bias": SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
        "min_tokens": SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[0]),
        "seed": SamplingParams(seed=1),
        "logprobs": SamplingParams(temperature=0.0, logprobs=5),
        "logprob_token_ids": SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=[0]),
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
"""Branches of the sampler beyond the settings above, each alone and all together."""

SAMPLER_SETTINGS: Mapping[str, SamplingParams] = MappingProxyType({**GAUDI_SETTINGS, **BRANCH_SETTINGS})

LEVEL_SETTINGS: Mapping[Level, str] = MappingProxyType(
    {
        Level.GREEDY: "temp=0.0, top_p=1.0, top_k=0",
        Level.FILTERED: "temp=0.7, top_p=0.9, top_k=50",
        Level.FULL: "everything",
    }
)
"""For each level the setting that runs the most of its code."""

POOLER_SETTINGS = (
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0),
)
"""Requests of an engine that pools.

They ask for reports of last tokens, and of all tokens of a prompt.
"""
