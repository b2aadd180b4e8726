"""Names shared by all steps: special tokens, the chat template and the work folder's files.

They live in one place because the corpus is rendered with the very template that the exported
tokenizer carries: what the model saw in training and what it is asked later cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BEGIN, END_OF_TEXT, PAD = "<|begin|>", "<|endoftext|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END_OF_TURN = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"

# The position in this list is the token's id.
SPECIAL_TOKENS = [BEGIN, END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT, END_OF_TURN]
TOKEN_ID = {token: index for index, token in enumerate(SPECIAL_TOKENS)}

VOCAB_SIZE = 4096
CONTEXT = 2048
SEED = 20240511

# Unknown roles (a tool's answer, say) are shown to the model as the user's words: it was trained
# on three roles only, and a refusal would be less useful than a plain reading.
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


@dataclass(frozen=True)
class WorkFolder:
    """Where each step leaves what the next one reads."""

    root: Path

    @property
    def documents(self) -> Path:
        return self.root / "documents.jsonl"

    @property
    def encoded(self) -> Path:
        """Everything that training needs, in a folder of its own that is easy to copy."""
        return self.root / "encoded"

    @property
    def tokenizer(self) -> Path:
        return self.encoded / "tokenizer.json"

    @property
    def train_tokens(self) -> Path:
        return self.encoded / "train.npy"

    @property
    def manifest(self) -> Path:
        return self.encoded / "manifest.json"

    def heldout_tokens(self, kind: str) -> Path:
        return self.encoded / f"heldout_{kind}.npy"
