"""Routed experts on a CPU: both layouts of a checkpoint, and a token's bits whatever other tokens choose."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat import LLM, SamplingParams
from preheat.backends.cpu.backend import CpuBackend
from preheat.ops import moe
from preheat.ops.moe import combine, route
from preheat.ops.proof import noise
from preheat.ops.values import Routing
from tests import layers
from tests.cpu.checkpoints import MODELS, save_checkpoint
from tests.cpu.test_model_families import error_at_each_position, logits_of, open_decoder, random_tokens

HIDDEN, INNER, EXPERTS = 48, 40, 6
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=5, prompt_logprobs=5, ignore_eos=True)
BEHIND = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
"""The same answer behind a cached prefix: with log-probabilities of prompts all of a prompt is computed."""


def stacked(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Return the same checkpoint in the layout of transformers 5."""
    names = ("w1", "w3", "w2") if family == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if family == "Mixtral" else "mlp"
    layers = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
    found = {name.replace(f".{block}.gate.", ".mlp.gate."): t for name, t in tensors.items() if ".experts." not in name}
    for layer in layers:
        count = len([name for name in tensors if name.startswith(f"{layer}.experts.") and names[0] in name])
        gate, up, down = (
            torch.stack([tensors[f"{layer}.experts.{expert}.{name}.weight"] for expert in range(count)])
            for name in names
        )
        at = layer.replace(block, "mlp")
        found[f"{at}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        found[f"{at}.experts.down_proj"] = down
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe with dense layers"])
def test_the_stacked_layout_is_read_too(name, tmp_path):
    reference, file = save_checkpoint(MODELS[name], tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(".experts.0." in stored for stored in tensors)  # transformers writes the Hub's layout
    save_file(stacked(tensors, MODELS[name][0]), file)
    assert (
        error_at_each_position(logits_of(open_decoder(tmp_path), random_tokens()), reference(random_tokens())).max()
        <= 1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", [Routing(2, True, False), Routing(3, False, True)], ids=str)
def test_a_token_alone_and_among_others(routing, dtype):
    x, logits = noise(150, HIDDEN, seed=1).to(dtype), noise(150, EXPERTS, seed=2).to(dtype)
    weights = noise(EXPERTS, 2 * INNER, HIDDEN, seed=3).to(dtype), noise(EXPERTS, HIDDEN, INNER, seed=4).to(dtype)
    experts = layers.experts(CpuBackend(), *weights, routing)
    among = experts(x, logits)
    for rows in (1, 2, 7, 64, 65, 128):
        assert torch.equal(experts(x[-rows:], logits[-rows:]), among[-rows:])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
    assert torch.equal(experts(x[order], logits[order]), among[order])


def test_the_lowest_number_wins_a_tie():
    chosen, weights = route(torch.tensor([[0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]), Routing(2, True, False))
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert torch.equal(weights, torch.full((2, 2), 0.5))


def prompts() -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(199) for _ in range(length)] for length in (1, 5, 33, 64, 70, 17, 90, 2)]


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=128, block_size=16, max_num_seqs=16, dtype="float32",
        skip_warmup=False, on_cold="raise", execution_mode="eager", **options,
    )  # fmt: skip


def answers(llm: LLM, some: list[list[int]], params: SamplingParams = PARAMS) -> list[Any]:
    outputs = llm.generate(some, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    save_checkpoint(MODELS["qwen3 moe"], folder)
    return folder


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[Any]:
    llm = engine(checkpoint, enable_prefix_caching=False)
    return [answer for prompt in prompts() for answer in answers(llm, [prompt])]


def test_one_answer_alone_among_others_in_chunks_and_behind_a_prefix(checkpoint, alone):
    """Answers are equal alone, among others, in chunks and behind a prefix.

    A tail of one token after a full prefix hit runs in another batch than the cold prompt.
    """
    assert answers(engine(checkpoint, enable_prefix_caching=False, max_num_batched_tokens=24), prompts()) == alone
    llm = engine(checkpoint, enable_prefix_caching=True)
    assert answers(llm, prompts()) == alone
    again = answers(llm, prompts(), BEHIND)
    assert llm.loop.scheduler.stats().prefix_hits > 0
    assert [entry[:2] for entry in again] == [entry[:2] for entry in alone]


def test_a_combine_in_the_order_of_arrival_is_seen(checkpoint, alone, monkeypatch):
    """Control: experts added up in a varying order have other bits.

    The order depends on the number of tokens. The result is close.
    """

    def by_number(rows: Tensor, weights: Tensor) -> Tensor:
        order = torch.arange(rows.shape[1]).roll(len(rows) % rows.shape[1])  # depends on how many tokens there are
        return combine(rows[:, order], weights[:, order])

    monkeypatch.setattr(moe, "combine", by_number)
    llm = engine(checkpoint, enable_prefix_caching=False, boot_check="off")
    wrong = [answer for prompt in prompts() for answer in answers(llm, [prompt])]
    assert [entry[0] for entry in wrong] == [entry[0] for entry in alone]
    assert wrong != alone
