"""Shared parts of several steps: special tokens, the chat template, sizes and the work folder's files.

The corpus is rendered with the template that the exported tokenizer carries, so that training and use cannot differ.
"""

from __future__ import annotations

from pathlib import Path

import jinja2

BEGIN, END_OF_TEXT, PAD, END_OF_TURN = "<|begin|>", "<|endoftext|>", "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [BEGIN, END_OF_TEXT, PAD, "<|system|>", "<|user|>", "<|assistant|>", END_OF_TURN]
TOKEN_ID = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
ENDING_IDS = [TOKEN_ID[END_OF_TEXT], TOKEN_ID[END_OF_TURN]]

VOCAB_SIZE, CONTEXT, SEED = 4096, 2048, 20240511

# Unknown roles (a tool's answer, say) are shown as the user's words: the model was trained on three roles only, and a
# refusal would be less useful than a plain reading.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ('system', 'developer') %}{{ '<|system|>\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}"
    "{% else %}{{ '<|user|>\\n' }}{% endif %}"
    "{{ message['content'] | trim }}{{ '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def render_chat(messages: list[dict[str, str]], begin: str = "", *, ask: bool = False) -> str:
    """Return the conversation as the model sees it.

    ``ask`` adds the opening of an answer.
    """
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    return template.render(messages=messages, bos_token=begin, add_generation_prompt=ask)


class WorkFolder:
    """Files of each step, for the next step to read.

    ``encoded`` holds all inputs of the training.
    """

    def __init__(self, root: Path) -> None:
        self.documents = root / "documents.jsonl"
        self.encoded = root / "encoded"
        self.tokenizer = self.encoded / "tokenizer.json"
        self.train_tokens = self.encoded / "train.npy"
        self.manifest = self.encoded / "manifest.json"
        self.encoded.mkdir(parents=True, exist_ok=True)

    def heldout_tokens(self, kind: str) -> Path:
        return self.encoded / f"heldout_{kind}.npy"
