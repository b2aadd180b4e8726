"""Prompts of embeddings on a GPU, in graphs: rows of the table give the bits of their tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from preheat import LLM, SamplingParams
from preheat.warmup.record import Record
from tests.cuda.test_engine import CONFIG

OPTIONS: dict[str, Any] = {
    "device": "cuda", "load_format": "dummy", "max_model_len": 320, "max_num_seqs": 4, "max_num_batched_tokens": 128,
    "block_size": 16, "num_gpu_blocks_override": 80, "skip_tokenizer_init": True, "skip_warmup": False, "seed": 0,
    "enable_prompt_embeds": True,
}  # fmt: skip
PROMPTS = [[(31 * i + 7 * j) % 300 for j in range(length)] for i, length in enumerate((1, 5, 64, 65, 130, 200))]
PARAMS = [
    SamplingParams(temperature=0.9 * (place % 2), seed=place, max_tokens=6, ignore_eos=True, logprobs=5)
    for place in range(len(PROMPTS))
]


def seen(outputs: list[Any]) -> list[Any]:
    return [(choice.token_ids, choice.logprobs) for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}], ids=["", "chunks"])
def test_rows_of_the_table_are_tokens(more, tmp_path):
    """The first request already has them, and finds nothing cold; the check at boot has embeddings, too."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(str(tmp_path), **OPTIONS | more, on_cold="raise")
    table = llm.loop.executor.decoder.weights.embedding
    embeds = [{"prompt_embeds": table[torch.tensor(ids, device=table.device)]} for ids in PROMPTS]
    first = seen(llm.generate(embeds, PARAMS, use_tqdm=False))
    assert first == seen(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert first == seen(llm.generate(embeds, PARAMS, use_tqdm=False))
    assert seen(llm.generate([*embeds[:3], *PROMPTS[3:]], PARAMS, use_tqdm=False)) == first
    record = Record.from_json(llm.loop.listener.report())
    assert not any(record.cold.values())
    checks = {str(each.shape["name"]): each.outcome for each in record.entries if each.kind == "check"}
    assert checks["embeds"] == checks["logprobs"] == "ready"
