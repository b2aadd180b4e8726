"""Chat templates: render a conversation to the prompt format of its model, as transformers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from preheat.errors import InvalidRequest, ModelError, SettingsError
from preheat.frontend import template_process
from preheat.frontend.image_parts import IMAGE
from preheat.frontend.stored_templates import DEFAULT, REPLACE, TOOL_USE, StoredTemplate, stored_templates
from preheat.frontend.template_process import TemplateExhausted, TemplateFailed, TemplateRefused
from preheat.frontend.tokenizer import Tokenizer
from preheat.utils.contract import digest_of
from preheat.utils.files import read_text, shown, why_unread

Message = Mapping[str, Any]

ContentFormat = Literal["auto", "string", "openai"]
"""The form in which a template gets contents: texts, lists of parts, or by the look of the template."""

_RESERVED = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"
}  # fmt: skip
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field with the text of a content part, by the part's type."""

_END = "FINAL_MESSAGE_ENDS_HERE "
"""Follows a message that is to be continued; a template that trims drops the last character."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}
"""The tool with which a template for tools is tried."""


def _check_compiled(source: str, file: str) -> None:
    """Raise ModelError if the template in ``file`` cannot be compiled."""
    try:
        template_process.variables(source)
    except TemplateExhausted as error:
        raise ModelError(f"{file}: the chat template cannot be compiled: {error}; {REPLACE}") from error
    except TemplateFailed as error:
        raise ModelError(f"the chat template is broken: {error}; {REPLACE}") from error


@lru_cache(maxsize=16)
def _shows_parts(source: str, image_token: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    parts = [IMAGE, {"type": "text", "text": "Hello"}]
    known = {**dict(special_tokens), "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        text = template_process.render(source, {"messages": [{"role": "user", "content": parts}], **known})
    except TemplateFailed:  # a template that expects texts may raise anything
        return False
    return text.count(image_token) == 1 and "Hello" in text and "'type'" not in text


class ChatTemplate:
    """The tokenizer's chat templates, or ``override``.

    ``override`` is the path of a file, or the template itself. ``image_token`` is the text that stands for an image;
    None: the model sees no images. ``defaults`` are variables of every conversation; variables of a request win over
    them. ``content_format`` is the form of each message's content: one text (string), a list of parts (openai), or
    parts if the template looks into them (auto).

    Where the checkpoint has a template ``tool_use``, conversations with tools get it, as with transformers. Raises
    ModelError if a template cannot be read, SettingsError if ``defaults`` set a reserved name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        override: str | None = None,
        image_token: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        content_format: str = "auto",
    ) -> None:
        self._content_format = content_format
        self._tokenizer, self._image_token, self._defaults = tokenizer, image_token, dict(defaults or {})
        if clash := _RESERVED & self._defaults.keys():
            raise SettingsError(
                f"default_chat_template_kwargs cannot set {', '.join(sorted(clash))}: leave it out",
                param="default_chat_template_kwargs",
            )
        stored: dict[str, StoredTemplate] = {}
        if override and tokenizer.speaks:
            stored = {DEFAULT: read_override(override)}
        elif tokenizer.speaks:
            stored = stored_templates(tokenizer.folder, tokenizer.config, sees_images=image_token is not None)
        self._sources = {name: stored[name].source for name in (DEFAULT, TOOL_USE) if name in stored}
        self._places = {each.source: each.place for each in stored.values()}
        for source in self._sources.values():
            _check_compiled(source, self._places[source])

    @property
    def digest(self) -> str:
        """The digest of the templates and of the server's own arguments for them."""
        return digest_of([self._sources, self._defaults])

    def replaced(self, source: str) -> ChatTemplate:
        """Return a copy with the template ``source`` of a request; the first rendering compiles it."""
        other = copy(self)
        other._sources, other._places = {DEFAULT: source}, {source: "the request"}
        return other

    def check(self) -> None:
        """Raise ModelError if a template fails on one user message, except by its own decision."""
        for name in self._sources:
            try:
                self.render([{"role": "user", "content": "Hello"}], tools=[_TOOL] if name == TOOL_USE else None)
            except InvalidRequest as error:
                if isinstance(error.__cause__, TemplateExhausted):
                    raise ModelError(f"{error.message}; {REPLACE}") from error
                if not isinstance(error.__cause__, TemplateRefused):
                    raise ModelError(
                        f"the chat template{'' if name == DEFAULT else f' {name}'} fails on a single message of a "
                        f"user: {error.__cause__}; {REPLACE}"
                    ) from error

    def warm_up(self) -> None:
        """Make every process that renders ready for the first conversation."""
        for source in self._sources.values():
            template_process.warm_up(source)

    def _chosen(self, tools: object) -> str | None:
        """Return the template for a conversation with these ``tools``, if there is one."""
        return self._sources.get(TOOL_USE if tools and TOOL_USE in self._sources else DEFAULT)

    def _takes_parts(self, source: str, form: ContentFormat) -> bool:
        """Return whether ``source`` looks into contents that are lists, and so places the images itself."""
        if form not in get_args(ContentFormat):
            raise InvalidRequest(
                f"chat_template_content_format must be one of {', '.join(get_args(ContentFormat))}, got {form!r}",
                param="chat_template_content_format",
            )
        asked = self._content_format if form == "auto" else form
        if asked != "auto":
            return asked == "openai"
        if self._image_token is None:
            return False
        return _shows_parts(source, self._image_token, tuple(sorted(self._tokenizer.special_tokens.items())))

    @property
    def source(self) -> str | None:
        """The template for conversations without tools, if there is one."""
        return self._chosen(None)

    def text(self, tools: object = None) -> str:
        """Return the template of a conversation with these ``tools``, "" if there is none."""
        return self._chosen(tools) or ""

    def uses(self, name: str, tools: object = None) -> bool:
        """Return whether the template for these ``tools`` looks at the variable ``name``."""
        source = self._chosen(tools)
        return source is not None and name in template_process.variables(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        chat_template_content_format: ContentFormat = "auto",
    ) -> str:
        """Return the prompt for ``messages``.

        Contents that are lists must hold text parts or :data:`~preheat.frontend.image_parts.IMAGE`. Newlines join the
        parts, unless the template looks into lists itself. ``chat_template_content_format`` can say that it does
        ("openai") or does not ("string").

        The prompt ends with the header of the model's answer (``add_generation_prompt``, the default), or within the
        last message, for the model to continue it (``continue_final_message``). Raises InvalidRequest if both are asked
        for, if there is no template, or if the template rejects the conversation.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to true",
                param="continue_final_message",
            )
        if not self._tokenizer.speaks:
            raise InvalidRequest(
                "A conversation needs a tokenizer, and there is none (skip_tokenizer_init): give the prompt as token "
                "ids",
                param="messages",
            )
        if (source := self._chosen(tools)) is None:
            without = " for conversations without tools" if self._sources else ""
            raise InvalidRequest(
                f"The model has no chat template{without}; give one with --chat-template", param="messages"
            )
        if clash := _RESERVED & (variables or {}).keys():
            raise InvalidRequest(
                f"{', '.join(sorted(clash))} cannot be set by chat_template_kwargs: leave it out",
                param="chat_template_kwargs",
            )
        known = {
            **self._tokenizer.special_tokens,
            **self._defaults,
            **(variables or {}),
            "tools": tools or None,
            "documents": documents or None,
        }
        parts = self._takes_parts(source, chat_template_content_format)
        plain = [{**message, "content": self._content(message.get("content"), parts)} for message in messages]
        known["add_generation_prompt"] = not continue_final_message and add_generation_prompt is not False
        final = _mark_end(plain) if continue_final_message else None
        try:
            text = template_process.render(source, {"messages": plain, **known})
        except TemplateExhausted as error:
            raise InvalidRequest(
                f"The chat template of {self._places[source]} cannot show these messages: {error}", param="messages"
            ) from error
        except TemplateFailed as error:
            raise InvalidRequest(f"The chat template refused the messages: {error}", param="messages") from error
        return text if final is None else _up_to_the_end_of(final, text)

    def _content(self, content: object, takes_parts: bool) -> str | list[Message]:
        """Return a message's content in the template's form: one string, or parts."""
        if takes_parts and isinstance(content, str | None):
            return [{"type": "text", "text": content or ""}]
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise InvalidRequest("content must be a string or a list of text parts", param="messages")
        texts = [_text_part(part, self._image_token) for part in content]
        if not takes_parts:
            return "\n".join(texts)
        parts = zip(content, texts, strict=True)
        return [IMAGE if part == IMAGE else {"type": "text", "text": text} for part, text in parts]


def _mark_end(messages: Sequence[dict[str, Any]]) -> str:
    """Put _END behind the last message's text. Return that text."""
    last = messages[-1] if messages else {}
    parts = last.get("content")
    if isinstance(parts, list):
        last = parts[-1] = dict(parts[-1]) if parts else {}
    name = "text" if isinstance(parts, list) else "content"
    if not isinstance(last.get(name), str):
        raise InvalidRequest("continue_final_message needs a message to continue", param="continue_final_message")
    final = str(last[name])
    last[name] = final + _END
    return final


def _up_to_the_end_of(final: str, text: str) -> str:
    """Return ``text`` up to the end of the ``final`` message, marked by _END."""
    end = text.rfind(_END.rstrip())
    if end < 0 or final.strip() not in text:
        raise InvalidRequest(
            "The chat template does not show the final message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    if text.startswith(_END, end):
        return text[:end]
    return text[:end].removesuffix(final[len(final.rstrip()) :])


def _text_part(part: object, image_token: str | None) -> str:
    if part == IMAGE and image_token is not None:
        return image_token
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    field = _TEXTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise InvalidRequest(f"Content parts of type {kind!r} are not supported, only text is", param="messages")
    text = part.get(field) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f"A content part of type {kind!r} has no text: add the field {field}, a string", param="messages"
        )
    return text


def read_override(template: str) -> StoredTemplate:
    """Return ``template`` itself, or the file of this path: a path has no braces and no newlines."""
    if "{" in template or "\n" in template:
        return StoredTemplate(template, "--chat-template")
    try:
        return StoredTemplate(read_text(Path(template).expanduser()), template)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--chat-template {shown(template)} cannot be read: {why_unread(error)}") from error
