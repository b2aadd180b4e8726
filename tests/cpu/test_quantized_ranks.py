"""Quantized layers that ranks share.

One, two and four ranks give the same bits, and planted faults are seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat import LLM
from preheat.backends.base.collective import Collective
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import ModelError
from preheat.model import shard as shards
from preheat.model.decoder import Decoder
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.loader import load_weights
from preheat.model.shard import shard
from tests.cpu.checkpoints import save_checkpoint
from tests.cpu.quantized import Kind, awq, compressed, fp4, fp8, gptq, inputs_of, quantize_checkpoint, scheme, symmetric
from tests.cpu.test_model_families import error_at_each_position, logits_of, open_decoder, random_tokens
from tests.cpu.test_tensor_parallel import OPTIONS, TOKENS, Wrapped, answers, on_ranks, record_of, same

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries that write the checkpoints

SIZES = {"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 256}
MODEL = ("Llama", SIZES)
BLOCKS = ("Llama", {**SIZES, "intermediate_size": 512, "head_dim": 128})
MOE = ("Qwen3Moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128})

GROUP = {"group_size": 32}
KINDS: dict[str, tuple[Any, Kind]] = {
    "fp8": (MODEL, fp8()),
    "fp8, static": (MODEL, fp8(static=True)),
    "fp8, block": (BLOCKS, fp8(block=True)),
    "channel": (MODEL, compressed("float-quantized", scheme(8, "float", "channel", inputs_of("token")))),
    "weights only": (MODEL, compressed("float-quantized", scheme(8, "float", "channel"))),
    "int4": (MODEL, compressed("pack-quantized", scheme(4, "int", "group", **GROUP, symmetric=False))),
    "int8": (MODEL, compressed("pack-quantized", scheme(8, "int", "channel"))),
    "awq": (MODEL, awq()),
    "gptq": (MODEL, gptq()),
    "gptq, desc_act": (MODEL, gptq(desc_act=True)),
    "gptq, symmetric": (MODEL, symmetric(4, 8, sym=True)),
    "experts, fp8": (MOE, fp8()),
    "experts, awq": (MOE, awq()),
    "experts, nvfp4": (MOE, fp4("nvfp4-pack-quantized")),
}


def made(folder: Path, name: str) -> Path:
    model, kind = KINDS[name]
    save_checkpoint(model, folder / "plain")
    quantize_checkpoint(folder / "plain", kind, folder / "quantized")
    return folder / "quantized"


def logits_on(collective: Collective, model: Path, asked: str | None = None) -> Tensor:
    spec = read_spec(read_config(model), asked)
    weights = load_weights(spec, model, torch.float32, CpuBackend(), collective=collective)
    return logits_of(Decoder(shard(spec, collective.rank, collective.world), weights, 256), random_tokens(TOKENS))


def on_sizes(model: Path, folder: Path, asked: str | None = None, wrap: Any = lambda c: c) -> list[Tensor]:
    """Return the logits on 1, 2 and 4 ranks, and assert that all ranks of a size agree."""
    found = []
    for world in (1, 2, 4):
        ranks = on_ranks(world, folder / str(world), lambda c: logits_on(wrap(c), model, asked))
        assert same(ranks)
        found.append(ranks[0])
    return found


@pytest.mark.parametrize("name", KINDS)
def test_bits_do_not_depend_on_the_number_of_ranks(name: str, tmp_path: Path) -> None:
    """Bits are equal on all sizes, and near the unshared layers.

    The order of sums and the rounding of codes may differ.
    """
    model = made(tmp_path, name)
    found = on_sizes(model, tmp_path / "ranks")
    assert same(found)
    whole = logits_of(open_decoder(model), random_tokens(TOKENS))
    error = error_at_each_position(found[0], whole)
    assert error.median() <= (2e-2 if KINDS[name][1].inputs else 1e-5)


def test_weights_that_are_rounded_while_loading(tmp_path: Path) -> None:
    save_checkpoint(MODEL, tmp_path / "plain")
    assert same(on_sizes(tmp_path / "plain", tmp_path / "ranks", "fp8"))


class OwnMaxima(Wrapped):
    """Plant a rank with scales of only its own inputs."""

    def gather(self, x: Tensor) -> Tensor:
        found = super().gather(x)
        return found[self.rank].expand_as(found) if x.shape[1] == 1 else found


@pytest.mark.parametrize("name", ["fp8", "experts, fp8"])
def test_scales_of_a_ranks_own_inputs_are_seen(name: str, tmp_path: Path) -> None:
    model = made(tmp_path, name)
    assert same(on_sizes(model, tmp_path / "all", wrap=Wrapped))
    assert not same(on_sizes(model, tmp_path / "own", wrap=OwnMaxima))


@pytest.mark.parametrize("name", ["fp8", "fp8, block", "awq"])
def test_a_tree_that_follows_the_number_of_ranks_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(tmp_path, name)
    monkeypatch.setattr(shards, "k_splits_of", lambda world: world)
    assert not same(on_sizes(model, tmp_path / "follows"))


def test_groups_that_cross_the_border_of_a_k_split_are_named(tmp_path: Path) -> None:
    save_checkpoint(("Llama", {**SIZES, "intermediate_size": 160}), tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", awq(), tmp_path / "quantized")
    spec = read_spec(read_config(tmp_path / "quantized"))
    with pytest.raises(ModelError, match=r"shared by 32 of the model's 160 inputs of model.layers.0.mlp.down_proj"):
        shard(spec, 0, 2)


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_an_engine_of_two_ranks_has_the_answers_of_one(options: dict[str, str]) -> None:
    one, two = LLM(tp_invariant=True, **OPTIONS, **options), LLM(tensor_parallel_size=2, **OPTIONS, **options)
    try:
        first, second = record_of(one), record_of(two)
        assert first.proof.digest == second.proof.digest and len(first.proof.digest) == 32
        assert first.proof.parts["numerics"] == second.proof.parts["numerics"]
        assert second.invariant and not second.unproved()
        assert answers(one) == answers(two)
    finally:
        two.loop.executor.ranks.close()


def test_ranks_exchange_alike_in_a_whole_warm_up(tmp_path: Path) -> None:
    """Ranks exchange the scales of activations for each chosen expert, so they must choose the same ones.

    Warm-up draws from states that no forward call gave. A rank with other states chose other experts, and the next step
    had other logits, or waited for ever.
    """
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "float32", "hidden_size": 128,
        "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 320, "max_position_embeddings": 512, "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic",
            "ignored_layers": ["lm_head", "block_sparse_moe.gate"],
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = LLM(
        str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=4, block_size=16,
        max_num_batched_tokens=64, max_model_len=64, num_threads=1, kv_cache_memory_bytes=1 << 24, boot_check="quick",
        tensor_parallel_size=2, determinism_warmup_iterations=0, cache_dir="off", skip_warmup=False,
    )  # fmt: skip
    try:
        checks = {each.shape["name"]: each.outcome for each in record_of(model).entries if each.kind == "check"}
        assert checks["later run"] == "ready"
    finally:
        model.loop.executor.ranks.close()
