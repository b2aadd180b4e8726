"""Encoders on the CUDA backend, with kernels in the interpreter: near the CPU's vectors, and bits of a text alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat import LLM, ModelError, llm
from preheat.backends.cuda.attention.work import prefill_tiles
from tests.encoders import save_encoder
from tests.kernels.backend import InterpretedCuda, boot_on

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 90,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "NomicBert": {**SIZES, "head_dim": 16},
    "ModernBert": {**SIZES, "num_hidden_layers": 2, "local_attention": 8, "global_attn_every_n_layers": 2,
                   "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_num_seqs": 3, "block_size": 16,
    "max_num_batched_tokens": 96, "num_gpu_blocks_override": 24, "pooler_config": {"pooling_type": "MEAN"},
    "max_model_len": 80, "skip_warmup": True, "boot_check": "off",
}  # fmt: skip
TEXTS = [random.Random(length).choices(range(5, 99), k=length) for length in (1, 70, 17, 2)]


def vectors(engine: LLM, texts: list[list[int]]) -> list[np.ndarray]:
    outputs = engine.encode([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False)
    return [output.outputs.data for output in outputs]


@pytest.mark.filterwarnings("ignore")  # warnings of the library that writes the checkpoint
@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_has_the_vectors_of_the_cpu(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are close to the CPU's; the comparison of bits sees tiles without the keys behind them."""
    save_encoder(family, tmp_path, **FAMILIES[family])
    right = vectors(LLM(str(tmp_path), device="cpu", execution_mode="eager", **OPTIONS), TEXTS)
    monkeypatch.setattr(llm, "boot_engine", boot_on(InterpretedCuda()))
    engine = LLM(str(tmp_path), **OPTIONS)
    together = vectors(engine, TEXTS)
    assert all(np.allclose(one, other, atol=2e-5) for one, other in zip(together, right, strict=True))
    assert [each.tobytes() for each in together] == [vectors(engine, [ids])[0].tobytes() for ids in TEXTS]
    causal = "preheat.backends.cuda.attention.layers.prefill_tiles"
    monkeypatch.setattr(causal, lambda *step, sides: prefill_tiles(*step, sides=False))
    assert not np.allclose(vectors(engine, TEXTS[1:2])[0], right[1], atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_biases_of_distances_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_encoder("MPNet", tmp_path, **SIZES)
    monkeypatch.setattr(llm, "boot_engine", boot_on(InterpretedCuda()))
    with pytest.raises(ModelError, match="biases of attention by distance"):
        LLM(str(tmp_path), **OPTIONS)
