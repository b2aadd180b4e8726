"""The tokenizer as transformers has it, for scripts that make prompts themselves; the engine uses its own."""

from __future__ import annotations

from typing import Any

from preheat.errors import InvalidRequest
from preheat.frontend.tokenizer import Tokenizer


def transformers_tokenizer(tokenizer: Tokenizer, template: str | None) -> Any:
    """Return transformers' tokenizer of the same files, with this chat template. Raises InvalidRequest."""
    if not tokenizer.speaks:
        raise InvalidRequest("there is no tokenizer: start without skip_tokenizer_init")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InvalidRequest("get_tokenizer returns transformers' tokenizer: pip install transformers") from error
    found = AutoTokenizer.from_pretrained(str(tokenizer.folder), local_files_only=True)
    if template is not None:
        found.chat_template = template
    return found
