"""The limits of an engine, from the settings, the model and the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from preheat.cache_groups import WHOLE, CacheGroup
from preheat.core import PIECE
from preheat.errors import SettingsError
from preheat.settings import Settings
from preheat.utils.rungs import rungs_up_to

MAX_BLOCKS = 2**24
"""Most blocks of a pool; its ids are Python objects on the host."""


CHECKED_GRID = 3, 2
"""Rows and columns of cells of a checked image of any size."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of an engine.

    Blocks are ``block_size`` tokens; ``num_blocks`` counts the pad block. A row ends with at most
    ``num_speculative_tokens`` draft tokens. An image, or a piece of a prompt's embeddings, takes ``image_tokens``
    positions of a prompt; 0 means that there are none. Images of any size take up to as many, and pad to one of the
    ``rungs``. The last ``spare`` of ``max_model_len`` tokens are never
    computed. A block belongs to one of the ``groups`` of layers at a time; the first group is the one that keeps the
    most. An engine that ``pools`` may read the state of each token of a step. ``states`` are state slots beside one of
    each sequence, for a model with states: they hold states at the ends of blocks, and behind drafts.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_seqs: int | None
    block_size: int
    num_blocks: int
    num_speculative_tokens: int = 0
    image_tokens: int = 0
    spare: int = 0
    groups: tuple[CacheGroup, ...] = WHOLE
    pools: bool = False
    states: int = 0
    rungs: tuple[int, ...] = ()

    @property
    def state_slots(self) -> int:
        """State slots of a model with states; the first one is for padding."""
        return 1 + self.max_num_seqs + self.states

    @property
    def checked_image(self) -> int:
        """Positions of an image in a checked context: an image of any size is a small one."""
        return CHECKED_GRID[0] * CHECKED_GRID[1] if self.rungs else self.image_tokens

    @property
    def max_images(self) -> int:
        """Images with kept embeddings; no prompt within one step has more."""
        return self.max_num_batched_tokens // self.image_tokens + 1 if self.image_tokens else 0

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def max_rows(self) -> int:
        """The most rows of a step.

        Each row takes a token of the budget, and a block of its own in each group.
        """
        return min(self.max_num_seqs, self.max_num_batched_tokens, self.columns)

    @property
    def columns(self) -> int:
        """The most blocks of a sequence that all groups hold at once, without the pad block."""
        return (self.num_blocks - 1) // len(self.groups)

    @property
    def in_flight(self) -> int:
        """The most tokens of a sequence that are computed at a time, in the two steps that overlap."""
        return 2 * max(self.max_num_batched_tokens, 1 + self.num_speculative_tokens)

    def need(self, length: int, in_flight: int = 1) -> int:
        """Return the most blocks that a sequence of ``length`` tokens holds at once, in all groups.

        At most ``in_flight`` of its tokens are computed at a time. A sequence that has fewer blocks computes fewer
        tokens at a time, so one token decides whether it can run at all.
        """
        return sum(group.columns(length, self.block_size, in_flight) for group in self.groups)

    @property
    def max_sampled(self) -> int:
        """The most positions that a step samples.

        There is one in each row, and one after each draft token. An engine that pools may read all tokens of texts.
        """
        tokens = max(self.max_num_batched_tokens, self.max_num_seqs)
        if self.pools:
            return max(min(tokens, self.max_rows * (self.max_model_len - self.spare)), self.max_num_seqs)
        return min(self.max_num_seqs * (1 + self.num_speculative_tokens), tokens)


def check_ends(settings: Settings) -> None:
    """Raise SettingsError unless ``mamba_block_size`` is a whole number of blocks."""
    every, size = settings.mamba_block_size, settings.block_size or 1
    if every is not None and every % size:
        raise SettingsError(
            f"mamba_block_size {every} is no multiple of block_size {size}, and states are kept at the ends of blocks: "
            f"write a multiple, or leave it out",
            param="mamba_block_size",
        )


def more_states(settings: Settings) -> int:
    """Return the state slots beside one of each sequence, for a model with states."""
    drafts = 0 if settings.speculation is None else settings.speculation.tokens
    keeps = settings.enable_prefix_caching and settings.mamba_cache_mode != "none"
    needed = keeps + drafts
    if settings.max_kept_states is not None and needed:
        return settings.max_kept_states
    return needed * (settings.max_num_seqs or 0)


def resolve_limits(
    settings: Settings,
    max_positions: int,
    block_bytes: int,
    *,
    usable: int | None = None,
    cache_bytes: int | None = None,
    image_tokens: int = 0,
    any_size: bool = False,
    spare: int = 0,
    groups: tuple[CacheGroup, ...] = WHOLE,
    states: int = 0,
) -> Limits:
    """Resolve the limits of a model made for ``max_positions`` tokens.

    - ``block_bytes``: bytes of a block of its KV cache, for the layers of one group.
    - ``groups``: the groups of its layers.
    - ``states``: state slots beside one of each sequence, see :func:`more_states`.
    - ``image_tokens``: positions of an image, or the most if images have ``any_size``.
    - ``spare``: places behind the longest text, for a token that is never computed.
    - ``usable``: bytes of memory for the cache; None before it is known, when all sequences fit in full.
    - ``cache_bytes``: the backend's default size of the cache; None is all usable memory.

    The limits of a step and the block size must be set in ``settings``, see :func:`preheat.plan.modes.with_defaults`.
    Raises SettingsError for an impossible length or cache.
    """
    sequences, tokens, size = settings.max_num_seqs, settings.max_num_batched_tokens, settings.block_size
    if sequences is None or tokens is None or size is None:
        raise ValueError("the limits of a step and the block size have no defaults before there is a backend")
    length = settings.max_model_len or max_positions
    if length > max_positions:
        raise SettingsError(
            f"max_model_len {length} exceeds the {max_positions} positions that the model was made for: lower it",
            param="max_model_len",
        )
    speculates = settings.speculation
    if speculates is not None and speculates.tokens + 2 > length:
        raise SettingsError(
            f"num_speculative_tokens {speculates.tokens} leaves no room for a prompt within max_model_len {length}: "
            "lower it",
            param="num_speculative_tokens",
        )
    length += spare
    rungs = rungs_up_to(min(image_tokens, length)) if any_size else ()
    if rungs:
        image_tokens = rungs[-1]
    limits = Limits(
        num_speculative_tokens=0 if speculates is None else speculates.tokens,
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_num_prefill_seqs=settings.max_num_prefill_seqs,
        block_size=size,
        num_blocks=0,
        image_tokens=image_tokens or PIECE * settings.enable_prompt_embeds,
        spare=spare,
        groups=groups,
        states=states,
        rungs=rungs,
    )
    most = sequences * limits.need(length, limits.in_flight) + 1
    blocks = _num_blocks(settings, most, block_bytes, usable=usable, default=cache_bytes, groups=len(groups))
    return replace(limits, num_blocks=blocks)


def _num_blocks(
    settings: Settings, most: int, block_bytes: int, *, usable: int | None, default: int | None, groups: int
) -> int:
    """Return the number of blocks of the cache, including the pad block.

    It is at most ``most``, enough for all sequences at full length. An asked number counts blocks of all layers, so
    each of the ``groups`` has as many. Raises SettingsError if the asked size does not fit.
    """
    if settings.num_gpu_blocks_override is not None:
        return _checked_blocks(settings.num_gpu_blocks_override, block_bytes * groups, usable) * groups
    asked = settings.kv_cache_memory_bytes
    if usable is None:
        return most if asked is None else min(most, asked // block_bytes)
    if asked is not None and asked > usable:
        raise SettingsError(
            f"kv_cache_memory_bytes {asked} is more than the {usable} bytes that are left by gpu_memory_utilization "
            f"{settings.gpu_memory_utilization} and the memory reserved for graphs: lower it, or raise "
            "gpu_memory_utilization",
            param="kv_cache_memory_bytes",
        )
    return min(most, (asked or min(default or usable, usable)) // block_bytes)


def _checked_blocks(blocks: int, block_bytes: int, usable: int | None) -> int:
    """Return ``blocks`` if there is room for them. Raises SettingsError before anything is made for each block."""
    most = MAX_BLOCKS if usable is None else min(usable // block_bytes, MAX_BLOCKS)
    if blocks > most:
        raise SettingsError(
            f"num_gpu_blocks_override {blocks} takes {blocks * block_bytes / 2**30:,.1f} GiB, but there is room for "
            f"{most} blocks: lower it, or leave it out",
            param="num_gpu_blocks_override",
        )
    return blocks
