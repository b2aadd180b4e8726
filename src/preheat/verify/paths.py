"""The paths of ``preheat verify``, a row each.

A row has the engine, the prompts, and the function that runs them. A path's runs are compared with the first run of its
set of prompts (:mod:`preheat.verify.prompt_sets`) on the engine as asked, and with the set's rule. Sets of texts,
adapters, images and embeddings share the functions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Literal, NamedTuple

import torch

from preheat.core import SamplingParams
from preheat.errors import CheckFailed
from preheat.execution.encoder import Given
from preheat.frontend.prompt_embeds import PromptEmbeds
from preheat.ops.embedding import rows_of
from preheat.plan.item import NothingToRun
from preheat.verify.beam_path import beam_search
from preheat.verify.cache_paths import answers_as_prompts, given_up, moved, nearly_equal
from preheat.verify.check_runner import CheckRunner
from preheat.verify.compare import Divergence, PathResult, Seen, compare
from preheat.verify.continued_paths import continued, moved_while_served
from preheat.verify.crowded_paths import grammars_interrupted, penalties_interrupted
from preheat.verify.drive import Answer, Engine, Prompts, in_groups, trickling
from preheat.verify.given_back import check_given_back
from preheat.verify.prompt_sets import (
    CHUNKED,
    LEAST,
    LONG,
    MAKERS,
    SHORT,
    PromptSet,
    Sizes,
    alone,
    names_of,
    prompt_of,
    random_tokens,
)
from preheat.verify.prompts import Prompt, Size
from preheat.verify.pulled_path import exchanges, pulled
from preheat.verify.served_path import served
from preheat.verify.state_paths import any_chunks, any_end, keeps_states
from preheat.verify.texts_in_chunks import has_chunks
from preheat.verify.texts_in_chunks import served as served_texts
from preheat.verify.window_check import check_windows

GROUPS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 256)
"""The numbers of requests that run together, repeated as needed."""

Which = Literal["asked", "tight", "without drafts"]
"""The engines of paths.

"asked" has the given settings. "tight" has small steps and few blocks, so that chunks, preemption and compaction are
frequent. "without drafts" drafts nothing, since drafts must not change a bit.
"""


@dataclass
class Trial:
    """A path that runs now: its ``name``, its ``prompts``, and its ``engine``."""

    name: str
    prompts: PromptSet
    engine: Engine
    size: Size
    longest: int

    def __post_init__(self) -> None:
        self._before = self.engine.stats

    def run(self) -> list[Seen]:
        """Run all prompts at once."""
        return self.engine.run(self.prompts.prompts)

    def compared(self, *runs: Sequence[Seen], note: str = "") -> PathResult:
        """Compare the ``runs`` with the first one and with the rule."""
        result = compare(self.name, self.prompts.first, runs, note)
        return result.with_wrong([*self.prompts.rule(self.engine)])

    def count(self, name: str) -> int:
        """Return the growth of a number of the engine's statistics since the path began."""
        found: int = getattr(self.engine.stats, name) - getattr(self._before, name)
        return found

    @property
    def hits(self) -> str:
        return f"{self.count('prefix_hits'):,} tokens from the prefix cache"


Take = Callable[[Trial], PathResult | None]
"""Runs a path; None where the engine cannot."""


class Path(NamedTuple):
    """A path of an engine, with the function that takes it.

    ``prompts`` name a set, if the path has one; a path of a set without prompts is not taken. ``needs`` tells whether
    an engine takes it. In the name, {kind} is the set's kind, and {most} the largest group.
    """

    name: str
    engine: Which
    prompts: str
    take: Take
    needs: Callable[[Engine], bool] = lambda engine: not engine.pools


def _any(engine: Engine) -> bool:
    """Return True: engines that pool take the path, too."""
    return True


# ------------------------------------------------------------------------------------------------ shared by all sets


def later(trial: Trial) -> PathResult:
    """Run again with everything that the cache then has."""
    return trial.compared(*[trial.run() for _ in range(trial.size.runs - 1)], note=trial.hits)


def together(trial: Trial) -> PathResult:
    """Run all at once, with nothing in the cache."""
    trial.engine.forget_prefixes()
    return trial.compared(trial.run())


def shuffled(trial: Trial) -> PathResult:
    """Run in another order, a few before each step."""
    prompts = trial.prompts.prompts
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    seen = trial.engine.run([prompts[number] for number in order], trickling(random.Random(2)))
    by_prompt = dict(zip(order, seen, strict=True))
    return trial.compared([by_prompt[number] for number in range(len(prompts))])


def in_batches(trial: Trial) -> PathResult:
    """Run in groups of all sizes, with nothing in the cache."""
    trial.engine.forget_prefixes()
    prompts = trial.prompts.prompts
    return trial.compared(trial.engine.run(prompts, in_groups(group_sizes(len(prompts)))))


def cold_and_cached(trial: Trial) -> PathResult:
    """Run one by one with an empty cache, then with all blocks."""
    trial.engine.forget_prefixes()
    return trial.compared(*[alone(trial.engine, trial.prompts.prompts) for _ in range(2)], note=trial.hits)


def backwards(trial: Trial) -> PathResult:
    """Run one by one, the last first, with all blocks in the cache."""
    return trial.compared(alone(trial.engine, trial.prompts.prompts[::-1])[::-1], note=trial.hits)


def one_by_one(trial: Trial) -> PathResult:
    """Run each prompt alone."""
    prompts = trial.prompts.prompts
    return trial.compared(alone(trial.engine, prompts), note=f"{len(prompts[0].tokens):,} tokens")


def few_blocks(trial: Trial) -> PathResult:
    """Run all at once, where steps are small and blocks are few."""
    return trial.compared(trial.run(), note=f"{trial.count('preemptions'):,} preemptions")


def few_blocks_moved(trial: Trial) -> PathResult:
    """Run all at once with few blocks, and note how many blocks moved."""
    result = few_blocks(trial)
    result.note += f", {trial.count('blocks_moved'):,} blocks moved"
    return result


def offloaded(trial: Trial) -> PathResult:
    """Run again with evicted blocks that come back from the host."""
    seen = trial.run()
    return trial.compared(seen, note=f"{trial.count('external_hits'):,} tokens from the host")


def answered(trial: Trial) -> PathResult:
    """Run the answers of the engine's last run as prompts."""
    return answers_as_prompts(trial.name, trial.engine, trial.prompts.prompts, trial.prompts.first)


def resumed(trial: Trial) -> PathResult:
    """Continue each answer behind some of its tokens."""
    return continued(trial.name, trial.engine, trial.prompts, max(trial.size.runs - 1, 1))


def lost_while_served(trial: Trial) -> PathResult:
    """Serve clients of an engine that loses all requests again and again."""
    return moved_while_served(trial.name, trial.engine, trial.size.outputs)


def in_chunks(trial: Trial) -> PathResult:
    """Serve long texts to clients, all at once, then the last first."""
    prompts = trial.prompts.prompts
    runs = served_texts(trial.engine, prompts), served_texts(trial.engine, prompts[::-1])[::-1]
    longest = len(prompts[-1].tokens)
    return trial.compared(*runs, note=f"{longest:,} tokens in chunks of {trial.engine.ready.places - 1:,}")


def undrafted(trial: Trial) -> PathResult:
    """Run where nothing drafts; the note counts the first run's drafts."""
    stats = trial.prompts.stats
    assert stats is not None, "the first run is over"
    note = f"{stats.accepted_tokens:,} of {stats.draft_tokens:,} drafts were accepted"
    return trial.compared(trial.run(), note=note)


# ------------------------------------------------------------------------------------------------ of one set


def _checked(check: Callable[[CheckRunner], int]) -> Callable[[Trial], PathResult | None]:
    """Return a path that runs a ``check`` of the boot, or None where nothing takes it."""

    def run(trial: Trial) -> PathResult | None:
        try:
            with trial.engine.unwatched() as runner:
                count = check(runner)
        except NothingToRun:
            return None
        except CheckFailed as error:
            return PathResult(trial.name, 1, 1, 0, Divergence(1, 0, 0, float("inf")), str(error))
        return PathResult(trial.name, count, 1, count)

    return run


def salts(trial: Trial) -> PathResult:
    """Run one prompt under several salts.

    Only an equal salt finds it in the prefix cache; all answers are equal.
    """
    engine, salts = trial.engine, ("a", "b", "a", "")
    (tokens,) = random_tokens(engine, 1, LONG // 2, trial.size.outputs)
    plain = SamplingParams(temperature=0.0)
    seen = alone(engine, [prompt_of(tokens, plain, trial.size.outputs, salt) for salt in salts])
    cached = [answer.cached for answer in engine.answers]
    result = compare(trial.name, [seen[0]] * len(salts), [seen], f"{cached[2]:,} tokens from an equal salt")
    return result.with_wrong(
        [Divergence(1, number, 0, float(count)) for number, count in enumerate(cached) if count and number != 2]
    )


def min_tokens(trial: Trial) -> PathResult:
    """Check that no stop id comes before min_tokens, and no end with fewer tokens."""
    prompts, again, wrong = trial.prompts.prompts[-LEAST:], trial.run()[-LEAST:], list[Divergence]()
    for number, (prompt, answer) in enumerate(zip(prompts, trial.engine.answers[-LEAST:], strict=True)):
        least, stops = prompt.params.min_tokens, prompt.params.stop_token_ids or []
        early = [place for place, token in enumerate(answer.tokens[:least]) if token in stops]
        if early or len(answer.tokens) < least:
            wrong.append(Divergence(1, number, early[0] if early else len(answer.tokens), 0.0))
    return compare(trial.name, trial.prompts.first[-LEAST:], [again]).with_wrong(wrong)


def asked_logprobs(trial: Trial) -> PathResult:
    """Compare the log-probabilities of ``logprob_token_ids``: each request alone, then all, one without any."""
    engine, outputs = trial.engine, trial.size.outputs
    params = [
        SamplingParams(temperature=float(number % 2), logprobs=3, logprob_token_ids=[*range(5 * number)][::-1])
        for number in range(4)
    ]
    prompts = [prompt_of(*pair, outputs) for pair in zip(random_tokens(engine, 4, SHORT, outputs), params, strict=True)]
    found = list[list[Seen]]()
    for groups in ([1] * 4, [4]):
        engine.run(prompts, in_groups(groups))
        found.append([_as_seen(answer.logprobs) for answer in engine.answers])
    wrong = [
        Divergence(1, number, place, 0.0)
        for number, answer in enumerate(engine.answers)
        for place, entry in enumerate(answer.logprobs)
        if number and [token for token, _ in entry.top] != params[number].logprob_token_ids
    ]
    return compare(trial.name, found[0], [found[1]], f"{5 * 3} of one").with_wrong(wrong)


def prompt_logprobs(trial: Trial) -> PathResult:
    """Compare prompt logprobs of the engine's last run.

    Its prompts are chunked. There is one entry a token but the first.
    """
    prompts = trial.prompts.prompts[:2]

    def reported(answers: Sequence[Answer]) -> list[Seen]:
        return [_as_seen(answer.prompt_logprobs) for answer in answers[:2]]

    chunked = reported(trial.engine.answers)
    wrong = [
        Divergence(1, number, len(seen.bits), 0.0)
        for number, (prompt, seen) in enumerate(zip(prompts, chunked, strict=True))
        if len(seen.bits) != len(prompt.tokens)
    ]
    note = f"{len(prompts[0].tokens):,} tokens"
    return compare(trial.name, reported(trial.prompts.answers), [chunked], note).with_wrong(wrong)


def _as_seen(entries: Sequence[object]) -> Seen:
    """Return log-probabilities as an output to compare: their text as reported."""
    return Seen([repr(entry) for entry in entries], [0.0] * len(entries))


def grammars(trial: Trial) -> PathResult:
    """Run all in one batch, prompts with and without grammars."""
    return trial.compared(trial.run(), note=f"{len(trial.prompts.prompts) // 2} with grammars")


def as_tokens(trial: Trial) -> PathResult | None:
    """Run texts as tokens, and as rows of the embedding table.

    Returns None where prompts may not be embeddings.
    """
    engine, encoder = trial.engine, trial.engine.loop.executor.encoder
    if encoder is None or not isinstance(encoder.tower, Given):
        return None
    table = engine.loop.executor.decoder.weights.embedding
    reads, given = PromptEmbeds(table.shape[-1], lambda: engine.ready.max_model_len), list[Prompt]()
    texts = [changed(prompt, segments=()) for prompt in trial.prompts.prompts]
    for prompt in texts:
        embedded = reads.of_tensor(rows_of(table, torch.tensor(prompt.tokens, device=table.device)))
        given.append(changed(prompt, tokens=embedded.ids, segments=tuple(embedded.segments)))
    engine.forget_prefixes()
    return compare(trial.name, engine.run(texts), [engine.run(given)])


PATHS: tuple[Path, ...] = (
    Path("later runs", "asked", "texts", later, _any),
    Path("prefix cache cold", "asked", "texts", together, _any),
    Path("shuffled arrivals", "asked", "texts", shuffled, _any),
    Path("batches of 1 to {most}", "asked", "texts", in_batches, _any),
    Path("texts in chunks", "asked", "texts in chunks", in_chunks, has_chunks),
    Path("answers as prompts", "asked", "texts", answered),
    Path("served, by the contract", "asked", "", lambda trial: served(trial.engine, trial.size.outputs)),
    Path("continued", "asked", "texts", resumed),
    Path("moved while served", "asked", "", lost_while_served),
    Path("windows", "asked", "", _checked(check_windows)),
    Path("given back", "asked", "", _checked(check_given_back)),
    Path("penalties, long prompts", "asked", "long texts", one_by_one),
    Path("long answers as prompts", "asked", "long texts", answered),
    Path("cache salts", "asked", "", salts),
    Path("min_tokens", "asked", "short texts", min_tokens),
    Path("logprobs of given tokens", "asked", "", asked_logprobs),
    Path("beam search", "asked", "", lambda trial: beam_search(trial.engine, min(CHUNKED, trial.longest))),
    Path("penalties, continued", "asked", "short texts", resumed),
    Path("grammars", "asked", "grammars", grammars),
    Path("grammars, continued", "asked", "grammars", resumed),
    Path("{kind}, together", "asked", "images", together),
    Path("{kind}, prefix cache", "asked", "images", cold_and_cached),
    Path("{kind}, as tokens", "asked", "images", as_tokens),
    Path("{kind}, continued", "asked", "images", resumed),
    Path("{kind}, together", "asked", "adapters", together),
    Path("{kind}, prefix cache", "asked", "adapters", backwards),
    Path("{kind}, continued", "asked", "adapters", resumed),
    Path("nearly equal prompts", "asked", "", lambda trial: nearly_equal(trial.engine, names_of(trial.engine))),
    Path("prompts given up", "asked", "", lambda trial: given_up(trial.engine)),
    Path("blocks moved at once", "asked", "", lambda trial: moved(trial.engine)),
    Path(
        "chunks of any size", "asked", "", lambda trial: any_chunks(trial.name, trial.engine, trial.size), keeps_states
    ),
    Path("any block's end", "asked", "", lambda trial: any_end(trial.name, trial.engine, trial.size), keeps_states),
    Path("pulled blocks", "asked", "", lambda trial: pulled(trial.name, trial.engine, trial.size.outputs), exchanges),
    Path("chunks, few blocks", "tight", "texts", few_blocks_moved, _any),
    Path("texts in chunks, few blocks", "tight", "texts in chunks", in_chunks, has_chunks),
    Path("offloaded blocks", "tight", "texts", offloaded, lambda engine: engine.offloads),
    Path("penalties, few blocks", "tight", "short texts", few_blocks),
    Path("prompt logprobs, chunks", "tight", "short texts", prompt_logprobs),
    Path("continued, few blocks", "tight", "short texts", resumed),
    Path("grammars, few blocks", "tight", "grammars", few_blocks),
    Path("penalties, interrupted", "tight", "", lambda trial: penalties_interrupted(trial.engine, trial.size.outputs)),
    Path("grammars, interrupted", "tight", "", lambda trial: grammars_interrupted(trial.engine, trial.size.outputs)),
    Path("{kind}, chunks, few blocks", "tight", "images", few_blocks),
    Path("{kind}, chunks, few blocks", "tight", "adapters", few_blocks),
    Path("without speculation", "without drafts", "texts", undrafted, _any),
    Path("grammars without speculation", "without drafts", "grammars", grammars),
)
"""The paths in the order in which they run. Some look at the run before."""


@dataclass
class PathRunner:
    """Runs paths, and keeps the ``sets`` of prompts.

    The engine as asked makes a set for the first path that needs it.
    """

    size: Size
    texts: Prompts
    sets: dict[str, PromptSet] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """The most tokens of a prompt that an engine with few blocks takes."""
        known = self.sets.get("texts")
        return max(len(prompt.tokens) for prompt in known.prompts) if known else self.size.longest

    def on(self, engine: Engine, which: Which, only: Collection[str] = ()) -> Iterator[PathResult]:
        """Yield the results on ``engine``; ``only`` names paths or sets, if any."""
        names_of(engine)  # random ones, if the settings name none: each engine has the same
        for path in PATHS:
            if path.engine != which or (only and not {path.name, path.prompts} & set(only)) or not path.needs(engine):
                continue
            if path.prompts in MAKERS and path.prompts not in self.sets and which == "asked":
                self.sets[path.prompts] = self._made(path.prompts, engine)
            prompts = self.sets.get(path.prompts, PromptSet([]))
            if path.prompts and not prompts.prompts:
                continue
            name = path.name.format(kind=prompts.kind, most=max(group_sizes(len(prompts.prompts)), default=0))
            result = path.take(Trial(name, prompts, engine, self.size, self.longest))
            if result is not None:
                yield result

    def _made(self, name: str, engine: Engine) -> PromptSet:
        return MAKERS[name](engine, Sizes(self.size.outputs, self.longest, self.texts))

    @property
    def for_few_blocks(self) -> list[Prompt]:
        """All prompts that an engine with few blocks takes."""
        names = {path.prompts for path in PATHS if path.engine == "tight"}
        return [prompt for name in names & self.sets.keys() for prompt in self.sets[name].prompts]


def group_sizes(count: int) -> list[int]:
    """Return `GROUPS`, repeated until there are ``count`` requests."""
    sizes: list[int] = []
    for size in itertools.cycle(GROUPS):
        if sum(sizes) == count:
            return sizes
        sizes.append(min(size, count - sum(sizes)))
    raise AssertionError("a cycle never ends")
