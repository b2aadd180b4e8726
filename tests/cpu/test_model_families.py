"""Every family against Hugging Face transformers: the whole decoder, through our loader, at every position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base.attention import Attend
from preheat.backends.cpu.backend import CpuBackend
from preheat.errors import ModelError
from preheat.model.decoder import Attended, Decoder
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.loader import Reading, load_weights
from preheat.model.recurrence_specs import DeltaSpec
from preheat.ops.delta import DeltaRows, DeltaStates, delta_rule
from preheat.ops.embedding import embed
from preheat.ops.gate import gated
from preheat.ops.rotary import apply_rope_
from tests import qwen_vl
from tests.cpu.checkpoints import MODELS, YARN_ROPE, save_checkpoint, save_mistral3

TOKENS = 90


def open_decoder(folder: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> Decoder:
    spec = read_spec(read_config(folder))
    return Decoder(spec, load_weights(spec, folder, dtype, CpuBackend(), Reading(load_format)), 256)


def turn(decoder: Decoder, layer: int, qkv: Tensor) -> None:
    """Norm and rotate queries and keys in place, for positions from 0 on."""
    spec, norm = decoder.spec.layers[layer].attention, decoder.weights.layers[layer].attention.qk_norm
    turned = qkv[:, : spec.num_heads + spec.num_kv_heads * (getattr(spec, "source", None) is None)]
    if norm is not None:
        turned.copy_(norm(turned))
    rope = decoder.ropes[layer]
    if rope is not None:
        turned = turned[..., spec.head_dim - spec.rope_dim :]
        apply_rope_(turned, *rope[: len(qkv)].unbind(1))
    if (factors := decoder.growth[layer]) is not None:
        qkv[:, : spec.num_heads].mul_(factors[: len(qkv), None, None])


def dense_attention(decoder: Decoder) -> Attend:
    """Attend among the step's own tokens, a single sequence from position 0 on."""
    kept = dict[int, tuple[Tensor, Tensor]]()

    def attend(layer: int, qkv: Tensor) -> Tensor:
        spec, weights = decoder.spec.layers[layer].attention, decoder.weights.layers[layer].attention
        if isinstance(spec, DeltaSpec):
            rows = DeltaRows(*(np.array([each]) for each in (0, 0, len(qkv))), spec.value.taps, qkv.device)
            states = DeltaStates.of(spec.value, 1, qkv.dtype, qkv.device)
            return delta_rule(qkv.flatten(1), torch.tensor([True]), rows, weights.delta, states)
        turn(decoder, layer, qkv)
        sizes = [spec.num_heads, *[spec.num_kv_heads] * spec.kv.sides * (spec.source is None)]
        qkv, gates = qkv.tensor_split([sum(sizes)], 1)
        q, *kv = (part.transpose(0, 1) for part in qkv.split(sizes, dim=1))
        k, v = kept[layer] = kept[spec.source] if spec.source is not None else (kv[0], kv[-1])
        position = torch.arange(len(qkv))
        seen = position <= position[:, None]
        if window := spec.window:
            seen = seen & (position > position[:, None] - window)
        bias = torch.zeros(spec.num_heads, len(qkv), len(qkv)).masked_fill(~seen, -torch.inf)
        if (slopes := decoder.alibi[layer]) is not None:
            bias += slopes[:, None, None] * (position - position[:, None])
        bias = bias.to(q.dtype)
        if (sinks := decoder.weights.layers[layer].attention.sinks) is not None:
            k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
            bias = torch.cat((bias, sinks[:, None, None].expand(-1, len(qkv), 1)), 2)
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=bias, enable_gqa=True, scale=spec.scale
        )
        found = out[0].transpose(0, 1).reshape(len(qkv), -1)
        return gated(found, gates.flatten(1)) if spec.gated else found

    return attend


@torch.inference_mode()
def logits_of(decoder: Decoder, tokens: Tensor, attend: Attend | None = None) -> Tensor:
    weights = decoder.weights
    residual = embed(
        tokens, weights.embedding, scale=decoder.spec.embedding.scale, positions=weights.positions,
        at=torch.arange(len(tokens)),
    )  # fmt: skip
    inputs, last = None, None
    if weights.inputs is not None and decoder.spec.inputs is not None:
        inputs = weights.inputs(residual, embed(tokens, weights.inputs.table, scale=decoder.spec.inputs.table.scale))
        last = inputs[:, -1]
    out = decoder.layers(residual, attend or dense_attention(decoder), inputs=inputs)
    return decoder.weights.head(decoder.finish(Attended(out, residual, last))).float()


def error_at_each_position(got: Tensor, right: Tensor) -> Tensor:
    return (got - right).norm(dim=-1) / right.norm(dim=-1)


def random_tokens(count: int = TOKENS) -> Tensor:
    return torch.randint(199, (count,), generator=torch.Generator().manual_seed(5))


WITH_STATES = 3e-5
"""Bound of experts behind states, which carry rounding from token to token.

transformers in float32 is itself up to 2e-5 from its results in float64, by the processor.
"""
BOUNDS = {"gemma 4": 3e-5, "gemma 4 with experts": 3e-5}
"""Bounds of families with large scores, which no root of the head's size divides."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, tmp_path):
    reference = save_checkpoint(MODELS[name], tmp_path)
    tokens = random_tokens()
    got, right = logits_of(open_decoder(tmp_path), tokens), reference(tokens)
    assert got.dtype == torch.float32
    bound = BOUNDS.get(name, 1e-5)
    assert error_at_each_position(got, right).max() <= bound
    assert error_at_each_position(logits_of(open_decoder(tmp_path), tokens[:1]), right[:1]).max() <= bound


def test_the_text_part_of_mistral_3(tmp_path):
    reference, tokens = save_mistral3(tmp_path), random_tokens() % 198
    assert error_at_each_position(logits_of(open_decoder(tmp_path), tokens), reference(tokens)).max() <= 1e-5


def test_a_text_for_qwen3_vl(tmp_path):
    reference, tokens = qwen_vl.save_text(tmp_path), random_tokens() % 197
    assert error_at_each_position(logits_of(open_decoder(tmp_path), tokens), reference(tokens)).max() <= 1e-5


def test_the_comparison_can_fail(tmp_path):
    """Control: a window ignored, a bias dropped or rope not scaled is far outside of the tolerance."""
    for name, change in {
        "mistral with window": {"sliding_window": None},
        "llama 3.1": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "llama tied": {"rms_norm_eps": 1e-3},
        "gemma 3": {"query_pre_attn_scalar": 40},
        "gpt bigcode": {"scale_attn_weights": False},
        "ministral 3": {"rope_parameters": YARN_ROPE | {"original_max_position_embeddings": 16}},
        "smollm3": {"no_rope_layers": [1, 1, 1, 1]},
        "granite": {"residual_multiplier": 0.2},
        "cohere 2": {"logit_scale": 0.07},
        "gemma 4": {"final_logit_softcapping": 4.0},
        "mpt": {"attn_config": {"alibi_bias_max": 7}},
        "mpt with six heads": {"attn_config": {"softmax_scale": 0.3}},
        "phi3 with longrope": {"original_max_position_embeddings": 99},
        "granite 4 h": {"position_embedding_type": "rope"},
        "granite 4 h with experts": {"time_step_limit": [0.1, 0.7]},
    }.items():
        folder = tmp_path / name
        reference = save_checkpoint(MODELS[name], folder)
        spec = read_spec(read_config(folder) | change)
        decoder = Decoder(spec, load_weights(spec, folder, torch.float32, CpuBackend()), 256)
        assert error_at_each_position(logits_of(decoder, random_tokens()), reference(random_tokens())).max() > 1e-3


def test_alibi_of_another_maximum(tmp_path):
    """ALiBi with another maximum is right by the authors' formula.

    transformers reads the field but uses 8.
    """
    from transformers.models.mpt import modeling_mpt

    name, changes = MODELS["mpt with six heads"]
    model = name, {**changes, "attn_config": {"alibi_bias_max": 16}}
    reference = save_checkpoint(model, tmp_path)
    got, tokens = logits_of(open_decoder(tmp_path), random_tokens()), random_tokens()
    assert error_at_each_position(got, reference(tokens))[1:].min() > 1e-3
    build = modeling_mpt.build_mpt_alibi_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda heads, length, _, device: build(heads, length, 16))
        assert error_at_each_position(got, reference(tokens)).max() <= 1e-5


def test_longrope_goes_by_the_longest_sequence_that_may_come(tmp_path):
    """LongRoPE goes by the longest allowed sequence, while transformers goes by the current one.

    In transformers, a token's key changes once there are more than 8 tokens.
    """
    reference, tokens = save_checkpoint(MODELS["phi4 mini"], tmp_path), random_tokens(8)
    spec = read_spec(read_config(tmp_path))
    weights = load_weights(spec, tmp_path, torch.float32, CpuBackend())
    short, long = Decoder(spec, weights, 8), Decoder(spec, weights, 9)
    assert error_at_each_position(logits_of(short, tokens), reference(tokens)).max() <= 1e-5
    assert error_at_each_position(logits_of(long, tokens), reference(tokens)).max() > 1e-3
    right = reference(random_tokens(9))
    assert error_at_each_position(logits_of(long, random_tokens(9)), right).max() <= 1e-5


def test_buffers_of_old_bigcode_files_are_passed_over(tmp_path):
    from safetensors.torch import load_file, save_file

    save_checkpoint(MODELS["gpt bigcode"], tmp_path)
    path = tmp_path / "model.safetensors"
    before, tensors = logits_of(open_decoder(tmp_path), random_tokens()), load_file(path)
    more = {f"transformer.h.{i}.attn.{name}": torch.ones(1) for i in range(3) for name in ("bias", "masked_bias")}
    save_file(tensors | more, path)
    assert torch.equal(logits_of(open_decoder(tmp_path), random_tokens()), before)
    save_file(tensors | {"transformer.h.0.attn.other": torch.ones(1)}, path)
    with pytest.raises(ModelError, match=r"unknown tensors: transformer\.h\.0\.attn\.other"):
        open_decoder(tmp_path)


@pytest.mark.parametrize("name", ["llama tied", "qwen2", "qwen3"])
def test_sharded_checkpoints(name, tmp_path):
    reference = save_checkpoint(MODELS[name], tmp_path, shard="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    got = logits_of(open_decoder(tmp_path, load_format="safetensors"), random_tokens())
    assert error_at_each_position(got, reference(random_tokens())).max() <= 1e-5


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen2", "qwen3", "phi4 mini", "starcoder2", "gpt bigcode", "gemma 3", "mpt"]
)
def test_bfloat16_is_close(name, tmp_path):
    reference = save_checkpoint(MODELS[name], tmp_path)
    got = logits_of(open_decoder(tmp_path, torch.bfloat16), random_tokens())
    assert got.dtype == torch.float32
    assert error_at_each_position(got, reference(random_tokens())).max() < 0.05
