"""Every family on a GPU against Hugging Face transformers on the same GPU, through the public API.

Every position is compared. Log-probabilities of the whole vocabulary equal the logits up to a constant of each
position. They come from prompts, read in chunks, and from the tokens after the prompts, decoded one by one beyond the
first split of the keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.backends.cuda.attention.work import SPLIT
from preheat.frontend.outputs import RequestOutput
from preheat.model.files import read_config
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.drive import Engine
from preheat.verify.prompts import REDUCED, Prompt, make_prompts
from preheat.verify.verification import Verification
from tests.cpu.checkpoints import (
    GROWING_ROPE,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    MODELS,
    YARN_ROPE,
    Model,
    longrope,
    save_checkpoint,
)

DEVICE = "cuda"
VOCAB, LENGTH = 256, 1024
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
STATE_THEN_FULL = ["linear_attention", "full_attention"]
WINDOW_THEN_FULL = ["sliding_attention", "full_attention"]
CHANGES: dict[str, dict[str, Any]] = {
    "llama 3.1": {"rope_parameters": LLAMA3_ROPE, "head_dim": 128, "num_attention_heads": 8},
    "llama linear rope": {"rope_parameters": LINEAR_ROPE},
    "llama with biases": {"num_key_value_heads": 4},
    "mistral": {"num_attention_heads": 6, "head_dim": 96},
    "mistral with window": {"sliding_window": 100},
    "qwen2 with windows": {"sliding_window": 300},
    "qwen3": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "phi3 with longrope": {"rope_parameters": longrope(32)},
    "phi4 mini": {"rope_parameters": longrope(24) | {"partial_rotary_factor": 0.75, "attention_factor": 1.2}},
    "gpt bigcode with 48 heads": {"hidden_size": 48 * 32},
    "gemma 3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100},
    "gemma 3 with one key head": {"head_dim": 256, "sliding_window": 100},
    "mpt with six heads": {"hidden_size": 6 * 64},
    "ministral": {"layer_types": WINDOW_THEN_FULL, "sliding_window": 100},
    "ministral 3": {"rope_parameters": GROWING_ROPE | {"factor": 8.0, "original_max_position_embeddings": LENGTH // 8}},
    "olmo 3": {"layer_types": WINDOW_THEN_FULL, "sliding_window": 100},
    "cohere 2": {"layer_types": WINDOW_THEN_FULL, "sliding_window": 100},
    "exaone 4": {"layer_types": WINDOW_THEN_FULL, "sliding_window": 100},
    "exaone 4 without windows": {"layer_types": ["full_attention"] * 2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "qwen3-next": {"layer_types": STATE_THEN_FULL, "linear_key_head_dim": 64},
    "qwen3-next with dense layers": {"layer_types": STATE_THEN_FULL, "linear_key_head_dim": 64},
    "qwen3.5": {"layer_types": STATE_THEN_FULL, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3.5 tied": {"layer_types": STATE_THEN_FULL, "linear_key_head_dim": 64},
    "qwen3.5 moe": {"layer_types": STATE_THEN_FULL, "linear_key_head_dim": 64},
    "granite 4 h": {"layer_types": STATE_THEN_FULL, "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 128},
    "granite 4 h with experts": {  # one group: older transformers take the norm of all groups together
        "layer_types": STATE_THEN_FULL,
        "mamba_n_heads": 16,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
    },
    **{name: {"head_dim": 16} for name, (_, changes) in MODELS.items() if "kv_lora_rank" in changes},
    "gemma 4": {"num_hidden_layers": 5, "global_head_dim": 512, "vocab_size_per_layer_input": VOCAB},
    "gemma 4 with experts": {"num_hidden_layers": 5, "global_head_dim": 128, "sliding_window": 100},
    "qwen3 with yarn": {"rope_parameters": YARN_ROPE | {"factor": LENGTH / 64}},
}
"""Changes beside `SIZES`, for differences that matter to a GPU's kernels.

Each is in one family at least, and there are few, so that few kernels compile.
"""

OPTIONS: dict[str, Any] = {
    "device": DEVICE, "skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 128,
    "max_model_len": LENGTH, "num_gpu_blocks_override": 40, "max_logprobs": VOCAB, "boot_check": "off",
}  # fmt: skip
LENGTHS = (1, 17, 130, SPLIT + 40)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB)

Found = list[tuple[list[int], Tensor]]
"""Sequences, and fp32 [tokens - 1, vocab]: log-probabilities of the token after each."""


def model_of(name: str) -> Model:
    family, changes = MODELS[name]
    return family, changes | SIZES | CHANGES.get(name, {})


def logprobs_of(output: RequestOutput) -> Tensor:
    choice = output.outputs[0]
    assert output.prompt_logprobs is not None and choice.logprobs is not None
    entries = [*output.prompt_logprobs[1:], *choice.logprobs]
    found = torch.full((len(entries), VOCAB), torch.nan)
    for row, entry in zip(found, entries, strict=True):
        assert entry is not None
        row[list(entry)] = torch.tensor([value.logprob for value in entry.values()])
    assert not found.isnan().any()
    return found


def run(folder: Path, dtype: str) -> Found:
    """Return our engine's log-probabilities, with its own greedy tokens after each prompt."""
    chance = random.Random(5)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    outputs = LLM(str(folder), dtype=dtype, **OPTIONS).generate(prompts, PARAMS, use_tqdm=False)
    return [(p + o.outputs[0].token_ids, logprobs_of(o)) for p, o in zip(prompts, outputs, strict=True)]


@torch.inference_mode()
def reference(folder: Path, found: Found, dtype: torch.dtype, **changes: Any) -> list[Tensor]:
    """Return the log-probabilities of transformers, teacher-forced, with ``changes`` to the configuration."""
    from transformers import AutoModelForCausalLM

    only_eager = read_config(folder)["model_type"] in ("mpt", "gpt_oss")  # the only attention of their classes there
    how = "eager" if only_eager else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=how, **changes)
    model.eval().to(DEVICE)
    logits = [model(torch.tensor([tokens], device=DEVICE)).logits[0, :-1] for tokens, _ in found]
    return [part.float().log_softmax(-1).cpu() for part in logits]


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative error of the logits over all positions, without a constant of each position."""
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("model")
        save_checkpoint(model_of(name), folder)
        return folder

    return saved


ROUTED = [name for name, (_, changes) in MODELS.items() if {"num_experts_per_tok", "top_k_experts"} & changes.keys()]
IN_FLOAT32 = [*ROUTED, "phi3 with longrope"]
"""Families compared in float32 only.

A token near a tie of two experts, or a stretched rope, amplifies the rounding of bfloat16 beyond the bound.
"""

ROUNDED_LESS = ("ernie 4.5", "helium", "olmo 3")
"""Families of the reference that round once where others, and we, round after each product of a norm or a rope."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # by the reference of GPTBigCode


@pytest.mark.parametrize("name", [name for name in MODELS if name not in IN_FLOAT32])
def test_bfloat16_is_transformers(name, checkpoint):
    """The error is as small as rounding, and the best token agrees wherever rounding cannot change it.

    Where the two differ by more, ours must be as close to transformers in float32 as theirs. Two equally good roundings
    differ in that by a percent.
    """
    folder = checkpoint(name)
    found = run(folder, "bfloat16")
    ours = torch.cat([logprobs for _, logprobs in found])
    theirs, exact = (torch.cat(reference(folder, found, dtype)) for dtype in (torch.bfloat16, torch.float32))
    most = error(theirs, exact) * (1.15 if name in ROUNDED_LESS else 1.01)
    assert error(ours, theirs) <= 1e-2 or error(ours, exact) <= most
    top = theirs.topk(2, -1).values
    certain = top[:, 0] - top[:, 1] > 4 * (ours - theirs).abs().max(-1).values
    assert certain.sum() > 200  # the comparison covers enough tokens
    assert torch.equal(ours.argmax(-1)[certain], theirs.argmax(-1)[certain])


@pytest.mark.parametrize(
    "name", ["qwen2 with windows", "qwen3", *IN_FLOAT32, "qwen3.5", "gpt bigcode", "gemma 3", "mpt with six heads"]
)
def test_float32_is_transformers(name, checkpoint):
    """The error is tiny, and the engine's tokens are the most likely ones of transformers."""
    folder = checkpoint(name)
    found = run(folder, "float32")
    right = reference(folder, found, torch.float32)
    bound = 3e-5 if name.startswith("gemma 4") else 1e-5
    assert error(torch.cat([logprobs for _, logprobs in found]), torch.cat(right)) <= bound
    for (tokens, _), theirs, length in zip(found, right, LENGTHS, strict=True):
        assert theirs[length - 1 :].argmax(-1).tolist() == tokens[length:]


ONE_OF_EACH = list({family: name for name, (family, _) in MODELS.items()}.values())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_family_has_one_set_of_bits(name, checkpoint):
    """The check at boot and `preheat verify`: batches, arrivals, chunks, prefix hits, preemption and compaction."""
    settings = Settings.load({
        "model": str(checkpoint(name)), "device": DEVICE, "skip_tokenizer_init": True, "max_num_seqs": 32,
        "max_num_batched_tokens": 256, "max_model_len": LENGTH, "num_gpu_blocks_override": 400,
    })  # fmt: skip

    def prompts(engine: Engine) -> list[Prompt]:
        return make_prompts(REDUCED, engine.vocab_size, engine.ready.max_model_len)

    asked = Verification(boot_engine, settings, prompts, REDUCED)
    results = list(asked.results())
    assert asked.verdict(results).ok, [str(result.first) for result in results]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral with window", {"sliding_window": None}),
        ("llama tied", {"rms_norm_eps": 0.1}),
        ("llama 3.1", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    ],
)
def test_the_comparison_can_fail(name, change, checkpoint):
    """Transformers differs from itself with a wrong configuration."""
    folder = checkpoint(name)
    chance = random.Random(5)
    tokens: Found = [([chance.randrange(VOCAB) for _ in range(LENGTHS[-1])], torch.empty(0))]
    right = reference(folder, tokens, torch.bfloat16)[0]
    wrong = reference(folder, tokens, torch.bfloat16, **change)[0]
    assert error(wrong, right) > 2e-2
