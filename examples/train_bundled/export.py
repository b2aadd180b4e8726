"""Writes the checkpoint folder: weights, configuration, tokenizer, license and model card (``card.md``, filled in)."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from .common import (
    BEGIN,
    CHAT_TEMPLATE,
    CONTEXT,
    END_OF_TEXT,
    ENDING_IDS,
    PAD,
    TOKEN_ID,
    VOCAB_SIZE,
    WorkFolder,
    render_chat,
)
from .corpus import HELDOUT_ONE_IN
from .model import CausalLM, LlamaShape

TOKEN_IDS = {"bos_token_id": TOKEN_ID[BEGIN], "eos_token_id": ENDING_IDS, "pad_token_id": TOKEN_ID[PAD]}
CONFIG = {
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
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BEGIN,
    "eos_token": END_OF_TEXT,
    "pad_token": PAD,
    "model_max_length": CONTEXT,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}

PROMPTS = ["def add(a, b):", "def fibonacci(n):", "for i in range(", "Return the", "If the optional argument"]
QUESTIONS = [
    "Hello!",
    "Write a function to reverse a string.",
    "How do I read a file?",
    "What does os.path.join do?",
]
SAMPLE_TOKENS = 64


@torch.no_grad()
def continue_ids(model: CausalLM, ids: list[int], limit: int) -> list[int]:
    """Return the likeliest next tokens, up to and without an ending token.

    Every step reads the whole text again.
    """
    found: list[int] = []
    while len(found) < limit and len(ids) + len(found) < CONTEXT:
        token = int(model(torch.tensor([ids + found]))[0, -1].argmax())
        if token in ENDING_IDS:
            break
        found.append(token)
    return found


def samples(model: CausalLM, tokenizer: Tokenizer) -> str:
    """Return greedy continuations of the prompts and answers to the questions, as fenced blocks."""

    def fenced(title: str, begin: str, ids: list[int]) -> str:
        text = begin + tokenizer.decode(continue_ids(model, ids, SAMPLE_TOKENS))
        return f"{title}\n\n````text\n{text.rstrip()}\n````"  # four backticks: answers hold fences of three

    parts = [fenced(f"`{prompt}`", prompt, tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    for question in QUESTIONS:
        asked = render_chat([{"role": "user", "content": question}], BEGIN, ask=True)
        parts.append(fenced(f'Chat: "{question}"', "", tokenizer.encode(asked, add_special_tokens=False).ids))
    return "\n\n".join(parts)


def card(metrics: dict[str, Any], manifest: dict[str, Any], shown: str) -> str:
    """Return the model card's text, with the samples ``shown``."""
    train_rows = [
        f"| {kind} | {entry['files']:,} | {entry['bytes']:,} | {entry['tokens']:,} | {entry['repeats']} |"
        for kind, entry in manifest["train"].items()
    ]
    held = dict(manifest["heldout"])
    held["all"] = {"files": "", "bytes": sum(entry["bytes"] for entry in held.values())}
    heldout_rows = [
        f"| {kind} | {entry['files']} | {entry['bytes']:,} "
        f"| {metrics['heldout'][kind]['nats_per_token']:.3f} | {metrics['heldout'][kind]['bits_per_byte']:.3f} |"
        for kind, entry in held.items()
    ]
    values = {
        **metrics,
        "vocab": VOCAB_SIZE,
        "context": CONTEXT,
        "train_rows": "\n".join(train_rows),
        "heldout_rows": "\n".join(heldout_rows),
        "epochs": metrics["tokens_seen"] / metrics["tokens_per_epoch"],
        "one_in": HELDOUT_ONE_IN,
        "sample_tokens": SAMPLE_TOKENS,
        "samples": shown,
    }
    return Path(__file__).with_name("card.md").read_text(encoding="utf-8").format_map(values)


def export(work: WorkFolder, run: Path, licence: Path, out: Path) -> None:
    """Fill ``out`` from a training run."""
    out.mkdir(parents=True, exist_ok=True)
    # Contents only: the permissions of a fresh safetensors file would not suit a package.
    (out / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    shutil.copyfile(work.tokenizer, out / "tokenizer.json")
    shutil.copyfile(licence, out / "LICENSE-PYTHON.txt")
    generation = {"do_sample": False, **TOKEN_IDS}
    configs = {"config": CONFIG, "generation_config": generation, "tokenizer_config": TOKENIZER_CONFIG}
    for name, value in configs.items():
        (out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    model = CausalLM(LlamaShape())
    model.load_state_dict({name: value.float() for name, value in load_file(out / "model.safetensors").items()})
    shown = samples(model.eval(), Tokenizer.from_file(str(out / "tokenizer.json")))
    metrics, manifest = (json.loads(path.read_text()) for path in (run / "metrics.json", work.manifest))
    (out / "README.md").write_text(card(metrics, manifest, shown), encoding="utf-8")
