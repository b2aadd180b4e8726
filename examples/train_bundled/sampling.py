"""Greedy continuations, to show in the model card what the model says."""

from __future__ import annotations

from pathlib import Path

import jinja2
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from .layout import BEGIN, CHAT_TEMPLATE, CONTEXT, END_OF_TEXT, END_OF_TURN, TOKEN_ID
from .model import CausalLM, LlamaShape

ENDINGS = {TOKEN_ID[END_OF_TEXT], TOKEN_ID[END_OF_TURN]}


def load_model(weights: Path) -> CausalLM:
    """The stored model in float32, ready to be asked."""
    model = CausalLM(LlamaShape())
    model.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    return model.eval()


@torch.no_grad()
def continue_ids(model: CausalLM, ids: list[int], limit: int) -> list[int]:
    """The likeliest next tokens, up to and without an ending token.

    Every step reads the whole text again: it is a check, not an engine.
    """
    ids = list(ids)
    start = len(ids)
    while len(ids) < min(start + limit, CONTEXT):
        logits = model(torch.tensor([ids]))[0, -1]
        token = int(logits.argmax())
        if token in ENDINGS:
            break
        ids.append(token)
    return ids[start:]


def complete(model: CausalLM, tokenizer: Tokenizer, prompt: str, limit: int = 60) -> str:
    """Continue plain text; the tokenizer itself puts the opening token in front."""
    return tokenizer.decode(continue_ids(model, tokenizer.encode(prompt).ids, limit))


def answer(model: CausalLM, tokenizer: Tokenizer, question: str, limit: int = 120) -> str:
    """Answer one question in the chat format."""
    prompt = (
        jinja2.Environment()
        .from_string(CHAT_TEMPLATE)
        .render(
            messages=[{"role": "user", "content": question}],
            bos_token=BEGIN,
            add_generation_prompt=True,
        )
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    return tokenizer.decode(continue_ids(model, ids, limit))
