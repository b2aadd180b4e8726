"""The length of a prompt and of its answer, within the limits of an engine."""

from __future__ import annotations

import sys

from preheat.core import Ready, SamplingParams
from preheat.errors import ContextTooLong, InvalidRequest
from preheat.frontend.room import Room


def check_prompt_length(prompt: int, limits: Ready, size: str = "") -> None:
    """Raise ContextTooLong if ``prompt`` tokens do not fit. ``size`` says their number in words."""
    size = size or f"{prompt} tokens"
    if limits.spare and prompt > limits.max_model_len:
        raise ContextTooLong(f"{_maximum(limits)}your text has {size}. Shorten the text.", param="prompt")
    if prompt >= limits.places:
        raise ContextTooLong(
            f"{_maximum(limits)}your prompt has {size}, and at least 1 must be left for the completion. Shorten the "
            "prompt.",
            param="prompt",
        )
    if limits.max_prompt_len is not None and prompt > limits.max_prompt_len:
        raise ContextTooLong(
            f"Your prompt has {size}, but this server reads each prompt in one step, with room for "
            f"{limits.max_prompt_len}. Shorten the prompt, or start the server with "
            f"{'' if limits.spare else '--enable-chunked-prefill or '}a larger --max-num-batched-tokens.",
            param="prompt",
        )


def answer_tokens(prompt: int, params: SamplingParams, limits: Ready, cap: bool) -> int:
    """Return the number of tokens to generate after ``prompt`` tokens. Raises ContextTooLong, with the numbers."""
    check_prompt_length(prompt, limits)
    room = limits.places - prompt
    asked = room if params.max_tokens is None else params.max_tokens
    if asked > room and not cap:
        raise ContextTooLong(
            f"{_maximum(limits)}you requested {prompt + asked} tokens ({prompt} in the prompt, {asked} in the "
            "completion). Shorten the prompt or reduce max_tokens.",
            param="max_tokens",
        )
    if params.min_tokens > min(asked, room):
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but only {min(asked, room)} can be generated: lower it",
            param="min_tokens",
        )
    return min(asked, room)


def kept_tokens(params: SamplingParams, limits: Ready, cap: bool) -> int:
    """Return the number of the prompt's tokens that ``truncate_prompt_tokens`` keeps.

    A negative value keeps as many as fit beside the answer.
    """
    asked = params.truncate_prompt_tokens
    if asked is None:
        return sys.maxsize
    if asked > limits.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}, but the model's maximum context length is {limits.max_model_len}: "
            "lower it",
            param="truncate_prompt_tokens",
        )
    if asked > 0:
        return asked
    answer = max(params.min_tokens, 1) if cap or params.max_tokens is None else params.max_tokens
    room = limits.places if limits.max_prompt_len is None else limits.max_prompt_len
    return max(min(limits.places - answer, room), 1)


def most_of_pair(params: SamplingParams, limits: Ready, cap: bool) -> int | None:
    """Return the number of a pair's tokens that are kept; None: all of them."""
    kept = kept_tokens(params, limits, cap)
    return None if kept == sys.maxsize else kept


def _maximum(limits: Ready) -> str:
    return f"This model's maximum context length is {limits.max_model_len} tokens. However, "


def room_for_images(limits: Ready) -> Room:
    """Return the positions of a prompt that images may take, as :func:`check_prompt_length` bounds them."""

    def refusal(positions: int) -> ContextTooLong:
        try:
            check_prompt_length(positions, limits, f"images that take {positions} tokens or more")
        except ContextTooLong as error:
            error.param = "messages"
            return error
        raise AssertionError(f"{positions} positions fit")

    most = limits.max_model_len if limits.spare else limits.places - 1
    return Room(most if limits.max_prompt_len is None else min(most, limits.max_prompt_len), refusal)
