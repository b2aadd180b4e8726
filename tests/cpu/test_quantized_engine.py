"""The engine with quantized weights: one answer on every path, a planted fault found, formats told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common.quantized_checkpoint import quantize_checkpoint
from preheat.backends.cpu.backend import CpuBackend
from preheat.model.files import BUNDLED_PATH
from preheat.model.loader import load_model
from preheat.ops import quantization
from preheat.ops.quantization import activation_scales
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.compare import PathResult
from preheat.verify.prompts import Size, make_prompts
from preheat.verify.verification import Verification
from tests.cpu.test_quantized_layers import of_the_batch
from tests.cpu.test_verify import OPTIONS

TINY = Size(prompts=6, runs=2, outputs=6, longest=60)


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "max_position_embeddings": 2048,
    "torch_dtype": "float32", "mlp_only_layers": [0],
}  # fmt: skip


def verified(folder: Path) -> tuple[bool, list[PathResult]]:
    """Return the verdict and results of ``verify``.

    The model has a dense layer and a layer of experts, with random weights.
    """
    (folder / "config.json").write_text(json.dumps(MOE))
    model = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "quantization": "fp8"}

    def prompts(engine):
        return make_prompts(TINY, engine.vocab_size, engine.ready.max_model_len)

    run = Verification(boot_engine, Settings.load(OPTIONS | model), prompts, TINY)
    results = list(run.results())
    return run.verdict(results).ok, results


def test_float8_has_one_answer_on_every_path(tmp_path: Path) -> None:
    ok, results = verified(tmp_path)
    assert ok
    assert {result.share for result in results} == {"100.00 %"}


def test_a_scale_of_the_batch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "activation_scales", of_the_batch(activation_scales))
    ok, results = verified(tmp_path)
    assert not ok
    assert {result.path for result in results if result.first} >= {"shuffled arrivals", "chunks, few blocks"}


def test_the_key_tells_formats_and_scales_apart(tmp_path: Path) -> None:
    """One checkpoint's formats are told, and a single changed scale changes its digest."""
    from safetensors.torch import load_file, save_file

    def told(model: str, **options: str) -> object:
        numerics = load_model(Settings.load({"model": model, "dtype": "float32"} | options), CpuBackend()).numerics
        return numerics.get("weights")

    assert told("bundled") is None
    fp8 = told("bundled", quantization="fp8")
    model = str(quantize_checkpoint(BUNDLED_PATH, "int4-g128", tmp_path))
    first = told(model)
    assert first == told(model) != fp8
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.6.mlp.up_proj.weight_scale"][1000, 1] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    other = told(model)
    assert (other["bytes"], other["scales"] == first["scales"]) == (first["bytes"], False)
    assert json.dumps(other)
