"""Every family through the whole engine, in both modes, against transformers: chunks, decoding, cached prefixes.

All paths give the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.backends.cpu.tiles import SPLIT
from preheat.frontend.outputs import RequestOutput
from tests.controls import fails
from tests.cpu.checkpoints import MODELS, Model, save_checkpoint

NAMES = ("llama", "mixtral", "qwen3 moe", "gemma 3")
"""Models that run eagerly, too: the layers of others run so in ``test_model_paged.py``."""

ODD = {"hidden_size": 60, "intermediate_size": 52, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 22}
"""Sizes that fill no vector."""

ONLY_DATA = {
    "llama tied", "llama linear rope", "mistral", "qwen2", "qwen3 with yarn", "phi3 with longrope", "ministral",
    "smollm3", "smollm3 with windows", "olmo 2", "glm", "cohere", "exaone 4", "exaone 4 without windows", "seed oss",
    "ernie 4.5", "cwm", "helium", "jais 2", "stablelm", "stablelm side by side", "gemma", "flex olmo", "phi",
}  # fmt: skip
"""Models that differ from others by tables alone, or in the shapes and parts of their layers that others have."""

EAGER_ALONE = {"kv_lora_rank", "linear_num_value_heads", "mamba_n_heads", "hidden_size_per_layer_input"}
"""Fields of models that compiled layers do not run: latent vectors, states, and inputs of layers."""

DENSE: dict[str, Model] = {
    name: model for name, model in MODELS.items()
    if "mix" not in name and "moe" not in name and not model[1].keys() & EAGER_ALONE and name not in ONLY_DATA
} | {
    "llama of odd sizes": ("Llama", ODD | {"mlp_bias": True}),
    "gemma 3 of odd sizes": ("Gemma3", MODELS["gemma 3"][1] | ODD),
    "starcoder2 of odd sizes": ("Starcoder2", ODD),
}  # fmt: skip
"""Dense models of each kind of layer; models of experts are in ``test_llvm_experts.py``."""

VOCAB, STEPS = 199, 6
OPTIONS = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4,
    "max_num_batched_tokens": 48, "block_size": 16, "num_gpu_blocks_override": 60, "max_logprobs": VOCAB,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
EAGER = OPTIONS | {"execution_mode": "eager"}
LLVM = OPTIONS | {"execution_mode": "llvm", "num_threads": 1}
NO_LLVM = pytest.mark.skipif(find_spec("llvmlite") is None, reason="llvmlite is not installed: pip install llvmlite")
OTHER = {"enable_prefix_caching": False, "max_num_batched_tokens": 256, "num_threads": 3}
"""Other chunks, no prefixes, more threads."""

CASES = [
    *(pytest.param(MODELS[name], EAGER, id=f"eager-{name}") for name in NAMES),
    *(pytest.param(model, LLVM, id=f"llvm-{name}", marks=NO_LLVM) for name, model in DENSE.items()),
]
PARAMS = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=VOCAB)


def prompts() -> list[list[int]]:
    """Return three prompts of more than 8 tokens.

    The second and third share two blocks with the first.
    """
    chance = random.Random(2)
    first, second, third = ([chance.randrange(VOCAB) for _ in range(length)] for length in (90, 37, 9))
    return [first, first[:32] + second, first[:32] + third]


def seen(output: RequestOutput) -> tuple[list[int], Tensor]:
    """Return the tokens, and the log-probabilities of the vocabulary before each: float32 [steps, vocab]."""
    choice = output.outputs[0]
    assert choice.logprobs is not None
    found = torch.empty(STEPS, VOCAB)
    for row, entry in zip(found, choice.logprobs, strict=True):
        row[list(entry)] = torch.tensor([value.logprob for value in entry.values()])
    return choice.token_ids, found


def run(llm: LLM, some: list[list[int]]) -> list[tuple[list[int], Tensor]]:
    return [seen(output) for output in llm.generate(some, PARAMS, use_tqdm=False)]


def differing(a: list[tuple[list[int], Tensor]], b: list[tuple[list[int], Tensor]]) -> int:
    pairs = zip(a, b, strict=True)
    return sum(x[0] != y[0] or not torch.equal(x[1], y[1]) for x, y in pairs)


def error(found: tuple[list[int], Tensor], prompt: list[int], reference: Callable[[Tensor], Tensor]) -> float:
    """Return the relative error of the logits, up to a constant of each position."""
    tokens, ours = found
    theirs = reference(torch.tensor(prompt + tokens))[len(prompt) - 1 : -1]
    assert theirs.argmax(-1).tolist() == tokens
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


@pytest.mark.parametrize(("model", "options"), CASES)
def test_chunks_decode_and_cached_prefixes(model: Model, options: dict[str, Any], tmp_path: Path) -> None:
    reference, some = save_checkpoint(model, tmp_path), prompts()
    llm = LLM(str(tmp_path), **options)
    together = run(llm, some)
    for prompt, found in zip(some, together, strict=True):
        assert error(found, prompt, reference) <= 1e-5
    (long,) = llm.generate([some[2]], GREEDY, use_tqdm=False)
    tokens = long.outputs[0].token_ids
    assert len(tokens) == 200
    assert reference(torch.tensor(some[2] + tokens)).argmax(-1)[len(some[2]) - 1 : -1].tolist() == tokens
    hits = llm.loop.scheduler.stats().prefix_hits
    again = [run(llm, [prompt])[0] for prompt in some]
    assert llm.loop.scheduler.stats().prefix_hits > hits
    assert differing(again, together) == 0
    cold = LLM(str(tmp_path), **options | OTHER)
    assert differing([run(cold, [prompt])[0] for prompt in some], together) == 0


@pytest.mark.parametrize(
    ("options", "others"),
    [
        (EAGER, [{"max_num_batched_tokens": 256},
                 {"contiguous_pa": True, "block_size": SPLIT, "num_gpu_blocks_override": 9}]),
        pytest.param(LLVM, [OTHER | {"block_size": 256}], marks=NO_LLVM),
    ],
    ids=["eager", "llvm"],
)  # fmt: skip
def test_alibi_over_several_splits(options: dict[str, Any], others: list[dict[str, Any]], tmp_path: Path) -> None:
    """ALiBi is right behind the first KV split too, and when the cache is read in place."""
    name, changes = MODELS["mpt with six heads"]
    reference = save_checkpoint((name, {**changes, "max_seq_len": 640}), tmp_path)
    chance = random.Random(3)
    prompt = [chance.randrange(VOCAB) for _ in range(2 * SPLIT + 40)]
    longer = options | {"max_model_len": 640, "num_gpu_blocks_override": 90}
    found = run(LLM(str(tmp_path), **longer), [prompt])
    assert error(found[0], prompt, reference) <= 1e-5
    for more in others:
        assert differing(run(LLM(str(tmp_path), **longer | more), [prompt]), found) == 0


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Control: another token far back in the prompt breaks the comparison."""
    reference, some = save_checkpoint(MODELS["mpt with six heads"], tmp_path), prompts()
    llm = LLM(str(tmp_path), **OPTIONS)
    right = run(llm, some[:1])
    some[0][40] = (some[0][40] + 1) % VOCAB
    assert differing(run(llm, some[:1]), right) == 1
    with fails():
        assert error(right[0], some[0], reference) <= 1e-5
