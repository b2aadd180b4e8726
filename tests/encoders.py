"""Small random encoders, written by Hugging Face transformers, with its hidden states and logits as reference."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

SMALL: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 300,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "DistilBert": {"vocab_size": 199, "dim": 96, "hidden_dim": 160, "n_layers": 2, "n_heads": 4,
                   "max_position_embeddings": 300},
    "NomicBert": {**SMALL, "head_dim": 24},
    "MPNet": {**SMALL, "pad_token_id": 0},
    "ModernBert": {**SMALL, "num_hidden_layers": 4, "local_attention": 24, "pad_token_id": 0, "bos_token_id": 1,
                   "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}  # fmt: skip
"""Sizes of families with other names for them, and ids that may not matter."""

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 2, "skip_tokenizer_init": True, "max_num_seqs": 8,
    "block_size": 16, "num_gpu_blocks_override": 120, "skip_warmup": True, "boot_check": "off", "cache_dir": "off",
}  # fmt: skip


def save_encoder(family: str, folder: Path, head: str = "Model", **changes: Any) -> Any:
    """Write a random checkpoint of an encoder and return transformers' model."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}{head}")
    config = kind.config_class(**OWN.get(family, SMALL) | changes, attn_implementation="eager")
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            else:
                weight.normal_(mean=float("norm" in name.lower() and name.endswith("weight")), std=0.1)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def states_of(model: Any, ids: list[int]) -> Tensor:
    """Return float32 [tokens, hidden] of one text."""
    found: Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return found


def texts_of(*lengths: int) -> list[list[int]]:
    """Return random texts of these lengths, without the ids of special tokens."""
    chance = random.Random(5)
    return [[chance.randrange(5, 199) for _ in range(length)] for length in lengths]


def save_wordpiece(folder: Path) -> Any:
    """Write BERT's kind of tokenizer, of single letters, and return it as transformers has it."""
    import transformers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [f"{before}{letter}" for before in ("", "##") for letter in string.ascii_lowercase]
    words = {word: id for id, word in enumerate([*special, *letters, *".,?!", "cat", "mat", "sat", "the"])}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    ids = [(token, words[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.save_pretrained(folder)
    return tokenizer


@torch.inference_mode()
def logits_of(model: Any, tokenizer: Any, *texts: str, **options: Any) -> Tensor:
    """Return float32 [classes] of a text, or of a pair of texts."""
    given = tokenizer(*texts, return_tensors="pt", return_token_type_ids=True, **options)
    names = ("input_ids", "token_type_ids") if model.config.model_type == "bert" else ("input_ids",)
    found: Tensor = model(**{name: given[name] for name in names}).logits[0]
    return found
