"""Options of the drafting of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from preheat.options.options import option

_spec = partial(option, group="Speculation")


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """Options of the group Speculation."""

    speculative_config: dict[str, Any] | None = _spec(  # noqa: RUF009 - None is not mutable
        None, "Drafting of tokens, as vLLM's JSON object: see docs/speculation.md."
    )
    speculative_model: str | None = _spec(
        None, "`[ngram]`, or the draft model; same as `model` in `speculative_config`."
    )
    num_speculative_tokens: int | None = _spec(
        None, "Tokens drafted for a row; same as in `speculative_config`.", low=1, high=128
    )
    speculative_k: str = _spec(
        "fixed",
        "Draft always `num_speculative_tokens` tokens (`fixed`), or choose the number from measured costs and "
        "acceptance (`auto`).",
        choices=("fixed", "auto"),
    )
    ngram_prompt_lookup_max: int | None = _spec(
        None, "Same as `prompt_lookup_max` in `speculative_config`.", low=1, high=64
    )
    ngram_prompt_lookup_min: int | None = _spec(
        None, "Same as `prompt_lookup_min` in `speculative_config`.", low=1, high=64
    )
    num_scheduler_steps: int = _spec(
        1,
        "vLLM's multi-step scheduling. More than 1 means `--async-scheduling`: the next step is prepared during the "
        "current one.",
        low=1,
    )
