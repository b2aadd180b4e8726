"""Chat templates: a conversation to the prompt that its model was trained on, as transformers renders it."""

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
    """``{% generation %}`` marks what the model wrote, for training; rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, **options: Any) -> str:
    """Unlike Jinja's own filter, no HTML escapes: the model reads this, not a browser."""
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationTag, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"The chat template cannot be read: {error}", param="chat_template") from error


class ChatTemplate:
    """The template of a tokenizer, or the one given instead of it: the path of a file, or the template itself."""

    def __init__(self, tokenizer: Tokenizer, override: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.source = _given(override) if override else _own(tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``; list contents must be text parts, which are joined by newlines.

        ``template`` replaces the tokenizer's for this call. Raises InvalidRequest when there is no template, or when
        it refuses the conversation.
        """
        if not self._tokenizer.speaks:
            raise InvalidRequest(
                "A conversation becomes text, and there is no tokenizer (skip_tokenizer_init): give the prompt as "
                "token ids",
                param="messages",
            )
        source = template or self.source
        if source is None:
            raise InvalidRequest("The model has no chat template; give one with --chat-template", param="messages")
        if clash := _RESERVED & (variables or {}).keys():
            raise InvalidRequest(f"{', '.join(sorted(clash))} cannot be set here", param="chat_template_kwargs")
        known = {**self._tokenizer.special_tokens, **(variables or {}), "tools": None, "documents": None}
        plain = [{**message, "content": text_of(message.get("content"))} for message in messages]
        try:
            return _compiled(source).render(messages=plain, add_generation_prompt=add_generation_prompt, **known)
        except InvalidRequest:
            raise
        except Exception as error:  # whatever an expression in a template may raise
            raise InvalidRequest(f"The chat template refused the messages: {error}", param="messages") from error


def text_of(content: object) -> str:
    """A message's content as one string. Raises InvalidRequest for parts that are not text."""
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


def _given(template: str) -> str:
    """A template on the command line is written out or, without braces and newlines, the path of a file."""
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"--chat-template {template} cannot be read: {error.strerror}") from error


def _own(tokenizer: Tokenizer) -> str | None:
    """chat_template.jinja, else the config's ``chat_template``: one, or several of which "default" is used."""
    file = tokenizer.folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer.config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
