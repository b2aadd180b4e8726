"""The gain of speculation by the clock, with proposers of known accuracy.

Two engines in one process take turns. One does not speculate; its answers are the truth. The other speculates, with
another proposer for each figure. Rates are of decoding: from the moment when all rows have a token to the moment when
the first row has all of its tokens.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.shapes import engine_options, vocabulary
from benchmarks.suite.first import REPEATS, SETTINGS, ratio_row
from preheat import LLM, SamplingParams
from preheat.schedule.draft_length import FixedLength
from preheat.schedule.slots import Slots

REPEATED = 24
"""Tokens of a piece that a first request's prompt repeats.

n-grams then have drafts from its first step on.
"""
CONTEXT, BLOCK = 256, 64
"""Cached tokens of a prompt, and tokens of a block.

All tokens of a prompt but its last are in the prefix cache.
"""


class Case(NamedTuple):
    """A measured case.

    It has a batch, the chance ``right`` of each draft, and ``drafts`` a row (0: by measured times). ``wanted`` is the
    least gain.
    """

    batch: int
    right: float
    drafts: int
    wanted: float | None

    def __str__(self) -> str:
        return f"batch {self.batch}, right {self.right:g}, {self.drafts or 'auto'}"


CASES = (
    Case(1, 0.6, 3, 1.9), Case(1, 0.8, 4, 2.7), Case(1, 0.8, 0, 1.0), Case(1, 0.0, 0, 0.98),
    Case(32, 0.6, 3, None), Case(32, 0.8, 4, 1.5), Case(32, 0.8, 0, 1.0), Case(32, 0.0, 0, 0.98),
    Case(256, 0.8, 4, None), Case(256, 0.8, 0, 1.0), Case(256, 0.0, 0, 0.98),
)  # fmt: skip
"""The measured cases with their least gains: a proposer that is always wrong may cost 2 %."""
MOST = 4
TOKENS = {1: 320, 32: 160, 256: 96}
"""Tokens of an answer, by batch."""


class Synthetic:
    """A proposer that knows the answers, by prompt.

    Each token is right with a probability of ``right``.
    """

    writes_cache = False

    def __init__(self, tokens: int, answers: Mapping[tuple[int, ...], Sequence[int]], right: float) -> None:
        self.num_speculative_tokens, self._answers, self._right = tokens, answers, right
        self._chance = np.random.default_rng(0)
        self._drafts: dict[int, np.ndarray] = {}  # by request

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> list[np.ndarray]:
        begin = slots.device_len[rows] - slots.prompt_len[rows]
        places = zip(rows.tolist(), begin.tolist(), (begin + most).tolist(), strict=True)
        return [self._of(slots, slot)[at:end] for slot, at, end in places]

    def _of(self, slots: Slots, slot: int) -> np.ndarray:
        request = slots.request[slot]
        assert request is not None
        drafts = self._drafts.get(request.id)
        if drafts is None:
            truth = np.array(self._answers[tuple(request.prompt)], np.int32)
            drafts = np.where(self._chance.random(len(truth)) < self._right, truth, truth ^ 1)
            self._drafts[request.id] = drafts
        return drafts

    def ended(self, slots: Slots, stopped: Sequence[int]) -> None:
        """Do nothing: nothing has to be given back."""


class Timed(NamedTuple):
    """The answers of a run, and the decoded tokens a second."""

    answers: list[list[int]]
    rate: float


def decode(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> Timed:
    """Return greedy answers of ``tokens`` tokens to ``prompts``."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    frontend, scheduler = llm.frontend, llm.loop.scheduler
    states = [frontend.prepare(prompt, params) for prompt in prompts]
    frontend.start(states)
    while not all(state.choices[0].token_ids for state in states):
        llm.advance()
    begun, before = time.perf_counter(), scheduler.stats().generation_tokens
    while all(state.unfinished for state in states):
        llm.advance()
    took, count = time.perf_counter() - begun, scheduler.stats().generation_tokens - before
    while frontend.busy:
        llm.advance()
    llm.loop.take(0)
    llm.loop.finish()
    return Timed([list(state.choices[0].token_ids) for state in states], count / took)


class Pair:
    """The two engines for ``shape``."""

    def __init__(self, shape: str, batches: Sequence[int], tokens: Mapping[int, int], options: dict[str, Any]) -> None:
        rows, length = max(batches), CONTEXT + BLOCK + max(tokens.values())
        blocks = sum(-(-(CONTEXT + 1 + tokens[batch]) // BLOCK) * batch for batch in batches) + rows + 8
        common = {
            "max_num_seqs": rows, "max_model_len": length, "block_size": BLOCK, "num_gpu_blocks_override": blocks,
            "enable_prefix_caching": True, "boot_check": "off", "gpu_memory_utilization": 0.85,
            "on_cold": "off", **options,
        }  # fmt: skip
        config = {"method": "ngram", "num_speculative_tokens": MOST}
        with tempfile.TemporaryDirectory() as folder:
            given = engine_options(shape, common, Path(folder), tiny=False)
            self.plain = LLM(**given)
            self.speculating = LLM(**given | {"speculative_config": config, "speculative_k": "auto"})
        chance, known = random.Random(0), vocabulary(shape) - 1000
        self.prompts = {
            batch: [[chance.randrange(known) for _ in range(CONTEXT + 1)] for _ in range(batch)] for batch in batches
        }
        self._tokens, self._measured = tokens, self._drafting.length
        self._truth = dict[int, list[list[int]]]()

    @property
    def _drafting(self) -> Any:
        return self.speculating.loop.scheduler.drafting

    def first(self) -> list[dict[str, Any]]:
        """Return the speculating engine's first requests beside later ones.

        There is a row for each kind, with its own n-grams.
        """
        chance, known = random.Random(1), max(next(iter(self.prompts.values()))[0])
        found = []
        for name, settings in SETTINGS.items():
            params = SamplingParams(**settings, max_tokens=8, ignore_eos=True, detokenize=False)
            times = []
            for _ in range(1 + REPEATS):
                prompt = [chance.randrange(known) for _ in range(REPEATED)] * (CONTEXT // REPEATED)
                begun = time.perf_counter()
                self.speculating.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
                times.append(1e3 * (time.perf_counter() - begun))
            found.append(ratio_row(name, len(prompt), times[0], times[1:]))
        drafted = self.speculating.loop.scheduler.stats().draft_tokens
        if not drafted:
            raise AssertionError("no request had a draft")
        return found

    def gain(self, case: Case, turns: int) -> dict[str, Any]:
        """Return the median gain in rate over ``turns`` runs of each engine, in turns."""
        prompts, tokens, drafting = self.prompts[case.batch], self._tokens[case.batch], self._drafting
        if case.batch not in self._truth:
            self._truth[case.batch] = decode(self.plain, prompts, tokens).answers
        truth = self._truth[case.batch]
        answers = {tuple(prompt): answer for prompt, answer in zip(prompts, truth, strict=True)}
        drafting.proposer = Synthetic(case.drafts or MOST, answers, case.right)
        drafting.length = FixedLength() if case.drafts else self._measured
        decode(self.speculating, prompts, tokens)
        self.speculating.loop.scheduler.forget()
        rates: dict[str, list[float]] = {"plain": [], "speculating": []}
        for turn in range(turns):
            for name in list(rates)[:: 1 if turn % 2 else -1]:
                ran = decode(getattr(self, name), prompts, tokens)
                if ran.answers != truth:
                    raise AssertionError(f"{case}: {name} changed an answer")
                rates[name].append(ran.rate)
        stats = self.speculating.loop.scheduler.stats()
        gains = [speculating / plain for plain, speculating in zip(*rates.values(), strict=True)]
        return {
            **case._asdict(),
            "gain": round(statistics.median(gains), 3),
            "gains": [round(gain, 3) for gain in gains],
            **{f"{name}_tok_s": round(statistics.median(found), 1) for name, found in rates.items()},
            "accepted": stats.accepted_tokens,
            "drafted": stats.draft_tokens,
            "tokens_per_step_of_a_row": round(stats.generation_tokens / max(stats.steps, 1) / case.batch, 3),
        }


def measure(shape: str, turns: int, batches: Sequence[int], options: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return first requests and the figures of all cases of ``batches``.

    They are printed as they come.
    """
    began = time.perf_counter()
    pair = Pair(shape, batches, TOKENS, options)
    print(f"both engines booted in {time.perf_counter() - began:.0f} s", flush=True)
    first = pair.first()
    for row in first:
        print(
            f"first, {row['setting']:<26}{row['first_ms']:>8.2f} ms, later {row['steady_ms']:.2f}: {row['ratio']:.2f}"
        )
    print(f"{'':<30}{'plain':>10}{'drafts':>10}{'gain':>8}{'wanted':>8}   accepted of drafted", flush=True)
    figures = []
    for case in (case for case in CASES if case.batch in batches):
        found = pair.gain(case, turns)
        figures.append(found)
        missed = case.wanted is not None and found["gain"] < case.wanted
        print(
            f"{case!s:<30}{found['plain_tok_s']:>10,.0f}{found['speculating_tok_s']:>10,.0f}{found['gain']:>8.2f}"
            f"{case.wanted or '':>8}{' MISSED' if missed else '':<8}{found['accepted']:,} of {found['drafted']:,}",
            flush=True,
        )
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    return {"first": first, "cases": figures}
