"""The log of requests (``--enable-log-requests``).

It has one line at a request's arrival, and one at its end. It has neither the text of a prompt nor the text of an
answer.
"""

from __future__ import annotations

import logging
import time

import msgspec

from preheat.core import SamplingParams
from preheat.frontend.request_state import RequestState

logger = logging.getLogger(__name__)


def received(state: RequestState) -> None:
    """Log that ``state`` is handed to the engine, with the sampling parameters that are not the default."""
    asked = "".join(f", {name}={value}" for name, value in _asked(state.params))
    logger.info("Received request %s: %d prompt tokens%s", state.request_id, len(state.prompt_ids), asked)


def ended(state: RequestState) -> None:
    """Log the reason of the end of ``state``, its tokens read and generated, and its time."""
    now, reasons = time.monotonic(), dict.fromkeys(str(choice.finish_reason) for choice in state.choices)
    first = f", the first after {state.first_token_at - state.arrived_at:.3f} s" if state.first_token_at else ""
    generated = sum(len(choice.token_ids) for choice in state.choices)
    logger.info(
        "Finished request %s: %s, %d prompt tokens (%d cached), %d generated%s, %.3f s in total",
        state.request_id, " and ".join(reasons) if state.error is None else f"error ({state.error})",
        len(state.prompt_ids), state.cached_tokens, generated, first, now - state.arrived_at,
    )  # fmt: skip


def _asked(params: SamplingParams) -> list[tuple[str, object]]:
    usual = SamplingParams()
    values = ((field.name, getattr(params, field.name)) for field in msgspec.structs.fields(SamplingParams))
    return [(name, value) for name, value in values if value != getattr(usual, name)]
