"""Chat templates: render a conversation to the prompt format of its model, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from preheat.errors import InvalidRequest, ModelError
from preheat.frontend.tokenizer import Tokenizer

Message = Mapping[str, Any]

_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the model's own text for training; rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, **options: Any) -> str:
    """Unlike Jinja's own filter, this one escapes no HTML: a model reads the result, not a browser."""
    return json.dumps(value, **({"ensure_ascii": False} | options))


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    extensions = [_GenerationTag, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"The chat template cannot be read: {error}", param="chat_template") from error


class ChatTemplate:
    """The tokenizer's chat template, or ``override``: the path of a file, or the template itself."""

    def __init__(self, tokenizer: Tokenizer, override: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = _read_override(override) if override else _default_source(tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``. Contents that are lists must hold text parts; newlines join them.

        Raises InvalidRequest if there is no template or the template rejects the conversation.
        """
        if not self._tokenizer.speaks:
            raise InvalidRequest(
                "A conversation becomes text, and there is no tokenizer (skip_tokenizer_init): give the prompt as "
                "token ids",
                param="messages",
            )
        if self._source is None:
            raise InvalidRequest("The model has no chat template; give one with --chat-template", param="messages")
        if clash := _RESERVED & (variables or {}).keys():
            raise InvalidRequest(f"{', '.join(sorted(clash))} cannot be set here", param="chat_template_kwargs")
        known = {**self._tokenizer.special_tokens, **(variables or {}), "tools": None, "documents": None}
        plain = [{**message, "content": _text_of(message.get("content"))} for message in messages]
        try:
            return _compiled(self._source).render(messages=plain, add_generation_prompt=add_generation_prompt, **known)
        except InvalidRequest:
            raise
        except Exception as error:  # an expression in a template may raise anything
            raise InvalidRequest(f"The chat template refused the messages: {error}", param="messages") from error


def _text_of(content: object) -> str:
    """A message's content as one string."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("content must be a string or a list of text parts", param="messages")
    return "\n".join(_text_part(part) for part in content)


def _text_part(part: object) -> str:
    if isinstance(part, str):
        return part
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (type(part).__name__, None)
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequest(f"Content parts of type {kind!r} are not supported, only text is", param="messages")
    return text


def _read_override(template: str) -> str:
    """``template`` itself, or the file that it names: a path has no braces and no newlines."""
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"--chat-template {template} cannot be read: {error.strerror}") from error


def _default_source(tokenizer: Tokenizer) -> str | None:
    """chat_template.jinja, else ``chat_template`` of the config: a template, or a list of them with a "default"."""
    file = tokenizer.folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer.config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
