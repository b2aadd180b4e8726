"""Encoders on a GPU: the same bits alone and among others, close to the hidden states of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat import LLM
from preheat.backends.cuda.attention.work import prefill_tiles
from preheat.warmup.record import Record
from tests.encoders import save_encoder, states_of, texts_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the library that writes the checkpoints

OPTIONS: dict[str, Any] = {
    "device": "cuda", "skip_tokenizer_init": True, "max_num_seqs": 8, "max_num_batched_tokens": 600,
    "num_gpu_blocks_override": 120, "pooler_config": {"pooling_type": "MEAN"}, "boot_check": "off",
}  # fmt: skip
TEXTS = texts_of(1, 2, 64, 65, 128, 129, 299, 17, 300)
"""Texts on both sides of the edges of tiles."""


def vectors(llm: LLM, texts: list[list[int]]) -> list[np.ndarray]:
    outputs = llm.encode([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False)
    return [output.outputs.data for output in outputs]


@pytest.mark.parametrize("family", ["Bert", "NomicBert", "ModernBert"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bits_of_a_text_alone(family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, in another order, in another engine; nothing is cold; the comparison sees a wrong end."""
    model = save_encoder(family, tmp_path)
    warm = {"skip_warmup": False, "boot_check": "full", "on_cold": "raise", "dtype": dtype}
    llm = LLM(str(tmp_path), **OPTIONS | warm)
    alone = [vectors(llm, [ids])[0] for ids in TEXTS]
    for ids, found in zip(TEXTS, alone, strict=True):
        right = states_of(model, ids).mean(0).numpy()
        cosine = float(found @ (right / np.linalg.norm(right)))
        assert cosine > (0.99999 if dtype == "float32" else 0.995), (len(ids), cosine)
    bits = [each.tobytes() for each in alone]
    assert [each.tobytes() for each in vectors(llm, TEXTS)] == bits
    assert [each.tobytes() for each in vectors(llm, TEXTS[::-1])][::-1] == bits
    record = Record.from_json(llm.loop.listener.report())
    assert not any(record.cold.values()), record.events
    other = LLM(str(tmp_path), enforce_eager=True, skip_warmup=True, dtype=dtype, **OPTIONS)
    assert [each.tobytes() for each in vectors(other, TEXTS)] == bits
    causal = "preheat.backends.cuda.attention.layers.prefill_tiles"
    monkeypatch.setattr(causal, lambda *step, sides: prefill_tiles(*step, sides=False))
    assert [each.tobytes() for each in vectors(other, TEXTS)] != bits
