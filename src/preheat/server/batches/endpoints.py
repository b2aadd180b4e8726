"""/v1/batches: OpenAI's batches. The endpoints exist only with ``--batch-dir``."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from preheat.server.batches.file_store import page
from preheat.server.batches.files import answer, batches_of, limit_asked
from preheat.server.batches.schema import BatchList, BatchRequest
from preheat.server.http.body import read_json
from preheat.server.http.ignored import ignore

LISTED, MOST_LISTED = 20, 100


async def create_batch(request: Request) -> Response:
    """Begin a batch of the requests in a file."""
    runner = batches_of(request)
    body = await read_json(request, BatchRequest)
    ignore(request, [name for name in ("model", "request_id") if getattr(body, name) is not None])
    stored = await asyncio.to_thread(runner.store.create, body)
    runner.begin(stored)
    return answer(stored.batch)


async def list_batches(request: Request) -> Response:
    """List the batches, newest first."""
    found = await asyncio.to_thread(batches_of(request).store.listed)
    data, more = page(found, request.query_params.get("after"), limit_asked(request, LISTED, MOST_LISTED))
    return answer(BatchList(data, more, data[0].id if data else None, data[-1].id if data else None))


async def get_batch(request: Request) -> Response:
    """Return the state of a batch."""
    return answer(batches_of(request).store.get(request.path_params["id"]).batch)


async def cancel_batch(request: Request) -> Response:
    """Stop a batch, and keep the answers so far."""
    runner = batches_of(request)
    stored = runner.store.get(request.path_params["id"])
    runner.cancel(stored)
    await asyncio.to_thread(runner.store.save, stored)
    return answer(stored.batch)
