"""vLLM's ``kv_transfer_params``: prompts that another server has read, and prompts that are read for another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from starlette.requests import Request

from preheat.configs.kv_transfer import KvTransfer, kv_transfer
from preheat.core import BlockSource
from preheat.errors import InvalidRequest
from preheat.frontend.frontend import Frontend
from preheat.frontend.request_state import RequestState
from preheat.server.openai.schema import KvTransferParams, Sampling

_NAME = "kv_transfer_params"


class Body(Protocol):
    """A body with the parameters."""

    @property
    def stream(self) -> bool | None: ...
    @property
    def kv_transfer_params(self) -> KvTransferParams | None: ...


def attach(request: Request, body: Body, states: Sequence[RequestState]) -> None:
    """Have ``states`` pull blocks, or be offered to other servers, as ``body`` asks. Raises InvalidRequest."""
    asked = body.kv_transfer_params
    if asked is None or not (asked.do_remote_prefill or asked.do_remote_decode):
        return
    if isinstance(body, Sampling) and body.use_beam_search:
        raise InvalidRequest(f"beam search does not support {_NAME}: leave one out", param=_NAME)
    transfer = kv_transfer(request.app.state.service.settings)
    if asked.do_remote_prefill and asked.do_remote_decode:
        raise _wrong("do_remote_prefill", "cannot be true beside do_remote_decode: one server reads a prompt")
    if asked.do_remote_decode:
        _check_offer(transfer, body)
        return
    source = _source(transfer, asked, max(len(state.prompt_ids) for state in states))
    for state in states:
        state.source = source


def offered(frontend: Frontend, body: Body, states: Sequence[RequestState]) -> dict[str, Any] | None:
    """Return the parameters with which another server decodes ``states``, None unless ``body`` asks for them.

    Blocks are found by their hashes, so ``remote_block_ids`` only number the full blocks of the longest prompt.
    """
    asked, ready = body.kv_transfer_params, frontend.ready
    if asked is None or not asked.do_remote_decode or ready is None or (sends := ready.sends) is None:
        return None
    tokens = max(len(state.prompt_ids) for state in states)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": sends.engine_id,
        "remote_request_id": states[0].request_id,
        "remote_block_ids": list(range(tokens // ready.block_size)),
        "remote_host": sends.host,
        "remote_port": sends.port,
        "remote_num_tokens": tokens,
    }


def _check_offer(transfer: KvTransfer | None, body: Body) -> None:
    if transfer is None or not transfer.sends:
        raise _wrong("do_remote_decode", f"needs a server that sends blocks, and this one {_does(transfer)}")
    if body.stream:
        raise _wrong("do_remote_decode", "is answered at the end of a whole answer: set stream to false")


def _source(transfer: KvTransfer | None, asked: KvTransferParams, tokens: int) -> BlockSource:
    if transfer is None or not transfer.pulls:
        raise _wrong("do_remote_prefill", f"needs a server that pulls blocks, and this one {_does(transfer)}")
    if asked.remote_host is None or asked.remote_port is None:
        raise _wrong("remote_host" if asked.remote_host is None else "remote_port", "is missing")
    if asked.transfer_mode not in (None, "pull"):
        raise _wrong("transfer_mode", f"must be pull, got {asked.transfer_mode!r}")
    if not transfer.pulls_from(asked.remote_host):
        raise _wrong(
            "remote_host", f"is {asked.remote_host!r}, and blocks are not pulled from there (--kv-transfer-peers)"
        )
    if asked.remote_num_tokens is not None:
        tokens = min(tokens, asked.remote_num_tokens)
    return BlockSource(asked.remote_host, asked.remote_port, tokens, asked.remote_engine_id or "")


def _does(transfer: KvTransfer | None) -> str:
    return "has no --role" if transfer is None else f"has --role {transfer.role}"


def _wrong(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{_NAME}.{name} {why}", param=_NAME)
