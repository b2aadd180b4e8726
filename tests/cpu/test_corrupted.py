"""Requests with numbers that overflow end with an error on an engine.

No other request's bits change.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat import LLM, LoRARequest, SamplingParams
from preheat.backends.cpu import decode_attention, hidden, paged_attention
from preheat.errors import NotFinite
from preheat.execution.draft_model import DraftModel
from preheat.model.files import BUNDLED_PATH
from tests.adapters import write_adapter

OPTIONS = {
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 96, "num_threads": 1, "skip_warmup": True,
    "block_size": 64, "num_gpu_blocks_override": 14, "boot_check": "off",
}  # fmt: skip
PROMPTS = [[(7 * i + 11 * j) % 190 for j in range(9 + 60 * i)] for i in range(3)]
LONG = [(3 * j) % 190 for j in range(150)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "seed": 3},
    "filtered": {"temperature": 0.9, "seed": 3, "top_k": 5, "top_p": 0.9},
    "edited": {"temperature": 0, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    """Write an adapter of finite numbers that make the values of attention overflow."""
    folder = write_adapter(tmp_path_factory.mktemp("adapters") / "loud", 0)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor * 1e20 for name, tensor in load_file(file).items()}, file)
    return LoRARequest("loud", 1, str(folder))


def engine(**options: Any) -> LLM:
    return LLM(enable_lora=True, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine(dtype="bfloat16")


def answers(llm: LLM, **params: Any) -> list[Any]:
    asked = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **params)
    found = llm.generate(PROMPTS, asked, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in found]


def overflow(llm: LLM, loud: LoRARequest, **params: Any) -> None:
    """Ask with the adapter beside prompts without one, and assert an error that names the adapter."""
    asked = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **params)
    with pytest.raises(NotFinite, match="'loud'"):
        llm.generate([LONG, PROMPTS[1], LONG], asked, use_tqdm=False, lora_request=[loud, None, loud])


@pytest.mark.parametrize("kind", KINDS)
def test_others_have_their_bits(llm: LLM, loud: LoRARequest, kind: str) -> None:
    before, counted = answers(llm, **KINDS[kind]), llm.loop.scheduler.stats().corrupted_requests
    overflow(llm, loud, **KINDS[kind])
    assert answers(llm, **KINDS[kind]) == before
    assert llm.loop.scheduler.stats().corrupted_requests > counted


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "block_size": 256, "num_gpu_blocks_override": 6},
        {"dtype": "float32", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    ],
    ids=["in place", "drafts", "eight bits"],
)
def test_with_other_caches_and_steps(loud: LoRARequest, options: dict[str, Any]) -> None:
    llm = engine(**options)
    before = answers(llm, **KINDS["greedy"])
    overflow(llm, loud, **KINDS["greedy"])
    assert answers(llm, **KINDS["greedy"]) == before


def test_numbers_of_a_draft_model_that_are_not_finite_cost_only_its_drafts() -> None:
    drafted = {"speculative_config": {"model": str(BUNDLED_PATH), "num_speculative_tokens": 2}}
    right = answers(LLM(**OPTIONS, dtype="float32"), **KINDS["drawn"])
    llm = LLM(**OPTIONS, **drafted, dtype="float32")
    drafting = llm.loop.scheduler.drafting
    assert drafting is not None
    assert isinstance(drafting.proposer, DraftModel)
    assert answers(llm, **KINDS["drawn"]) == right
    assert llm.loop.scheduler.stats().accepted_tokens > 0
    drafting.proposer.executor.decoder.weights.embedding.fill_(torch.inf)
    assert answers(llm, **KINDS["drawn"]) == right
    assert llm.loop.scheduler.stats().corrupted_requests == 0


def test_an_overflowing_token_leaves_earlier_blocks_alone() -> None:
    """A token that overflows leaves the blocks before it.

    Another prompt finds its first block in the prefix cache.
    """
    llm = LLM(**OPTIONS, dtype="float32")
    llm.loop.executor.decoder.weights.embedding[0] = torch.inf
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

    def tokens(prompt: list[int], salt: str) -> list[int]:
        given = {"prompt_token_ids": prompt, "cache_salt": salt}
        return list(llm.generate([given], asked, use_tqdm=False)[0].outputs[0].token_ids)

    prompt = [token + 1 for token in LONG[:80]]
    right = tokens(prompt, "alone")
    with pytest.raises(NotFinite, match="the model"):
        tokens([*prompt[:70], 0, *prompt], "shared")  # its first chunk is published before the overflow is found
    assert tokens(prompt, "shared") == right
    assert llm.loop.scheduler.stats().prefix_hits == 64


@pytest.mark.usefixtures("eager_here")
def test_attention_that_multiplies_by_zero_is_found(loud: LoRARequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: attention that multiplies hidden values by zero breaks the comparisons above."""

    def multiplied(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, mask, scale = inputs
        part, lse = hidden.kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return part, lse

    for module in (decode_attention, paged_attention):
        monkeypatch.setattr(module, "attend", multiplied)
    with pytest.raises(NotFinite):
        test_an_overflowing_token_leaves_earlier_blocks_alone()
    llm = engine(dtype="float32")
    answers(llm, temperature=0)
    overflow(llm, loud, temperature=0)
    with pytest.raises(NotFinite, match="the model"):
        answers(llm, temperature=0)
