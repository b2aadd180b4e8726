"""Weights on a GPU: drawn there, or read from files by several threads, without a second copy."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from preheat.backends.cuda.backend import CudaBackend
from preheat.backends.cuda.device.upload import PIECE_BYTES, THREADS
from preheat.backends.cuda.matmul.layer import Layer
from preheat.model.families import read_spec
from preheat.model.formats import expected_tensors
from preheat.model.loader import Reading, load_weights

HIDDEN = 1024
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": HIDDEN,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 256,
}
SPEC = read_spec(CONFIG)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_files_arrive_as_they_are(stored, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(stored) for name, shape in expected_tensors(SPEC).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    weights = load_weights(SPEC, tmp_path, torch.bfloat16, CudaBackend())
    room = 2 * SPEC.num_params + THREADS * PIECE_BYTES
    assert torch.cuda.max_memory_allocated(device) - before <= 1.02 * room
    assert torch.equal(weights.embedding.cpu(), tensors["model.embed_tokens.weight"].to(torch.bfloat16))
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}"
        joined = torch.cat([tensors[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv"])
        assert isinstance(layer.attention.qkv, Layer)
        assert torch.equal(layer.attention.qkv.stored()[0].cpu(), joined.to(torch.bfloat16))
        assert torch.equal(layer.post_norm.weight.cpu(), tensors[f"{at}.post_attention_layernorm.weight"].bfloat16())


def test_drawn_weights_are_the_same_each_time(tmp_path):
    drawn = [
        load_weights(SPEC, tmp_path, torch.bfloat16, CudaBackend(), Reading("dummy", seed)).embedding
        for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert float(drawn[0].float().std()) == pytest.approx(HIDDEN**-0.5, rel=0.01)


def test_the_platform_reports_its_name_and_memory():
    cuda = CudaBackend()
    assert torch.cuda.get_device_name(0) in cuda.fingerprint
    torch.cuda.empty_cache()
    before = cuda.used_memory()
    kept = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    assert cuda.used_memory() - before >= len(kept)
    assert cuda.free_memory() > 0
