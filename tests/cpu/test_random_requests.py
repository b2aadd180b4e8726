"""A thousand requests with all fields of a request: nothing is cold, nothing is missed.

They reach every item of the plan in eager mode. Compiled programs are chosen by the same plan. Each takes a second to
compile, so there are fewer of them and fewer requests reach each. The model is small with random weights: the test
looks at the programs that run, not at their results.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from msgspec.structs import fields

from preheat import LLM, SamplingParams, StructuredOutputsParams
from preheat.core import CALLERS_FIELDS, SAMPLING_FIELDS
from preheat.errors import SettingsError
from preheat.model.files import BUNDLED_PATH
from preheat.warmup.record import Record
from tests.tokenizers import thinking

REQUESTS, VOCAB = {"eager": 700, "compile": 250}, 338
SMALL = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "max_model_len": 160,
    "block_size": 16,
    "load_format": "dummy",
}
SIZES = {"eager": SMALL, "compile": SMALL | {"max_num_batched_tokens": 48}}

# Draw of each field of SamplingParams for a request that sets it; every field is here (tested).
DRAWS = {
    "n": lambda r: r.randint(1, 3),
    "temperature": lambda r: r.choice([0.0, 0.3, 1.0, 1.9]),
    "top_p": lambda r: r.uniform(0.05, 1.0),
    "top_k": lambda r: r.choice([-1, 0, 1, 5, 100, 10_000]),
    "min_p": lambda r: r.uniform(0.0, 1.0),
    "presence_penalty": lambda r: r.uniform(-2, 2),
    "frequency_penalty": lambda r: r.uniform(-2, 2),
    "repetition_penalty": lambda r: r.uniform(0.5, 2.0),
    "logit_bias": lambda r: {r.randrange(VOCAB): r.uniform(-100, 100) for _ in range(r.randint(1, 20))},
    "seed": lambda r: r.randrange(2**63),
    "stop": lambda r: r.choice(["a", [" the", "\n"], ["def", "e", "xyz"]]),
    "stop_token_ids": lambda r: r.sample(range(VOCAB), r.randint(1, 8)),
    "include_stop_str_in_output": lambda r: True,
    "ignore_eos": lambda r: True,
    "min_tokens": lambda r: r.randint(1, 5),
    "max_tokens": lambda r: r.randint(5, 8),
    "logprobs": lambda r: r.randint(-1, 20),
    "prompt_logprobs": lambda r: r.randint(-1, 5),
    "logprob_token_ids": lambda r: r.choices(range(300), k=r.randint(1, 9)),
    "skip_reading_prefix_cache": lambda r: True,
    "truncate_prompt_tokens": lambda r: r.choice([-1, 1, 10]),
    "truncation_side": lambda r: r.choice(["left", "right"]),
    "repetition_detection": lambda r: {"max_pattern_size": r.randint(1, 4), "min_count": r.randint(2, 3)},
    "skip_special_tokens": lambda r: False,
    "detokenize": lambda r: False,
    "allowed_token_ids": lambda r: r.sample(range(VOCAB), r.randint(20, VOCAB)),
    "bad_words": lambda r: r.sample(["de", " world", "zz", "ï"], r.randint(1, 3)),
    "thinking_token_budget": lambda r: r.randint(-1, 4),
    "receipt": lambda r: True,
    "structured_outputs": lambda r: StructuredOutputsParams(regex=r.choice(["[ab]{1,9}", "(yes|no)?"])),
}
PLAIN = ("n", "stop", "include_stop_str_in_output", "ignore_eos", "max_tokens", "skip_special_tokens", "stop_token_ids")
CHOOSING = ("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "logprob_token_ids", "prompt_logprobs")


def test_every_field_is_drawn():
    assert set(DRAWS) == {field.name for field in fields(SamplingParams)} - set(CALLERS_FIELDS)
    assert {name for name, field in SAMPLING_FIELDS.items() if field.acts != "sampler"} <= set(DRAWS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a configuration without weights."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((BUNDLED_PATH / "config.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    thinking().save(str(folder / "tokenizer.json"))
    return {"model": str(folder), "reasoning_parser": "qwen3"}


def draw(chance: random.Random, names: tuple[str, ...]) -> SamplingParams:
    """Return parameters with each field of ``names`` set or left alone at random.

    ``names`` bounds the fields of a whole wave.
    """
    values = {name: DRAWS[name](chance) for name in names if chance.random() < 0.4}
    values.setdefault("max_tokens", 5)
    if "stop" in values:  # it needs text
        values.pop("detokenize", None)
    if "structured_outputs" in values:  # together they may leave no token: an error
        values.pop("allowed_token_ids", None)
    if "temperature" not in names:
        values["temperature"] = 0.0
    return SamplingParams(**values)


def run(llm: LLM, requests: int, seed: int, every: tuple[str, ...] = tuple(DRAWS)) -> Counter[str]:
    """Run waves of requests that arrive between steps, cancel some, and return the counts of their ends.

    A wave sets some of the fields ``every``.
    """
    chance, frontend, loop = random.Random(seed), llm.frontend, llm.loop
    ended: Counter[str] = Counter()
    states, sent, patient = [], 0, True
    while sent < requests or frontend.busy:
        if sent < requests and (not frontend.busy or (not patient and chance.random() < 0.3)):
            names, patient = chance.choice([PLAIN, PLAIN + CHOOSING, every]), chance.random() < 0.3
            for _ in range(min(chance.choice([1, 1, 2, 3, 5, 8]), requests - sent)):
                length = min(int(chance.expovariate(1 / 20)) + 1, 140)
                prompt = [chance.randrange(VOCAB) for _ in range(length)]
                if states and chance.random() < 0.2:  # for the prefix cache to find
                    prompt = [*states[-1].prompt_ids, *prompt][:140]
                states.append(frontend.prepare(prompt, draw(chance, names), request_id=str(sent)))
                frontend.start([states[-1]])
                sent += 1
        if states and chance.random() < 0.02:
            frontend.abort(chance.choice(states[-8:]))
        llm.advance()
    for state in states:
        ended["error" if state.error is not None else "done"] += 1
    loop.take(0)
    loop.scheduler.check()
    return ended


def hits(llm: LLM) -> dict[str, int]:
    """Return the hits of every item that a step can run."""
    record = Record.from_json(llm.loop.listener.report())
    items = {item.name for item in llm.loop.packer.plan.items if item.kind in ("prompt", "decode", "mixed", "sampler")}
    zero = {item.name for item in llm.loop.packer.plan.items if item.shape.get("rows") == 0}
    return {entry.name: entry.hits for entry in record.entries if entry.name in items - zero}


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_nothing_is_cold_and_nothing_is_missed(model, capsys, mode):
    try:
        llm = LLM(**model | SIZES[mode], execution_mode=mode, skip_warmup=False, on_cold="raise")
    except SettingsError as error:  # compile needs a compiler
        pytest.skip(str(error))
    assert run(llm, REQUESTS[mode], seed=1) == {"done": REQUESTS[mode]}
    record = Record.from_json(llm.loop.listener.report())
    assert not any(record.cold.values())
    assert record.misses == {}
    found = hits(llm)
    missed = [name for name, count in found.items() if not count]
    with capsys.disabled():
        print(f"\n{len(found) - len(missed)} of {len(found)} items were hit; not: {missed}")
        print("; ".join(f"{name} {count}" for name, count in found.items() if "sampler" not in name))
    assert len(missed) <= 0.05 * len(found)


@pytest.mark.parametrize(("mode", "source"), [("eager", "first run"), ("compile", "dynamo")])
def test_without_warm_up_the_same_requests_find_it_cold(model, mode, source):
    try:
        llm = LLM(**model | SIZES[mode], execution_mode=mode, skip_warmup=True, on_cold="count")
    except SettingsError as error:
        pytest.skip(str(error))
    assert run(llm, 50, seed=1) == {"done": 50}
    assert Record.from_json(llm.loop.listener.report()).cold[source] >= 5
