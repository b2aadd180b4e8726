"""The measurements through ``LLM`` in one process: first requests, latencies, throughput, long contexts."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.common.arithmetic import EAGER_STEPS, limits, touched_by_step
from benchmarks.common.decoding import DecodingRows
from benchmarks.common.report import Clock, PartReport
from benchmarks.common.shapes import FULL, TINY, Sizes, engine_options, long_answer, vocabulary
from benchmarks.suite.first import REPEATS, SETTINGS, ratio_row
from preheat.core import SamplingParams
from preheat.llm import LLM


def greedy(tokens: int) -> SamplingParams:
    """Return parameters for exactly ``tokens`` tokens, without text."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


class Offline:
    """One engine with a model of ``vocabulary`` tokens.

    ``sizes`` are the amount of work; parts that do not fit into the time of ``clock`` are left out.
    """

    def __init__(self, llm: LLM, sizes: Sizes, vocabulary: int, clock: Clock) -> None:
        self.llm, self.sizes, self.vocabulary = llm, sizes, vocabulary
        self._clock = clock
        self._random = random.Random(0)

    @classmethod
    def of_shape(
        cls, shape: str, options: dict[str, Any], *, tiny: bool = False, number_format: str | None = None
    ) -> Self:
        """Return an engine of ``shape`` with ``options`` in this process.

        There is no limit of time.
        """
        with tempfile.TemporaryDirectory() as folder:
            llm = LLM(**engine_options(shape, options, Path(folder), tiny=tiny, number_format=number_format))
        return cls(llm, TINY if tiny else FULL, vocabulary(shape, tiny=tiny), Clock(float("inf")))

    def prompt(self, length: int) -> list[int]:
        """Return random token ids; the same ones in every run."""
        return [self._random.randint(0, self.vocabulary - 1000) for _ in range(length)]

    def seconds(self, prompts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams]) -> float:
        """Return the seconds of one call that answers all ``prompts``."""
        started = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - started

    def first(self, report: PartReport) -> None:
        """Measure the first request of each kind against later ones.

        The engine has not seen the kind before. Later requests count by their median.
        """
        rows = []
        for name, setting in SETTINGS.items():
            for length in self.sizes.first_lengths:
                if self._late(report, f"{name}, {length} tokens", 1):
                    continue
                params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False, **setting)
                first, *later = (self.seconds([self.prompt(length)], params) * 1e3 for _ in range(1 + REPEATS))
                rows.append(ratio_row(name, length, first, later))
        report.put(rows, "rows")
        if rows:
            report.put(max(row["ratio"] for row in rows), "worst_ratio")

    def latency(self, report: PartReport) -> None:
        """Measure times between tokens and to the first one.

        Times between tokens are by batch. The speed of reading prompts is measured, too.
        """
        for batch in self.sizes.batches:
            if batch > self.llm.loop.scheduler.limits.max_num_seqs:
                report.leave_out(f"batch {batch}", "max_num_seqs is lower")
            elif not self._late(report, f"batch {batch}", 3 + batch / 20):
                report.put(round(self._between_tokens(batch), 3), "itl_ms", str(batch))
                report.put(self._arithmetic(batch), "arithmetic", str(batch))
        sizes = self.sizes
        self.seconds([self.prompt(sizes.prompt)], greedy(1))
        best = min(self.seconds([self.prompt(sizes.prompt)], greedy(1)) for _ in range(3))
        report.put(round(best * 1e3, 2), "ttft_ms")
        if not self._late(report, "prefill", 5):
            report.put(round(self._reading(sizes.prompts, sizes.prompt)), "prefill_tok_s")
        low, high = sizes.lengths
        chance = random.Random(1)
        for length in sorted(chance.randint(low, high) for _ in range(10)):
            if not self._late(report, f"prefill of {length}", 3):
                speed = self._reading(max(sizes.length_tokens // length, 1), length)
                report.put(round(speed), "prefill_tok_s_by_length", str(length))

    def throughput(self, report: PartReport) -> None:
        """Measure output tokens a second for a mix of requests, given all at once."""
        prompts, params = nanobench(self.sizes, self.vocabulary)
        tokens = sum(each.max_tokens or 0 for each in params)
        best = float("inf")
        for _ in range(2):
            if self._late(report, "a run of the mix", 20):
                break
            best = min(best, self.seconds(prompts, params))
            found = {"requests": len(prompts), "tokens": tokens, "s": round(best, 2), "tok_s": round(tokens / best)}
            report.put(found, "nanobench")

    def long(self, report: PartReport) -> None:
        """Measure milliseconds between tokens for rows with long contexts.

        They count once all rows decode.
        """
        for rows, context in self.sizes.long:
            if not self._late(report, f"{rows} rows of {context}", rows * context / 20_000):
                report.put(round(self._steady(rows, context), 3), "itl_ms_long", f"{rows}x{context}")

    def _late(self, report: PartReport, what: str, seconds: float) -> bool:
        """Return whether ``what``, which takes about ``seconds``, would come too late.

        Note it in that case.
        """
        late = self._clock.left < seconds
        if late:
            report.leave_out(what, "out of time")
        return late

    def _between_tokens(self, batch: int) -> float:
        """Return milliseconds between tokens.

        It is a long answer less a short one, each the best of a few.
        """
        sizes = self.sizes

        def best(tokens: int, tries: int) -> float:
            prompts = ([self.prompt(sizes.context) for _ in range(batch)] for _ in range(tries))
            return min(self.seconds(each, greedy(tokens)) for each in prompts)

        best(8, 1)
        short = best(2, 3)
        return (best(2 + sizes.steps, 2) - short) / sizes.steps * 1e3

    def _arithmetic(self, batch: int) -> dict[str, Any]:
        """Return the least bytes and time of a step in the middle of the measured answers, and its experts."""
        spec, sizes = self.llm.loop.executor.decoder.spec, self.sizes
        rows = DecodingRows(self.llm, self.vocabulary, batch, sizes.context, EAGER_STEPS, temperature=0.0)
        return limits(spec, batch, sizes.context + sizes.steps // 2, touched_by_step(self.llm, rows))

    def _reading(self, prompts: int, length: int) -> float:
        """Return the prompt tokens read in a second."""
        return prompts * length / self.seconds([self.prompt(length) for _ in range(prompts)], greedy(1))

    def _steady(self, rows: int, context: int) -> float:
        """Return milliseconds between tokens while all ``rows`` decode.

        The last row counts the tokens. The time runs from the last row's first token until the first row ends.
        """
        llm, frontend = self.llm, self.llm.frontend
        params = greedy(long_answer(self.sizes, rows, context))
        states = [frontend.prepare(self.prompt(context), params) for _ in range(rows)]
        frontend.start(states)
        last = states[-1].choices[0]
        while not last.token_ids:
            llm.advance()
        started, before = time.perf_counter(), len(last.token_ids)
        while not any(state.finished for state in states):
            llm.advance()
        spent, found = time.perf_counter() - started, len(last.token_ids) - before
        while frontend.busy:
            llm.advance()
        return spent / found * 1e3


def nanobench(sizes: Sizes, vocabulary: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return a mix of requests: random lengths in and out, moderate temperature."""
    chance, (low, high) = random.Random(0), sizes.request_tokens
    prompts = [
        [chance.randint(0, 10000) % vocabulary for _ in range(chance.randint(low, high))] for _ in range(sizes.requests)
    ]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=chance.randint(low, high), detokenize=False)
        for _ in prompts
    ]
    return prompts, params
