"""Requests with overflowing numbers on a device: they end with an error and change no other row's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from preheat import LLM, LoRARequest, SamplingParams
from preheat.errors import NotFinite
from tests.adapters import write_adapter

OPTIONS = {
    "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128, "block_size": 64,
    "num_gpu_blocks_override": 24, "boot_check": "quick", "enable_lora": True,
}  # fmt: skip
PROMPTS = [[(7 * i + 11 * j) % 190 for j in range(9 + 90 * i)] for i in range(3)]
LONG = [(3 * j) % 190 for j in range(300)]
KINDS = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 3, "top_k": 5, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "prompt_logprobs": 1},
]
ENGINES = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "eight bits": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    "drafts": {"dtype": "bfloat16", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """An adapter of finite numbers that makes attention's values overflow."""
    folder = write_adapter(tmp_path_factory.mktemp("adapters") / "loud", 0)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor * 1e20 for name, tensor in load_file(file).items()}, file)
    return LoRARequest("loud", 1, str(folder))


def answers(llm, params):
    asked = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **params)
    found = llm.generate(PROMPTS, asked, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in found]


@pytest.mark.parametrize("engine", ENGINES)
def test_others_have_their_bits(loud, engine):
    llm = LLM(**OPTIONS, **ENGINES[engine])
    for params in KINDS:
        before, counted = answers(llm, params), llm.loop.scheduler.stats().corrupted_requests
        asked = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False, **params)
        with pytest.raises(NotFinite, match="'loud'"):
            llm.generate([LONG, PROMPTS[1], LONG], asked, use_tqdm=False, lora_request=[loud, None, loud])
        assert llm.loop.scheduler.stats().corrupted_requests > counted
        assert answers(llm, params) == before


def test_a_token_that_overflows_leaves_earlier_tokens_alone():
    """A later prompt with the same first block finds the block in the prefix cache."""
    llm = LLM(**OPTIONS, dtype="bfloat16", enforce_eager=True)  # a graph would read the old table
    decoder = llm.loop.executor.decoder
    embedding = decoder.weights.embedding.clone()  # the output head stays as it is
    embedding[0] = torch.inf
    decoder.weights = replace(decoder.weights, embedding=embedding)
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

    def tokens(prompt, salt):
        given = {"prompt_token_ids": prompt, "cache_salt": salt}
        return list(llm.generate([given], asked, use_tqdm=False)[0].outputs[0].token_ids)

    prompt = [token + 1 for token in LONG[:100]]
    right = tokens(prompt, "alone")
    with pytest.raises(NotFinite, match="the model"):
        tokens([*prompt[:70], 0, *prompt], "shared")  # its first chunk is published before the overflow is found
    assert tokens(prompt, "shared") == right
    assert llm.loop.scheduler.stats().prefix_hits == 64
