"""The path of ``preheat verify`` for beam search.

Each search runs alone, with nothing in the cache, then all run at once.
"""

from __future__ import annotations

import random

from preheat.core import SamplingParams
from preheat.frontend.beams import Beam, Beams, BeamSearchParams
from preheat.verify.compare import PathResult, Seen, compare
from preheat.verify.drive import Engine, in_groups
from preheat.verify.prompts import Prompt

COUNT, WIDTH, TOKENS = 4, 3, 6
ASKED = SamplingParams(temperature=0.0, seed=0, max_tokens=1, logprobs=2 * WIDTH)


def beam_search(engine: Engine, longest: int) -> PathResult:
    """Search from prompts of up to ``longest`` tokens.

    Each step finds the blocks of the step before in the cache.
    """
    draw = random.Random(COUNT)
    longest = max(min(longest, engine.ready.max_model_len - TOKENS), 1)
    prompts = [[draw.randrange(engine.vocab_size) for _ in range(draw.randint(1, longest))] for _ in range(COUNT)]
    first = [seen for prompt in prompts for seen in _search(engine, [prompt], cold=True)]
    engine.forget_prefixes()
    hits = engine.stats.prefix_hits
    seen = _search(engine, prompts, cold=False)
    return compare("beam search", first, [seen], f"{engine.stats.prefix_hits - hits:,} tokens from the prefix cache")


def _search(engine: Engine, prompts: list[list[int]], *, cold: bool) -> list[Seen]:
    """Return the best sequences of each prompt.

    If ``cold``, compute each request alone and from its beginning.
    """
    params = BeamSearchParams(WIDTH, TOKENS)
    searches = [Beams(params, len(prompt), ()) for prompt in prompts]
    for _ in range(TOKENS):
        if cold:
            engine.forget_prefixes()
        asked = [
            Prompt([*prompt, *beam.tokens], ASKED)
            for prompt, search in zip(prompts, searches, strict=True)
            for beam in search.live
        ]
        engine.run(asked, in_groups([1] * len(asked))) if cold else engine.run(asked)
        answers = iter(engine.answers)
        for search in searches:
            search.advance([next(answers).logprobs[0] for _ in search.live])
    return [_seen(search.best()) for search in searches]


def _seen(best: list[Beam]) -> Seen:
    entries = [entry for beam in best for entry in beam.logprobs]
    return Seen([(entry.token, entry.logprob, entry.top) for entry in entries], [entry.logprob for entry in entries])
