"""A preempted and recomputed sequence has its bits without preemption, query norm and rope included."""

from __future__ import annotations

import json

import pytest

from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.verify.compare import compare
from preheat.verify.drive import Engine, in_groups
from preheat.verify.prompts import with_settings
from tests.cpu import planted

pytestmark = pytest.mark.usefixtures("eager")  # faults are planted in operations of torch

OUTPUTS = 24
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip


def differing(folder) -> int:
    """Return how many requests have other logits when preempted than alone."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    common = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "skip_warmup": True,
        "boot_check": "off", "block_size": 16, "max_model_len": 96, "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
    }  # fmt: skip
    prompts = with_settings([[(7 * i + j) % 300 for j in range(20 + 5 * i)] for i in range(6)], OUTPUTS)
    alone = Engine(boot_engine, Settings.load(common | {"max_num_seqs": 1}))
    expected = alone.run(prompts, in_groups([1] * len(prompts)))
    assert alone.stats.preemptions == 0
    tight = Engine(boot_engine, Settings.load(common | {"max_num_seqs": 6, "num_gpu_blocks_override": 14}))
    result = compare("resumed", expected, [tight.run(prompts)])
    assert tight.stats.preemptions > 1
    return result.prompts - result.identical


def test_a_resumed_row_is_computed_as_the_first_time(tmp_path):
    assert differing(tmp_path) == 0


@pytest.mark.parametrize("part", ["rope", "norm"])
def test_a_resumed_row_that_is_computed_otherwise_is_found(tmp_path, monkeypatch, part):
    planted.resumed(monkeypatch, part)
    assert differing(tmp_path) > 0
