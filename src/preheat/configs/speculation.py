"""The options of speculation, vLLM's new and old ones, as one :class:`Speculation`.

``--speculative-config`` takes vLLM's JSON object; the flags of older versions are other names of its keys. A key that
is not served is refused by name, with a replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from preheat.configs.structured import why_none
from preheat.errors import SettingsError
from preheat.utils.text import did_you_mean

Method = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar"]

WITH_MODEL: tuple[Method, ...] = ("draft_model", "eagle3")
"""Methods that draft with a checkpoint of their own."""

WITH_WEIGHTS: tuple[Method, ...] = (*WITH_MODEL, "mtp")
"""Methods that draft with weights."""

_NAMED_MTP = ("deepseek_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""Other names in vLLM of the method mtp, by the family of the checkpoint."""

_MTP_FAMILIES = "method mtp serves Qwen3-Next, Qwen3.5, DeepSeek-V3 and GLM-4.7-Flash"

MAX_TOKENS = 128
"""Most draft tokens of a row, as in vLLM."""

AUTO, AUTO_MOST = "auto", 7
"""The value that lets measurements choose the number of draft tokens, and their greatest choice by default."""

_NO_HEADS = "its heads draft without the target's noise and its checkpoints are out of use"
REFUSED_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "medusa": _NO_HEADS,
        "mlp_speculator": _NO_HEADS,
        "eagle": "heads of EAGLE-1 and 2 are other networks, replaced by eagle3: use a head of EAGLE-3",
        "ngram_gpu": "the lookup runs on the host: write ngram",
    }
)
"""Methods of vLLM that are not served, with the reason."""

_BY_BITS = "a draft is kept if it is the token that plain decoding draws, and nothing else is offered"
REFUSED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "draft_tensor_parallel_size": "this version runs on one device: leave it at 1",
        "quantization": "a draft's weights are used as its checkpoint stores them",
        "max_model_len": "the draft reads as far as the target does",
        "revision": "give the draft as a directory",
        "code_revision": "no code of a checkpoint is ever run",
        "attention_backend": "the draft runs on the target's kernels",
        "kv_cache_dtype": "the draft's cache has its weights' type",
        "draft_load_config": "the draft is loaded as --load-format says",
        "rejection_sample_method": _BY_BITS,
        "acceptance_method": _BY_BITS,
        "posterior_threshold": _BY_BITS,
        "posterior_alpha": _BY_BITS,
        "draft_sample_method": "drafts are drawn with the target's noise and parameters, so most of them are kept",
        "num_speculative_tokens_per_batch_size": "--speculative-k auto chooses by measurements of every batch size",
        "disable_by_batch_size": "--speculative-k auto chooses by measurements of every batch size",
        "parallel_drafting": "drafts are drawn one after the other",
        "disable_padded_drafter_batch": "the draft's steps are padded to the plan's buckets",
    }
)
"""Keys of vLLM's object that are not served, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The method of drafting, and its limits.

    ``tokens`` is the most drafts of a row; with ``auto`` fewer may be chosen. ``lookup`` are the least and the most
    tokens that the n-gram method matches. The other fields belong to the suffix method. ``depth`` is the depth of its
    trees, in tokens. ``requests`` is the most past answers in the trees. ``factor`` is the most drafts for each matched
    token. ``likely`` is the least share of past continuations that a draft must have.
    """

    method: Method
    tokens: int
    auto: bool = False
    model: str | None = None
    lookup: tuple[int, int] = (1, 5)
    depth: int = 24
    requests: int = 10_000
    factor: float = 1.0
    likely: float = 0.1

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of verify steps, ascending: a row's last known token and its drafts, with padding."""
        if not self.auto:
            return (self.tokens + 1,)
        return tuple(sorted({min(1 + count, self.tokens + 1) for count in (1, 2, 4, 7, 15, 31, 63, MAX_TOKENS)}))


WITHOUT: Mapping[str, Any] = MappingProxyType(
    {
        "speculative_config": None,
        "speculative_model": None,
        "num_speculative_tokens": None,
        "speculative_k": "fixed",
        "ngram_prompt_lookup_max": None,
        "ngram_prompt_lookup_min": None,
    }
)
"""The settings of an engine that speculates no more."""

_INT, _FLOAT = (int,), (int, float)
_KEYS: Mapping[str, tuple[tuple[type, ...], float | None, float | None]] = MappingProxyType(
    {
        "method": ((str,), None, None),
        "model": ((str,), None, None),
        "num_speculative_tokens": ((int, str), 1, MAX_TOKENS),
        "prompt_lookup_max": (_INT, 1, 64),
        "prompt_lookup_min": (_INT, 1, 64),
        "suffix_decoding_max_tree_depth": (_INT, 2, 256),
        "suffix_decoding_max_cached_requests": (_INT, 0, 1_000_000),
        "suffix_decoding_max_spec_factor": (_FLOAT, 0.0, 64.0),
        "suffix_decoding_min_token_prob": (_FLOAT, 0.0, 1.0),
    }
)
"""The keys that are served: their types, the least and the greatest value."""

_ONLY = {"prompt_lookup": "ngram", "suffix_decoding": "suffix"}


def speculation_of(settings: Any) -> Speculation | None:
    """Return the speculation of ``settings``; None without one. Raises SettingsError, naming the key or the option."""
    asked = _asked(settings)
    if not asked:
        return None
    method, model = _method(asked)
    for key in asked:
        for prefix, only in _ONLY.items():
            if key.startswith(prefix) and method != only:
                raise _error(f"{key} belongs to method {only}, and the method is {method}: leave it out")
    if method == "grammar" and (why := why_none(settings)):
        raise _error(f"method grammar drafts tokens that grammars force, and there are no grammars: {why}")
    tokens, auto = _tokens(asked, auto=settings.speculative_k == AUTO)
    least, most = asked.get("prompt_lookup_min"), asked.get("prompt_lookup_max")
    most = max(5, least or 0) if most is None else most
    least = 1 if least is None else least
    if least > most:
        raise _error(f"prompt_lookup_min {least} is more than prompt_lookup_max {most}: change one of them")
    return Speculation(
        method=method,
        tokens=tokens,
        auto=auto,
        model=model,
        lookup=(least, most),
        depth=asked.get("suffix_decoding_max_tree_depth", 24),
        requests=asked.get("suffix_decoding_max_cached_requests", 10_000),
        factor=float(asked.get("suffix_decoding_max_spec_factor", 1.0)),
        likely=float(asked.get("suffix_decoding_min_token_prob", 0.1)),
    )


def _asked(settings: Any) -> dict[str, Any]:
    """Return all options of speculation, by vLLM's keys.

    Raises SettingsError for a key that is not served, or has two values.
    """
    given = dict(settings.speculative_config or {})
    flags = {
        "model": settings.speculative_model,
        "num_speculative_tokens": settings.num_speculative_tokens,
        "prompt_lookup_max": settings.ngram_prompt_lookup_max,
        "prompt_lookup_min": settings.ngram_prompt_lookup_min,
    }
    for key, value in flags.items():
        if value is not None:
            if key in given and given[key] != value:
                raise _error(f"{key} is {given[key]!r} here and {value!r} in its flag: give it once")
            given[key] = value
    given = {key: value for key, value in given.items() if value is not None}
    if given.get("draft_tensor_parallel_size") == 1:
        del given["draft_tensor_parallel_size"]
    for key, value in given.items():
        _check(key, value)
    if not given and settings.speculative_k == AUTO:
        raise SettingsError(
            "speculative_k auto needs a method of drafting: give --speculative-config too", param="speculative_k"
        )
    return given


def _check(key: str, value: object) -> None:
    if reason := REFUSED_KEYS.get(key):
        raise _error(f"{key} is not supported: {reason}")
    if key not in _KEYS:
        raise _error(f"unknown key {key!r}{did_you_mean(key, _KEYS)}")
    kinds, low, high = _KEYS[key]
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise _error(f"{key}: {value!r} is not {'a number' if low is not None else 'text'}")
    if isinstance(value, int | float) and low is not None and high is not None and not low <= value <= high:
        raise _error(f"{key}: {value!r} must be between {low} and {high}")


def _method(asked: Mapping[str, Any]) -> tuple[Method, str | None]:
    """Return the method, and its draft model, if it has one."""
    model, method = asked.get("model"), asked.get("method")
    if model is not None and model.strip("[]") in ("ngram", "suffix"):
        if method not in (None, model.strip("[]")):
            raise _error(f"model {model} contradicts method {method}: drop one of them")
        method, model = model.strip("[]"), None
    if method is None:
        method = "draft_model" if model else "ngram" if any("lookup" in key for key in asked) else None
    if method is None:
        raise _error(f'no method of drafting is named: give a "method" ({", ".join(get_args(Method))}) or a "model"')
    if method in _NAMED_MTP:
        method = "mtp"
    if method.endswith("_mtp"):
        raise _error(f"method {method} belongs to a family of checkpoints that drafts otherwise: {_MTP_FAMILIES}")
    if reason := REFUSED_METHODS.get(method):
        raise _error(f"method {method} is not supported: {reason}")
    makers: dict[str, Method] = {name: name for name in get_args(Method)}
    if method not in makers:
        raise _error(f"unknown method {method!r}{did_you_mean(method, makers)}; there are {', '.join(makers)}")
    if method in WITH_MODEL and not model:
        raise _error(f'method {method} needs the "model" that drafts')
    if method not in WITH_MODEL and model:
        raise _error(f"method {method} drafts without a model: leave {model!r} out")
    return makers[method], model


def _tokens(asked: Mapping[str, Any], *, auto: bool) -> tuple[int, bool]:
    """Return the most drafts of a row, and whether fewer may be chosen."""
    tokens = asked.get("num_speculative_tokens")
    if isinstance(tokens, str):
        if tokens != AUTO:
            raise _error(f"num_speculative_tokens: {tokens!r} is neither a number nor auto")
        return AUTO_MOST, True
    if tokens is None and not auto:
        raise _error('num_speculative_tokens is missing: say how many tokens are drafted, or "auto"')
    return AUTO_MOST if tokens is None else tokens, auto


def _error(message: str) -> SettingsError:
    return SettingsError(f"speculative_config: {message}", param="speculative_config")
