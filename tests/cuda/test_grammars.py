"""Structured outputs on a GPU: a mask changes its own row alone, in graphs, a step ahead, and with forced tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from preheat import LLM, PreheatError, SamplingParams
from preheat.grammar.guidance import Guidance
from preheat.warmup.record import Record
from tests.cpu.structured import MOST, held, problem
from tests.cpu.test_forced_tokens import ASKED
from tests.cuda.test_engine import CONFIG, DEVICE
from tests.schemas import SERVED
from tests.tokenizers import byte_level

NAMES = ("nested", "enum", "allOf", "minLength", "type: array", "anyOf: objects", "pattern", "$ref: recursive")
HELD = [held(seed=number, json=SERVED[name]) for number, name in enumerate(NAMES)]
PLAIN = [
    SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=2, max_tokens=33, top_k=9, top_p=0.8, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=30, presence_penalty=0.5, logit_bias={9: 2.0}, ignore_eos=True),
]
MIXED = [*HELD, *PLAIN, *ASKED]
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "load_format": "dummy", "dtype": "bfloat16", "max_model_len": MOST + 100, "max_num_seqs": 32,
    "max_num_batched_tokens": 256, "block_size": 16, "num_gpu_blocks_override": 800, "boot_check": "off",
}  # fmt: skip
FORCED = {"speculative_config": {"method": "grammar", "num_speculative_tokens": 6}}
Found = list[tuple[list[int], Any, str | None, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size() + 5, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, **OPTIONS, skip_warmup=False, on_cold="raise")


def said(llm: LLM, params: Sequence[SamplingParams], which: Sequence[int] | None = None) -> Found:
    """Tokens, log-probabilities, ends and texts; the prompt of each is its own. Nothing is left behind."""
    numbers = range(len(params)) if which is None else which
    outputs = llm.generate([f"x{number}" for number in numbers], [params[n] for n in numbers], use_tqdm=False)
    llm.loop.scheduler.check()
    assert llm.loop.scheduler.stats().blocks_used == 0
    choices = [output.outputs[0] for output in outputs]
    return [(choice.token_ids, choice.logprobs, choice.finish_reason, choice.text) for choice in choices]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Found:
    return said(llm, MIXED)


def test_answers_fit_their_schemas_and_nothing_is_cold(llm: LLM, expected: Found) -> None:
    for name, (_, _, reason, text) in zip(NAMES, expected, strict=False):
        assert not problem(SERVED[name], text, reason), (name, text)
    record = Record.from_json(llm.loop.listener.report())
    assert not any(record.cold.values()), record.events


def test_the_same_tokens_alone_and_in_another_order(llm: LLM, expected: Found) -> None:
    for number in range(len(MIXED)):
        assert said(llm, MIXED, [number]) == [expected[number]], number
    order = random.Random(0).sample(range(len(MIXED)), len(MIXED))
    assert said(llm, MIXED, order) == [expected[number] for number in order]


def test_rows_without_a_grammar_do_not_notice_those_with_one(llm: LLM, expected: Found) -> None:
    free = [number for number, params in enumerate(MIXED) if params.structured_outputs is None]
    assert len(free) >= 6
    assert said(llm, MIXED, free) == [expected[number] for number in free]


@pytest.mark.parametrize(
    "more",
    [
        {"async_scheduling": False},
        {"max_num_seqs": 8, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 42, "defrag_threshold": 0},
        {"enforce_eager": True},
        FORCED,
        FORCED | {"async_scheduling": False, "max_num_seqs": 8, "num_gpu_blocks_override": 60},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    ],
    ids=["in step", "few blocks", "eager", "forced tokens", "forced tokens, few blocks", "ngram"],
)
def test_every_way_to_run_gives_these_tokens(model: str, expected: Found, more: dict[str, Any]) -> None:
    llm = LLM(model, **OPTIONS | more)
    assert said(llm, MIXED) == expected
    stats = llm.loop.scheduler.stats()
    if more.get("speculative_config", {}).get("method") == "grammar":
        assert stats.accepted_tokens > 50


def test_masks_in_the_wrong_rows_are_noticed(llm: LLM, expected: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the masks of a step are those of its rows in another order."""
    right = Guidance.fill

    def turned(self: Guidance, masks: Any, rows: Any) -> None:
        right(self, masks, rows)
        places = [place for _, place, _ in rows]
        masks[places] = masks[places[::-1]].copy()

    monkeypatch.setattr(Guidance, "fill", turned)
    with pytest.raises(PreheatError, match="does not allow token"):
        said(llm, MIXED)
