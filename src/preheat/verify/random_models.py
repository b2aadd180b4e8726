"""Small models of random sizes, with random weights, for ``preheat verify --fuzz --random-models``. No torch here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HEAD_RATIOS = (1, 2, 3, 4, 5, 6, 7, 8)
HEAD_DIMS = (16, 24, 32, 40, 64, 80, 96, 128, 256)
POSITIONS = 1_024
WIDEST = 4_096
"""Numbers in all query heads of a token at most, so that a round takes seconds."""


def random_config(draw: random.Random) -> dict[str, Any]:
    """The ``config.json`` of a model whose sizes are drawn: head ratios, head sizes, widths that nothing divides,
    biases, norms, sliding windows.
    """
    family = draw.choice(FAMILIES)
    ratio, dim = draw.choice(HEAD_RATIOS), draw.choice(HEAD_DIMS)
    kv_heads = draw.choice([heads for heads in (1, 2, 3, 4) if heads * ratio * dim <= WIDEST])
    layers = draw.randint(1, 3)
    return {
        "architectures": [family],
        "model_type": family.removesuffix("ForCausalLM").lower(),
        "hidden_size": draw.choice((64, 96, draw.randrange(33, 400))),
        "intermediate_size": draw.choice((128, draw.randrange(33, 700))),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * ratio,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": draw.choice((256, draw.randrange(130, 3_000))),
        "max_position_embeddings": POSITIONS,
        "rope_theta": draw.choice((10_000.0, 1e6)),
        "tie_word_embeddings": draw.random() < 0.3,
        "attention_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.2,
        "use_sliding_window": True,
        "sliding_window": draw.choice((None, None, draw.randrange(1, 64), draw.randrange(64, 600))),
        "max_window_layers": draw.randint(0, layers),
        "torch_dtype": "float32",
    }


def write_model(folder: Path, draw: random.Random) -> dict[str, Any]:
    """Write a random config into ``folder``, for ``--load-format dummy``; returns it."""
    config = random_config(draw)
    (folder / "config.json").write_text(json.dumps(config))
    return config
