"""Prompts of the library: their forms and their contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from preheat.errors import InvalidRequest
from preheat.frontend.adapters import LoRARequest
from preheat.frontend.encoding import EncodedText
from preheat.frontend.prompt_embeds import Embedded

if TYPE_CHECKING:
    from torch import Tensor


class TextPrompt(TypedDict):
    """A text. Only prompts with the same ``cache_salt`` share cached blocks."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """Token ids, and optionally their text for the result."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """A tensor of torch, [tokens, hidden], in place of tokens; needs ``enable_prompt_embeds``."""

    prompt_embeds: Tensor
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt | dict[str, Any]
"""Text, token ids, or one of vLLM's dictionaries.

``"multi_modal_data": {"image": images}`` in a dictionary holds one image of Pillow or a list of them.
"""

PromptType = Prompt
"""vLLM's name of :data:`Prompt`."""

Messages = list[dict[str, Any]]


def adapter_of_each(given: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[LoRARequest | None]:
    """Return the adapter of each of ``count`` prompts. Raises InvalidRequest unless each name means one adapter."""
    found = [given] * count if given is None or isinstance(given, LoRARequest) else list(given)
    if len(found) != count:
        raise InvalidRequest(f"{count} prompts but {len(found)} lora_requests: give one for each")
    named: dict[str, LoRARequest] = {}
    for each in found:
        if each is not None and named.setdefault(each.lora_name, each) != each:
            raise InvalidRequest(f"two lora_requests are named {each.lora_name!r}: give one of them another name")
    return found


def images_of(data: dict[str, Any] | None) -> list[Any]:
    """Return the images in a prompt's ``multi_modal_data``. Raises InvalidRequest for other data."""
    if unknown := sorted((data or {}).keys() - {"image"}):
        raise InvalidRequest(f"multi_modal_data holds {unknown[0]!r}, but only 'image' is supported", param="prompt")
    images = (data or {}).get("image")
    return list(images) if isinstance(images, list | tuple) else [] if images is None else [images]


def text_of(prompt: Mapping[str, Any]) -> str | None:
    """Return the text that a prompt in a dictionary is; None for one of token ids or embeddings."""
    others = prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
    text = prompt.get("prompt")
    return text if isinstance(text, str) and others == (None, None) else None


def parts_of(
    prompt: Prompt, embedded: Callable[[object], Embedded]
) -> tuple[str | EncodedText | Sequence[int] | Embedded, dict[str, Any]]:
    """Return the text, ids or embeddings of a prompt, and more arguments for :meth:`Frontend.prepare`.

    Raises InvalidRequest for an invalid prompt.
    """
    if not isinstance(prompt, dict):
        return prompt, {}
    more: dict[str, Any] = {name: value for name, value in prompt.items() if value is not None}
    if (tensor := more.pop("prompt_embeds", None)) is not None:
        if any(more.pop("prompt_is_token_ids", ())):
            raise InvalidRequest(
                "prompt_is_token_ids names tokens among prompt_embeds: give the embeddings of all", param="prompt"
            )
        if "prompt_is_token_ids" in prompt:  # the ids only tell the prompt's length
            more.pop("prompt_token_ids", None)
        if unknown := more.keys() - {"cache_salt"}:
            raise InvalidRequest(f"a prompt is prompt_embeds or {min(unknown)}: leave one out", param="prompt")
        return embedded(tensor), more
    ids, text = more.pop("prompt_token_ids", None), more.pop("prompt", None)
    if unknown := more.keys() - {"cache_salt", "multi_modal_data"}:
        raise InvalidRequest(f"a prompt's {min(unknown)} is not supported", param="prompt")
    if ids is not None:
        return cast("Sequence[int]", ids) if text is None else EncodedText(ids, text), more
    if not isinstance(text, str):
        raise InvalidRequest("a prompt needs a text as prompt, prompt_token_ids or prompt_embeds", param="prompt")
    return text, more


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, also for a single one (text, ids or a dict)."""
    if isinstance(prompts, str | dict):
        return [cast("Prompt", prompts)]
    if len(prompts) and isinstance(prompts[0], int):  # type: ignore[literal-required]
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
