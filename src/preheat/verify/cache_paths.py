"""The paths of ``preheat verify`` on cached blocks.

Prompts that are nearly the same, prompts that were given up, many blocks that move at once, and answers that are read
as prompts. The number of cached tokens of a prompt is compared with the rule itself, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from preheat.core import SamplingParams
from preheat.frontend.request_state import RequestState
from preheat.verify.compare import Divergence, PathResult, Seen, compare
from preheat.verify.context_paths import alone, compaction
from preheat.verify.drive import Engine
from preheat.verify.prompts import Prompt

OUTPUTS = 4
"""Tokens of an answer."""

ONE_TOKEN = SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True)


def nearly_equal(engine: Engine, names: Sequence[str]) -> PathResult | None:
    """Serve prompts that are nearly equal.

    They differ in one token, in their end, in their salt or in their adapter, one of ``names``. Each is served alone
    behind the earlier ones. Returns None where nothing is kept or where no prompt has two blocks.
    """
    limits, size = engine.loop.scheduler.limits, engine.loop.scheduler.limits.block_size
    if not engine.loop.scheduler.prefix.enabled or limits.max_model_len < 3 * size + 2 * OUTPUTS:
        return None
    base, vocab = drawn_tokens(engine, 2 * size + 5, 21), engine.vocab_size
    asked = [greedy_prompt(base), greedy_prompt(base[: 2 * size])]
    asked += [greedy_prompt(_with_another(base, at, vocab)) for at in (2 * size - 1, size - 1, size, 0)]
    asked += [greedy_prompt(base, salt) for salt in ("one", "two", "one")]
    asked += [greedy_prompt(base, name=name) for name in names[:2]]
    grown = [greedy_prompt(drawn_tokens(engine, 3 * size - OUTPUTS + more, 30 + more)) for more in range(3)]
    said = [_said(state) for prompt in grown for state in engine.serve([prompt])]
    later = [greedy_prompt([*prompt.tokens, *tokens, *base[:5]]) for prompt, tokens in zip(grown, said, strict=True)]
    asked += grown + [prompt for prompt in later if len(prompt.tokens) + OUTPUTS <= limits.max_model_len]
    return compared("nearly equal prompts", engine, asked)


def compared(path: str, engine: Engine, asked: Sequence[Prompt]) -> PathResult:
    """Compare prompts alone and together; ``path`` is the result's name.

    Each of ``asked`` runs alone in an empty cache, then all run in turn in one cache. Cached tokens are compared with
    the rule, if the cache has room for all blocks and states.
    """
    first, found, states = list[Seen](), list[Seen](), list[RequestState]()
    for prompt in asked:
        engine.forget_prefixes()
        first += engine.run([prompt])
    engine.forget_prefixes()
    for prompt in asked:
        states += engine.serve([prompt])
        found += [engine.seen_of(choice) for choice in states[-1].choices]
    right = _rightly_cached(engine, asked, states)
    total = sum(state.cached_tokens for state in states)
    result = compare(path, first, [found], f"{total:,} tokens from the prefix cache")
    exact = engine.ready.num_blocks > sum(len(each.tokens) for each in asked) // engine.ready.block_size + len(asked)
    exact &= engine.loop.scheduler.kept_ends is None or engine.loop.scheduler.limits.states >= 3 * len(asked)
    wrong = [
        Divergence(1, number, most, float(state.cached_tokens - most))
        for number, (state, most) in enumerate(zip(states, right, strict=True))
        if state.cached_tokens > most or (exact and state.cached_tokens < most)
    ]
    return result.with_wrong(wrong)


def _rightly_cached(engine: Engine, asked: Sequence[Prompt], states: Sequence[RequestState]) -> list[int]:
    """Return how many tokens of each prompt were computed before in full blocks.

    The blocks must lie behind the same tokens, for the same salt and with the same adapter. A model with states needs
    a state behind the last one: a prompt leaves states at its last end, where other prompts branch off, and behind.
    """
    size, known, found = engine.loop.scheduler.limits.block_size, set[tuple[str, str, bytes]](), list[int]()
    ends, behind = engine.loop.scheduler.kept_ends, set[tuple[str, str, bytes]]()
    digests = {} if isinstance(engine.loop.adapters, str) else engine.loop.adapters.digests
    for prompt, state in zip(asked, states, strict=True):
        computed = [*prompt.tokens, *_said(state)][:-1]  # the last token was drawn and never read
        keys = [
            (prompt.salt, digests.get(prompt.lora_name, ""), repr(computed[:end]).encode())
            for end in range(size, len(computed) + 1, size)
        ]
        usable = (len(prompt.tokens) - 1) // size
        whole = next((at for at, key in enumerate(keys[:usable]) if key not in known), usable)
        if ends is not None:
            hit = next((at for at in range(whole, 0, -1) if keys[at - 1] in behind), 0)
            last = (len(prompt.tokens) - 1) // ends.every * ends.every
            kept = [at * size for at in range(hit + 1, len(keys) + 1) if at * size % ends.every == 0]
            kept = [end for end in kept if ends.each or end >= last or end == whole * size // ends.every * ends.every]
            behind |= {keys[end // size - 1] for end in kept}
            whole = hit
        found.append(size * whole)
        known |= set(keys)
    return found


def given_up(engine: Engine) -> PathResult | None:
    """Cancel prompts after their first chunk, then run them again.

    The chunk ends beside a block's end. Returns None where nothing is kept.
    """
    limits, size = engine.loop.scheduler.limits, engine.loop.scheduler.limits.block_size
    step, longest = limits.max_num_batched_tokens, limits.max_model_len - OUTPUTS
    if not engine.loop.scheduler.prefix.enabled or longest < 3 * size or step < 2 * size:
        return None
    first, again, hits = list[Seen](), list[Seen](), engine.stats.prefix_hits
    for end in (size - 1, size, size + 1):
        prompt = Prompt(drawn_tokens(engine, 3 * size, 100 + end), ONE_TOKEN)
        others = [greedy_prompt(drawn_tokens(engine, each, each)) for each in _cut(step - end, longest)]
        engine.forget_prefixes()
        engine.cut_off([*others, prompt])
        again += engine.run([prompt])
        engine.forget_prefixes()
        first += engine.run([prompt])
    note = f"{engine.stats.prefix_hits - hits:,} tokens from the prefix cache"
    return compare("prompts given up", first, [again], note)


def _cut(count: int, longest: int) -> list[int]:
    """Return ``count`` tokens as lengths of prompts, ``longest`` at most."""
    return [min(longest, count - at) for at in range(0, count, longest)]


def moved(engine: Engine) -> PathResult | None:
    """Move a context's blocks by swaps of several sizes.

    They are the last pairs of a swap, for all sizes that free blocks can fill. Returns None where blocks do not move.
    """
    if not engine.loop.packer.plan.policy.compacts:
        return None
    with engine.unwatched() as runner:
        limits = runner.plan.limits
        most = min(
            limits.max_model_len - 1, limits.max_num_batched_tokens, runner.pool.num_free // 3 * limits.block_size
        )
        tokens = np.array(drawn_tokens(engine, max(min(most, 2 * limits.block_size), 1), 200), np.int32)
        first = [as_seen(logits) for logits in alone(runner, tokens)]
        found = [[as_seen(logits)] for logits in compaction(runner, tokens, every=True)]
    return compare("blocks moved at once", first, found, f"{len(found)} sizes of a swap")


def as_seen(logits: Tensor) -> Seen:
    """Return ``logits`` as an output to compare: their bytes."""
    return Seen([logits.numpy().tobytes()], [float(logits.max())])


def answers_as_prompts(path: str, engine: Engine, prompts: Sequence[Prompt], first: Sequence[Seen]) -> PathResult:
    """Compare decoding with reading.

    Each prompt and its answer without the last token is one prompt. ``first`` and the answers are of the last run of
    ``engine``. The logits at the last position must be the same.
    """
    longer = [
        replace(prompt, tokens=[*prompt.tokens, *answer.tokens[:-1]], params=ONE_TOKEN)
        for prompt, answer in zip(prompts, engine.answers, strict=True)
    ]
    engine.forget_prefixes()
    last = [Seen(seen.bits[-1:], seen.levels[-1:]) for seen in first]
    return compare(path, last, [engine.run(longer)], f"{sum(len(each.tokens) for each in longer):,} tokens")


def drawn_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    """Return ``count`` random tokens of the model's vocabulary."""
    draw = random.Random(seed)
    return [draw.randrange(engine.vocab_size) for _ in range(count)]


def _with_another(tokens: Sequence[int], at: int, vocab_size: int) -> list[int]:
    """Return ``tokens`` with another token at ``at``."""
    return [*tokens[:at], (tokens[at] + 1) % vocab_size, *tokens[at + 1 :]]


def greedy_prompt(tokens: Sequence[int], salt: str = "", *, name: str = "") -> Prompt:
    """Return the prompt ``tokens`` with the adapter ``name``, continued by the most likely tokens."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=OUTPUTS, ignore_eos=True)
    return Prompt(list(tokens), params, salt, lora_name=name)


def _said(state: RequestState) -> list[int]:
    return state.choices[0].token_ids
