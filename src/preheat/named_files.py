"""The files that settings name beside the model, read as a boot reads them. A plan needs no boot, and reports them."""

from __future__ import annotations

from pathlib import Path

from preheat.configs.adapters import lora_modules
from preheat.errors import AdapterError, SettingsError
from preheat.frontend.chat_template import read_override
from preheat.frontend.tokenizer import ModelFiles, Tokenizer
from preheat.lora.config import AdapterConfig
from preheat.model.files import find_tokenizer
from preheat.settings import Settings
from preheat.utils.files import why_unread


def check_named_files(settings: Settings, files: ModelFiles) -> None:
    """Read the tokenizer, the chat template and the adapters' configs that ``settings`` name.

    Raises the error of a boot for the first one that cannot be read.
    """
    if settings.tokenizer is not None and not settings.skip_tokenizer_init:
        Tokenizer(find_tokenizer(settings), files)
    if settings.chat_template is not None:
        read_override(settings.chat_template)
    for module in lora_modules(settings.lora_modules):
        try:
            AdapterConfig.read(Path(module.path))
        except (AdapterError, OSError) as error:
            text = f"lora_modules: adapter {module.name!r} in {module.path}: {why_unread(error)}"
            raise SettingsError(text, param="lora_modules") from error
