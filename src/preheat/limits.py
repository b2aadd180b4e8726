"""What is POSSIBLE: resolved from what was asked, the model and the machine, once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass

from preheat.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds that everything else obeys. Blocks are ``block_size`` tokens; ``num_blocks`` counts the pad block."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_seqs: int | None
    block_size: int
    num_blocks: int

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def answers(self) -> bool:
        """Whether a prompt, of one token at least, leaves room for one more."""
        return self.max_model_len > 1


def mixes(settings: Settings) -> bool:
    """Whether prompts are cut to share steps with those who decode."""
    return settings.bucketing_policy == "unified" and settings.enable_chunked_prefill
