"""Structured outputs on a GPU: texts obey their grammars, other rows and forced tokens change nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from preheat import LLM, PreheatError, SamplingParams
from preheat.grammar.guidance import Guidance
from preheat.warmup.record import Record
from tests.cpu.structured import held, problem
from tests.schemas import SERVED, closed
from tests.tokenizers import byte_level

DEVICE = "cuda"
WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
NESTED = closed({"person": closed({"name": WORD, "tags": {"type": "array", "items": WORD, "maxItems": 3}}),
                 "size": {"enum": [1, 22, 333]}})  # fmt: skip
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "load_format": "dummy", "max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 512,
    "block_size": 64, "num_gpu_blocks_override": 400, "seed": 0,
}  # fmt: skip
FORCED = {"speculative_config": {"method": "grammar", "num_speculative_tokens": 4}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64 + 5,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 1,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    """A warm engine, a step ahead; the check at boot has drawn texts through the masks."""
    return LLM(model, **OPTIONS, skip_warmup=False, boot_check="full", on_cold="raise")


def mixed(count: int = 24) -> list[SamplingParams]:
    """Return rows with and without grammars that end at different times."""
    schemas = [NESTED, *(SERVED[name] for name in ("enum", "allOf", "minLength"))]
    plain = [SamplingParams(temperature=1.0, seed=n, max_tokens=12 + n, ignore_eos=True, logprobs=2)
             for n in range(count // 2)]  # fmt: skip
    masked = [held(seed=n, json=schemas[n % len(schemas)]) for n in range(count // 2)]
    return [one for pair in zip(plain, masked, strict=True) for one in pair]


def answers(llm: LLM, params: Sequence[SamplingParams], first: int = 0) -> list[Any]:
    """Return tokens, texts, ends and exact log-probabilities; the prompts differ from ``first`` on."""
    prompts = [f"x{n}" for n in range(first, first + len(params))]
    found = llm.generate(prompts, list(params), use_tqdm=False)
    llm.loop.scheduler.check()
    return [each.outputs[0] for each in found]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    return answers(llm, mixed())


# First, before other engines build anything in this process.
def test_nothing_is_cold(llm: LLM, expected: list[Any]) -> None:
    record = Record.from_json(llm.loop.listener.report())
    assert not any(record.cold.values()), record.events
    assert record.misses == {}


def test_texts_match_their_schemas(expected: list[Any]) -> None:
    held_rows = list(zip(mixed()[1::2], expected[1::2], strict=True))
    for params, output in held_rows:
        assert params.structured_outputs is not None
        schema: Any = params.structured_outputs.json
        assert not problem(schema, output.text, output.finish_reason), output.text


def test_the_same_alone_and_among_others(llm: LLM, expected: list[Any]) -> None:
    assert [answers(llm, [each], first=n)[0] for n, each in enumerate(mixed())] == expected


def test_a_grammar_changes_no_other_row(llm: LLM, expected: list[Any]) -> None:
    """The plain rows keep their bits when the other rows have no grammar either."""
    params = [each if each.structured_outputs is None else SamplingParams(seed=9, max_tokens=9) for each in mixed()]
    assert answers(llm, params)[::2] == expected[::2]


@pytest.mark.parametrize("options", [FORCED, {"async_scheduling": False}], ids=["forced tokens", "in step"])
def test_forced_tokens_and_waiting_change_nothing(model: str, options: dict[str, Any], expected: list[Any]) -> None:
    other = LLM(model, **OPTIONS | options, boot_check="off")
    assert answers(other, mixed()) == expected
    stats = other.loop.scheduler.stats()
    assert (stats.accepted_tokens > 0) is (options is FORCED)


def test_few_blocks_change_nothing(model: str, expected: list[Any]) -> None:
    """Requests wait and are preempted, and their grammars continue correctly."""
    few = {"block_size": 16, "num_gpu_blocks_override": 40, "max_num_seqs": 8, "max_num_batched_tokens": 48}
    other = LLM(model, **OPTIONS | few, boot_check="off")
    assert answers(other, mixed()) == expected


def test_a_mask_in_the_wrong_row_is_noticed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the masks of a step's rows are in another order."""
    other, right = LLM(model, **OPTIONS, boot_check="off"), Guidance.fill

    def turned(self: Guidance, masks: Any, rows: Any) -> None:
        right(self, masks, rows)
        places = [place for _, place, _ in rows]
        masks[places] = masks[places[::-1]].copy()

    monkeypatch.setattr(Guidance, "fill", turned)
    with pytest.raises(PreheatError, match="does not allow token"):
        answers(other, mixed())
