"""Writes the checkpoint folder: weights, configuration, tokenizer, licence and model card."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from . import card, sampling
from .layout import (
    BEGIN,
    CHAT_TEMPLATE,
    CONTEXT,
    END_OF_TEXT,
    END_OF_TURN,
    PAD,
    TOKEN_ID,
    WorkFolder,
)
from .model import LlamaShape

ENDING_IDS = [TOKEN_ID[END_OF_TEXT], TOKEN_ID[END_OF_TURN]]
TOKEN_IDS = {
    "bos_token_id": TOKEN_ID[BEGIN],
    "eos_token_id": ENDING_IDS,
    "pad_token_id": TOKEN_ID[PAD],
}


def model_config() -> dict[str, object]:
    """What ``LlamaForCausalLM`` reads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(LlamaShape()),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **TOKEN_IDS,
    }


def tokenizer_config() -> dict[str, object]:
    """What ``PreTrainedTokenizerFast`` reads beside ``tokenizer.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(work: WorkFolder, run: Path, which: str, licence: Path, out: Path) -> None:
    """Fill ``out`` from a training run; ``which`` names the checkpoint, best or last."""
    out.mkdir(parents=True, exist_ok=True)
    # Contents only: the permissions of a fresh safetensors file would not suit a package.
    (out / "model.safetensors").write_bytes((run / f"{which}.safetensors").read_bytes())
    shutil.copyfile(work.tokenizer, out / "tokenizer.json")
    shutil.copyfile(licence, out / "LICENSE-PYTHON.txt")
    _write_json(out / "config.json", model_config())
    _write_json(out / "generation_config.json", {"do_sample": False, **TOKEN_IDS})
    _write_json(out / "tokenizer_config.json", tokenizer_config())

    model = sampling.load_model(out / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    metrics = json.loads((run / "metrics.json").read_text())
    manifest = json.loads(work.manifest.read_text())
    text = card.render(metrics, which, manifest, card.collect_samples(model, tokenizer))
    (out / "README.md").write_text(text, encoding="utf-8")
