"""Every family against Hugging Face transformers: the whole decoder, through our loader, at every position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from preheat.backends.base import Attend
from preheat.backends.cpu.backend import CpuBackend
from preheat.model.decoder import Attended, Decoder
from preheat.model.families import read_spec
from preheat.model.files import read_config
from preheat.model.loader import load_weights
from preheat.ops.embedding import embed
from preheat.ops.rotary import apply_rope_
from tests.cpu.checkpoints import MODELS, save_checkpoint

TOKENS = 90


def open_decoder(folder: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> Decoder:
    spec = read_spec(read_config(folder))
    return Decoder(spec, load_weights(spec, folder, dtype, CpuBackend(), load_format=load_format), 256)


def turn(decoder: Decoder, layer: int, qkv: Tensor) -> None:
    """Norm and turn queries and keys in place, of positions from 0 on."""
    spec, norm = decoder.spec.layers[layer].attention, decoder.weights.layers[layer].attention.qk_norm
    turned = qkv[:, : spec.num_heads + spec.num_kv_heads]
    if norm is not None:
        turned.copy_(norm(turned))
    apply_rope_(turned, *decoder.ropes[layer][: len(qkv)].unbind(1))


def dense_attention(decoder: Decoder) -> Attend:
    """Attention among the step's own tokens, which are one sequence from position 0 on."""

    def attend(layer: int, qkv: Tensor) -> Tensor:
        turn(decoder, layer, qkv)
        spec = decoder.spec.layers[layer].attention
        q, k, v = (part.transpose(0, 1) for part in qkv.split([spec.num_heads, *[spec.num_kv_heads] * 2], dim=1))
        position = torch.arange(len(qkv))
        seen = position <= position[:, None]
        if window := spec.window:
            seen = seen & (position > position[:, None] - window)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(qkv), -1)

    return attend


@torch.inference_mode()
def logits_of(decoder: Decoder, tokens: Tensor, attend: Attend | None = None) -> Tensor:
    residual = embed(tokens, decoder.weights.embedding)
    out = decoder.layers(residual, attend or dense_attention(decoder))
    return decoder.weights.head(decoder.finish(Attended(out, residual))).float()


def error_at_each_position(got: Tensor, right: Tensor) -> Tensor:
    return (got - right).norm(dim=-1) / right.norm(dim=-1)


def random_tokens(count: int = TOKENS) -> Tensor:
    return torch.randint(199, (count,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    reference = save_checkpoint(MODELS[name], tmp_path)
    tokens = random_tokens()
    got, right = logits_of(open_decoder(tmp_path), tokens), reference(tokens)
    assert got.dtype == torch.float32
    assert error_at_each_position(got, right).max() <= 1e-5
    assert error_at_each_position(logits_of(open_decoder(tmp_path), tokens[:1]), right[:1]).max() <= 1e-5


def test_the_comparison_can_fail(tmp_path):
    """A window ignored, a bias dropped, rope not scaled: each is far outside of the tolerance."""
    for name, change in {
        "mistral with window": {"sliding_window": None},
        "llama 3.1": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "llama tied": {"rms_norm_eps": 1e-3},
    }.items():
        folder = tmp_path / name
        reference = save_checkpoint(MODELS[name], folder)
        spec = read_spec(read_config(folder) | change)
        decoder = Decoder(spec, load_weights(spec, folder, torch.float32, CpuBackend()), 256)
        assert error_at_each_position(logits_of(decoder, random_tokens()), reference(random_tokens())).max() > 1e-3


@pytest.mark.parametrize("name", ["llama tied", "qwen2", "qwen3"])
def test_sharded_checkpoints(name, tmp_path):
    reference = save_checkpoint(MODELS[name], tmp_path, shard="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    got = logits_of(open_decoder(tmp_path, load_format="safetensors"), random_tokens())
    assert error_at_each_position(got, reference(random_tokens())).max() <= 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_close(name, tmp_path):
    reference = save_checkpoint(MODELS[name], tmp_path)
    got = logits_of(open_decoder(tmp_path, torch.bfloat16), random_tokens())
    assert got.dtype == torch.float32
    assert error_at_each_position(got, reference(random_tokens())).max() < 0.05
