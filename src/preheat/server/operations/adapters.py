"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter.

The endpoints exist with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from preheat.configs.adapters import LoraModule, path_below
from preheat.errors import PreheatError
from preheat.frontend.adapters import OnDone
from preheat.server.http.body import read_request
from preheat.server.http.service import Service
from preheat.server.openai.schema import LoadLoraAdapterRequest, UnloadLoraAdapterRequest


async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter."""
    frontend, body = await read_request(request, LoadLoraAdapterRequest)
    service: Service = request.app.state.service
    path = await asyncio.to_thread(path_below, service.settings.lora_root, body.lora_path)
    module, in_place = LoraModule(body.lora_name, path), body.load_inplace is True
    await _done(lambda on_done: frontend.adapters.load(module, on_done, in_place=in_place))
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")


async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter."""
    frontend, body = await read_request(request, UnloadLoraAdapterRequest)
    await _done(lambda on_done: frontend.adapters.unload(body.lora_name, on_done))
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


async def _done(ask: Callable[[OnDone], None]) -> None:
    """Ask the engine and wait for its result, even if the client leaves. Raises the engine's error."""
    future: asyncio.Future[PreheatError | None] = asyncio.get_running_loop().create_future()
    ask(lambda error: None if future.done() else future.set_result(error))
    if error := await future:
        raise error
