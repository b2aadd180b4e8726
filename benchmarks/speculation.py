"""Speculation: the hits of each proposer, and its gain or cost.

    python -m benchmarks speculation [--batch 1] [--tokens 64] [--prompts 8] [--drafts 4] [--draft PATH]
        [--eagle3 PATH] [--model NAME]
    python -m benchmarks speculation --shape llama-3.1-8b [--batches 1 32 256] [--turns 3] [--options JSON] [--save]

Every run must give the same tokens as the one without speculation; this is checked. ``held-out`` are beginnings of
Python files that the bundled model was not trained on, answered greedily and at temperature 1. ``copies`` are pieces of
the same files, twice in a prompt, with the beginning of a third copy: text that repeats itself, as an edit of code
does. ``right A`` knows each token of the answer with a probability of A, ``wrong`` is never right: they show the cost
of steps with drafts. Each is run with a fixed number of drafts and with ``auto``, which chooses by measured times.

Reported are accepted drafts and tokens a step, and the processor time of a token beside plain decoding. Other work on
the machine disturbs processor time less than the clock.

With ``--shape`` a model of that shape with random weights is timed by the clock. An engine in the same process does
not speculate, for comparison, see :mod:`benchmarks.common.speculating`. The GPU should do nothing else.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.common.report import parser, save
from benchmarks.common.shapes import CHOICES
from benchmarks.common.speculating import TOKENS, Synthetic, measure
from examples.train_bundled.corpus import HELDOUT_ONE_IN, library_files, path_hash
from preheat import LLM, SamplingParams
from preheat.schedule.drafting import Drafting
from preheat.schedule.proposer import Proposer

PIECE, CONTINUED = 120, 24
"""Tokens of a copied piece, and of the last copy's beginning in the prompt."""


def held_out(llm: LLM, count: int) -> list[list[int]]:
    """Return the first tokens of files that the bundled model was not trained on."""
    found = list[list[int]]()
    for name, path in library_files(Path(sysconfig.get_path("stdlib"))):
        if path_hash(name) % HELDOUT_ONE_IN == 0 and len(found) < count:
            ids = llm.frontend.tokenizer.encode(path.read_text(errors="replace")[:20_000], True)
            if len(ids) > 4 * PIECE:
                found.append(ids[: 2 * PIECE])
    return found


def copies(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return a piece of each prompt twice, and its beginning once more."""
    return [[*prompt[:PIECE], *prompt[:PIECE], *prompt[:CONTINUED]] for prompt in prompts]


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[list[int]], dict[str, float]]:
    """Return the answers and the figures of decoding.

    All but the last prompt tokens are in the prefix cache.
    """
    llm.reset_prefix_cache()
    llm.generate(prompts, replace(params, max_tokens=1), use_tqdm=False)
    llm.loop.scheduler.forget()
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    stats = llm.loop.scheduler.stats()
    tokens = stats.generation_tokens
    figures = {
        "tokens": tokens, "steps": stats.steps, "drafts": stats.draft_tokens, "accepted": stats.accepted_tokens,
        "accepted_share": round(stats.accepted_tokens / max(stats.draft_tokens, 1), 3),
        "tokens_per_draft": round(1 + stats.accepted_tokens / max(stats.drafts, 1), 3),
        "cpu_ms_per_token": round(1e3 * cpu / tokens, 3), "ms_per_token": round(1e3 * wall / tokens, 3),
    }  # fmt: skip
    return [list(output.outputs[0].token_ids) for output in outputs], figures


def engine(args: argparse.Namespace, config: dict[str, Any] | None) -> LLM:
    return LLM(
        args.model, max_num_seqs=args.batch, max_model_len=1024, block_size=16, speculative_config=config,
        num_threads=args.threads, on_cold="off", boot_check="off", cache_dir="off",
    )  # fmt: skip


def main(words: Sequence[str]) -> None:
    flags = parser(__doc__, __name__)
    flags.add_argument("--model", default="bundled")
    flags.add_argument("--batch", type=int, default=1)
    flags.add_argument("--tokens", type=int, default=64)
    flags.add_argument("--prompts", type=int, default=8)
    flags.add_argument("--drafts", type=int, default=4)
    flags.add_argument("--draft", help="a draft model's folder")
    flags.add_argument("--eagle3", help="the folder of a head of EAGLE-3")
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    flags.add_argument("--shape", choices=CHOICES, help="by the clock, with weights of this shape")
    flags.add_argument("--batches", type=int, nargs="+", choices=TOKENS, default=list(TOKENS), help="with --shape")
    flags.add_argument("--turns", type=int, default=3, help="with --shape: runs of each engine")
    flags.add_argument("--options", type=json.loads, default={}, help="with --shape: more options of the engines, JSON")
    args = flags.parse_args(words)
    if args.shape:
        timed = measure(args.shape, args.turns, args.batches, args.options)
        if args.save:
            print(save(f"speculation_{args.shape}", {"options": vars(args), **timed}))
        return

    plain = engine(args, None)
    text = held_out(plain, args.prompts)
    workloads = {
        "held-out, greedy": (text, SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)),
        "held-out, sampled": (text, SamplingParams(seed=7, max_tokens=args.tokens, ignore_eos=True)),
        "copies": (copies(text), SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)),
    }
    figures: dict[str, Any] = {}
    answers = {}
    for name, workload in workloads.items():
        run(plain, *workload)  # the first time code runs it is slower
        answers[name], figures[name] = run(plain, *workload)
        print(f"{name:<20}{'plain':<18}{figures[name]['cpu_ms_per_token']:>8.3f} ms", flush=True)
        figures[name] = {"plain": figures[name]}
    del plain

    methods: list[dict[str, Any]] = [{"method": "ngram"}, {"method": "suffix"}]
    methods += [{"method": "draft_model", "model": args.draft}] if args.draft else []
    methods += [{"method": "eagle3", "model": args.eagle3}] if args.eagle3 else []
    rights = {"right 0.6": 0.6, "right 0.8": 0.8, "wrong": 0.0}
    for tokens in (args.drafts, "auto"):
        for config in methods:
            llm = engine(args, config | {"num_speculative_tokens": tokens})
            for name, workload in workloads.items():
                _report(figures, name, f"{config['method']} {tokens}", run(llm, *workload), answers[name])
        known = {
            tuple(prompt): answer
            for name in ("held-out, greedy",)
            for prompt, answer in zip(workloads[name][0], answers[name], strict=True)
        }
        for label, right in rights.items():
            llm = engine(args, {"method": "ngram", "num_speculative_tokens": tokens})
            drafting = llm.loop.scheduler.drafting
            assert drafting is not None
            _replace(drafting, Synthetic(drafting.proposer.num_speculative_tokens, known, right))
            name = "held-out, greedy"
            _report(figures, name, f"{label} {tokens}", run(llm, *workloads[name]), answers[name])
    if args.save:
        save("speculation", {"options": vars(args), **figures})


def _replace(drafting: Drafting, proposer: Proposer) -> None:
    drafting.proposer = proposer


def _report(
    figures: dict[str, Any],
    name: str,
    label: str,
    ran: tuple[list[list[int]], dict[str, float]],
    right: list[list[int]],
) -> None:
    """Keep and print the figures of a run.

    Its answers must be ``right``.
    """
    answers, found = ran
    if answers != right:
        raise AssertionError(f"{name}: {label} changed an answer")
    plain = figures[name]["plain"]["cpu_ms_per_token"]
    found["speed_up"] = round(plain / found["cpu_ms_per_token"], 3)
    figures[name][label] = found
    print(
        f"{name:<20}{label:<18}{found['cpu_ms_per_token']:>8.3f} ms, x {found['speed_up']:.2f}, "
        f"{found['accepted']:,} of {found['drafts']:,} drafts accepted, {found['tokens_per_draft']:.2f} tokens a row",
        flush=True,
    )
