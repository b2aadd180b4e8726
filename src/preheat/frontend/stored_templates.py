"""The chat templates in a checkpoint's files, found where transformers finds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preheat.errors import ModelError
from preheat.utils.files import read_json, read_text, why_unread

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: the template for every conversation, and the template for conversations with tools."""

FOLDER = "additional_chat_templates"

REPLACE = "correct it, or give another with --chat-template"


class StoredTemplate(NamedTuple):
    """A template, and the place where it was read, for messages."""

    source: str
    place: str


def stored_templates(
    folder: Path, config: Mapping[str, Any], *, sees_images: bool = False
) -> dict[str, StoredTemplate]:
    """Return the chat templates in ``folder`` by name.

    ``config`` is the folder's tokenizer_config.json. The first place with a template counts. The order is the order of
    transformers' processor for a model that sees images, else of its tokenizer. Raises ModelError if a place holds
    something other than templates.
    """

    def of_config() -> dict[str, StoredTemplate]:
        return _named(config, folder / "tokenizer_config.json")

    def of_files() -> dict[str, StoredTemplate]:
        return _files(folder)

    def legacy() -> dict[str, StoredTemplate]:
        return _named(read_json(folder / "chat_template.json"), folder / "chat_template.json")

    def of_processor() -> dict[str, StoredTemplate]:
        return _named(read_json(folder / "processor_config.json"), folder / "processor_config.json")

    places: tuple[Callable[[], dict[str, StoredTemplate]], ...] = (of_files, of_config, legacy, of_processor)
    if sees_images:
        places = (legacy, of_files, of_processor, of_config)
    return next((found for place in places if (found := place())), {})


def _files(folder: Path) -> dict[str, StoredTemplate]:
    """Return the template in ``chat_template.jinja``, and the files of :data:`FOLDER` by their own names."""
    paths = {DEFAULT: folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    return {name: StoredTemplate(_read(path), str(path)) for name, path in paths.items() if os.path.lexists(path)}


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {why_unread(error)}; {REPLACE}") from error


def _named(config: Mapping[str, Any], path: Path) -> dict[str, StoredTemplate]:
    """Return the templates by name in a JSON file.

    Its ``chat_template`` is one template, an object of templates, or a list of names and templates.
    """
    found = config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, list) and all(isinstance(each, Mapping) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    named = found if isinstance(found, Mapping) else {DEFAULT: found}
    for name, template in named.items():
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(f"{path}: chat_template must be a text, or texts by name; {REPLACE}")
    return {name: StoredTemplate(template, str(path)) for name, template in named.items()}
