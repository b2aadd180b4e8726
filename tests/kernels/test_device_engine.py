"""The engine on the CUDA backend without a GPU: a step ahead, with kernels in the interpreter.

Its answers are compared with the engine on a CPU, in float32: there both find the same tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.adapter import write_adapter
from preheat import LLM, LoRARequest, SamplingParams, StructuredOutputsParams, llm
from preheat.backends.cuda.matmul.layer import Layer
from preheat.backends.cuda.sampling.sampler import CudaSampler
from preheat.execution.input_batch import Packer
from preheat.frontend.outputs import Logprob, RequestOutput
from preheat.lora.adapter import adapted_modules, expert_modules
from preheat.model.families import read_spec
from preheat.verify.check_runner import CheckRunner
from preheat.verify.logprob_check import check_logprobs
from tests.cpu.eagle_reference import Reference, random_tensors, save_head, save_target
from tests.cpu.test_eagle import agreeing, heard
from tests.kernels.backend import InterpretedCuda, boot_on
from tests.tokenizers import byte_level

VOCAB = 96
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32", "hidden_act": "silu",
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 2, "tie_word_embeddings": True,
    "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "num_hidden_layers": 1, "norm_topk_prob": True, "use_sliding_window": False,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 48,
    "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 16, "num_gpu_blocks_override": 5,
    "max_logprobs": 3,
}  # fmt: skip
REQUESTS = {
    "greedy": SamplingParams(temperature=0, max_tokens=4),
    "seeded": SamplingParams(temperature=1.0, seed=3, top_p=0.9, logprobs=3, max_tokens=3),
    "penalised": SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.5, max_tokens=4),
    "prompt": SamplingParams(temperature=0, prompt_logprobs=2, min_tokens=1, logit_bias={7: 2.5}, max_tokens=2),
}
LENGTHS = {"greedy": 5, "seeded": 1, "penalised": 18, "prompt": 6}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boot engines on the interpreted backend, unless they are told to take the CPU."""
    monkeypatch.setattr(llm, "boot_engine", boot_on(InterpretedCuda()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def answers(engine: LLM, names: Sequence[str] = tuple(REQUESTS)) -> list[RequestOutput]:
    """Return the answers to the requests of these ``names``, the first ones of all."""
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCAB) for _ in range(LENGTHS[name])] for name in names]
    found = engine.generate(prompts, [REQUESTS[name] for name in names], use_tqdm=False)
    engine.loop.scheduler.check()
    return found


@pytest.fixture(scope="module")
def expected(model: str) -> list[RequestOutput]:
    return answers(LLM(model, device="cpu", execution_mode="eager", **OPTIONS))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_close(found: list[dict[int, Logprob] | None] | None, expected: list[dict[int, Logprob] | None] | None):
    """Assert the same tokens with the same ranks, and nearly the same log-probabilities."""
    assert found is not None and expected is not None
    assert [entry and list(entry) for entry in found] == [entry and list(entry) for entry in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for token in theirs or {}:
            assert ours[token].rank == theirs[token].rank
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_a_step_ahead_the_answers_equal_the_answers_of_the_cpu(model, expected):
    engine = LLM(model, **OPTIONS)
    assert isinstance(engine.loop.executor.sampler, CudaSampler)
    assert engine.loop.overlap
    found = dict(zip(REQUESTS, answers(engine), strict=True))
    right = dict(zip(REQUESTS, expected, strict=True))
    assert tokens_of(found.values()) == tokens_of(expected)
    assert_close(found["seeded"].outputs[0].logprobs, right["seeded"].outputs[0].logprobs)
    assert_close(found["prompt"].prompt_logprobs, right["prompt"].prompt_logprobs)


@pytest.mark.usefixtures("interpreted")
def test_sums_of_k_splits_have_the_answers_of_the_cpu(model, expected):
    engine = LLM(model, tp_invariant=True, **OPTIONS)
    linears = [linear for _, linear in engine.loop.executor.decoder.weights.linears()]
    assert any(isinstance(linear, Layer) and linear.value.order.is_split for linear in linears)
    assert tokens_of(answers(engine)) == tokens_of(expected)


@pytest.mark.usefixtures("interpreted")
def test_quantized_k_splits_too(model):
    """Codes of activations may round apart from a CPU's exact sums; greedy tokens are the same here."""
    options = {**OPTIONS, "tp_invariant": True, "quantization": "fp8"}
    engine = LLM(model, **options)
    schemes = [linear.shape.scheme for _, linear in engine.loop.executor.decoder.weights.linears() if linear.shape]
    assert {scheme and scheme.kind for scheme in schemes} == {"w8a8", None}
    names = ["greedy", "seeded"]
    assert tokens_of(answers(engine, names)) == tokens_of(
        answers(LLM(model, device="cpu", execution_mode="eager", **options), names)
    )


@pytest.mark.usefixtures("interpreted")
def test_a_token_that_is_not_fed_back_is_noticed(model, expected, monkeypatch):
    """The device is told that the token it has just drawn was 0."""
    tell = Packer._write_tokens

    def wrong(self, columns, schedule, rows):
        tell(self, columns, schedule, rows)
        tokens = columns[0]
        assert schedule.num_decode == 0 or (tokens < 0).any()
        np.maximum(tokens, 0, out=tokens)

    monkeypatch.setattr(Packer, "_write_tokens", wrong)
    assert tokens_of(answers(LLM(model, **OPTIONS), ["greedy"])) != tokens_of(expected)[:1]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("config", [{"method": "ngram"}, {"model": "itself"}], ids=["right or wrong", "draft model"])
def test_with_drafts_the_answers_equal_the_answers_of_the_cpu(model, expected, config):
    """Two of three drafts of the stand-in are right; a draft model drafts its own tokens."""
    config = {key: value if key == "method" else model for key, value in config.items()}
    names = list(REQUESTS)[: 4 if "method" in config else 3]
    engine = LLM(model, **OPTIONS, speculative_config=config | {"num_speculative_tokens": 3})
    drafting = engine.loop.scheduler.drafting
    if "method" in config:
        drafting.proposer.propose = partial(_every_third_wrong, tokens_of(expected))
    found = answers(engine, names)
    assert tokens_of(found) == tokens_of(expected)[: len(names)]
    assert_close(found[1].outputs[0].logprobs, expected[1].outputs[0].logprobs)
    stats = engine.loop.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens + ("model" in config)


@pytest.mark.usefixtures("interpreted")
def test_the_heads_logits_equal_plain_torch(tmp_path):
    """A head of EAGLE-3 reads the features that steps on the device keep.

    The answers are the same as without it.
    """
    target, tensors = save_target(tmp_path), random_tensors()
    config = {"method": "eagle3", "model": save_head(tmp_path / "head", tensors), "num_speculative_tokens": 2}
    options = {**OPTIONS, "load_format": "auto", "dtype": "float32"}
    prompts = [[5, 9, 200, 31, 77], [300, 12, *range(40, 58)]]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    right = LLM(str(tmp_path), device="cpu", execution_mode="eager", **options).generate(
        prompts, params, use_tqdm=False
    )
    engine = LLM(str(tmp_path), **options, speculative_config=config)
    engine.loop.scheduler.drafting.proposer.waits = True  # the comparison is by the tokens before a feature
    found = heard(engine)
    assert tokens_of(engine.generate(prompts, params, use_tqdm=False)) == tokens_of(right)
    assert len(found) > 6
    assert agreeing(Reference(target, tensors), found) == 1.0


def _every_third_wrong(truth: list[list[int]], slots: Any, rows: np.ndarray, most: np.ndarray) -> list[np.ndarray]:
    found = []
    for slot, count in zip(rows.tolist(), most.tolist(), strict=True):
        prompt = slots.prompt_len[slot]
        answer = truth[list(LENGTHS.values()).index(prompt)]
        places = range(slots.device_len[slot] - prompt, min(slots.device_len[slot] - prompt + count, len(answer)))
        found.append(np.array([(answer[at] + (at % 3 == 2)) % VOCAB for at in places], np.int32))
    return found


HELD = StructuredOutputsParams(regex="[ab]{2,3}")
MIXED = (
    SamplingParams(temperature=1.0, seed=3, max_tokens=4, structured_outputs=HELD),
    SamplingParams(temperature=1.0, seed=4, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=2, structured_outputs=HELD),
)


@pytest.mark.usefixtures("interpreted")
def test_grammars_with_a_step_in_flight(tmp_path, monkeypatch):
    """Masks are asked for while the model runs, after the tokens of the step before.

    Texts are the CPU's.
    """
    backend = byte_level()
    size = backend.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": size, "eos_token_id": 1}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    backend.save(str(tmp_path / "tokenizer.json"))
    options = OPTIONS | {"skip_tokenizer_init": False, "max_num_seqs": 3}
    right = LLM(str(tmp_path), device="cpu", execution_mode="eager", **options).generate(
        [[5], [6], [7]], MIXED, use_tqdm=False
    )
    engine, order = LLM(str(tmp_path), **options), list[str]()

    def noted(owner: object, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (order.append(name), function(*args))[1])

    for owner, name in ((engine.loop.executor, "begin"), (engine.loop.scheduler, "process_results"),
                        (engine.loop.grammars, "fill"), (engine.loop.executor, "complete")):  # fmt: skip
        noted(owner, name)
    found = engine.generate([[5], [6], [7]], MIXED, use_tqdm=False)
    assert [each.outputs[0].text for each in found] == [each.outputs[0].text for each in right]
    assert re.fullmatch("[ab]{2,3}", found[0].outputs[0].text)
    assert " ".join(order).count("begin process_results fill complete") >= 2
    engine.loop.scheduler.check()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("k_splits", [False, True])
def test_adapters_that_change_slots_beside_rows_without_an_adapter(k_splits, tmp_path):
    """Two adapter slots serve three adapters: one is put into its slot while others decode.

    Answers are the CPU's. A variant has the sums of ranks and adapted experts.
    """
    config = CONFIG | EXPERTS if k_splits else CONFIG
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, spec = str(tmp_path), read_spec(config)
    options = OPTIONS | {"max_num_seqs": 3, "num_gpu_blocks_override": 9, "enable_lora": True, "max_loras": 2,
                         "max_cpu_loras": 3, "max_lora_rank": 20, "tp_invariant": k_splits}  # fmt: skip
    modules = {**adapted_modules(spec), **expert_modules(spec)}
    whose = [1, 0, 2, 3, 0, 1][: 4 if k_splits else 6]
    named = [
        LoRARequest(str(one), one, str(write_adapter(tmp_path / str(one), modules, rank=6 * one, seed=one)))
        if one else None for one in whose
    ]  # fmt: skip
    chance = random.Random(1)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (5, 5, 9, 3, 18, 2)[: len(whose)]]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    def said(**more: Any) -> list[list[int]]:
        engine = LLM(model, **options | more)
        found = tokens_of(engine.generate(prompts, params, use_tqdm=False, lora_request=named))
        engine.loop.scheduler.check()
        return found

    found = said()
    assert found == said(device="cpu", execution_mode="eager")
    plain = LLM(model, device="cpu", execution_mode="eager", **OPTIONS | {"tp_invariant": k_splits})
    without = tokens_of(plain.generate(prompts, params, use_tqdm=False))
    assert [one == other for one, other in zip(found, without, strict=True)] == [not one for one in whose]


@pytest.mark.usefixtures("interpreted")
def test_prompts_of_embeddings_have_the_answers_of_their_tokens(model):
    """The check of log-probabilities at boot passes, too."""
    engine = LLM(model, **OPTIONS, enable_prompt_embeds=True)
    table, chance = engine.loop.executor.decoder.weights.embedding, random.Random(1)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (1, 18, 5)]
    params = [SamplingParams(temperature=place % 2, seed=place, max_tokens=3) for place in range(3)]
    embeds = [{"prompt_embeds": table[ids]} for ids in prompts]
    first = tokens_of(engine.generate(embeds, params, use_tqdm=False))
    assert first == tokens_of(engine.generate(prompts, params, use_tqdm=False))
    loop = engine.loop
    check_logprobs(CheckRunner(loop.scheduler.pool, loop.packer, loop.executor))
    loop.scheduler.check()
