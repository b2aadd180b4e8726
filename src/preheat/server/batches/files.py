"""/v1/files: the inputs and the answers of batches. The endpoints exist only with ``--batch-dir``."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from preheat.errors import InvalidRequest, NotFound, TooManyFiles
from preheat.server.batches.file_store import UPLOADED, StoredFile, new_id, page
from preheat.server.batches.runner import BatchRunner
from preheat.server.batches.schema import ExpiresAfter, FileDeleted, FileList
from preheat.server.http.ignored import ignore, strict
from preheat.server.http.upload import Form, receive
from preheat.server.openai.answers import encode

UPLOADS = 4
"""Most uploads at once."""

CHUNK = 256 * 1024
"""Bytes of a file that are sent at once."""

MOST_LISTED = 10_000
_EXPIRES = {"expires_after[anchor]": "anchor", "expires_after[seconds]": "seconds"}


def batches_of(request: Request) -> BatchRunner:
    """Return the runner of batches. Raises NotFound if the server has none."""
    runner: BatchRunner | None = request.app.state.batches
    if runner is None:
        raise NotFound("This server keeps no files and no batches: start it with --batch-dir FOLDER")
    return runner


def answer(body: Struct) -> Response:
    """Return ``body`` as a JSON response."""
    return Response(encode(body), media_type="application/json")


def limit_asked(request: Request, default: int, most: int) -> int:
    """Return the ``limit`` of the query. Raises InvalidRequest."""
    asked = request.query_params.get("limit", str(default))
    if not (asked.isascii() and asked.isdigit() and 1 <= int(asked[:9]) <= most):
        raise InvalidRequest(f"limit must be a number from 1 to {most}", param="limit")
    return int(asked)


async def upload_file(request: Request) -> Response:
    """Upload a file for a batch."""
    runner = batches_of(request)
    files = runner.store.files
    if runner.uploads >= UPLOADS:
        raise TooManyFiles(f"{UPLOADS} files arrive already; try again later")
    id = new_id("file-")
    runner.uploads += 1
    try:
        await asyncio.to_thread(files.check_room, runner.uploads)
        with await asyncio.to_thread(files.receive, id) as sink:
            form = await receive(request, sink, runner.max_file_bytes)
            file = _described(request, id, form)
            await asyncio.to_thread(os.fsync, sink.fileno())
        await asyncio.to_thread(files.add, file)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(files.discard, id))
        raise
    finally:
        runner.uploads -= 1
    return answer(file)


def _described(request: Request, id: str, form: Form) -> StoredFile:
    """Describe the file by its form. Raises InvalidRequest."""
    given = form.fields
    if (purpose := given.get("purpose")) != UPLOADED:
        said = "is missing" if purpose is None else f"{purpose!r} is not served"
        raise InvalidRequest(f"purpose {said}: files are the inputs of batches, write batch", param="purpose")
    unknown = [name for name in given if name != "purpose" and name not in _EXPIRES]
    if unknown and strict(request):
        raise InvalidRequest(f"Unrecognized request argument supplied: {unknown[0]}", param=unknown[0])
    ignore(request, unknown)
    now, kept = int(time.time()), _kept_seconds({key: given[name] for name, key in _EXPIRES.items() if name in given})
    return StoredFile(
        id=id, bytes=form.size, created_at=now, filename=form.filename or "", purpose=UPLOADED,
        expires_at=None if kept is None else now + kept,
    )  # fmt: skip


def _kept_seconds(given: Mapping[str, str]) -> int | None:
    if not given:
        return None
    try:
        return msgspec.convert(given, ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid value for expires_after: {error}", param="expires_after") from None


async def list_files(request: Request) -> Response:
    """List the files."""
    files, asked = batches_of(request).store.files, request.query_params
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    limit = limit_asked(request, MOST_LISTED, MOST_LISTED)
    found = await asyncio.to_thread(files.listed, asked.get("purpose"), newest_first=order == "desc")
    data, more = page(found, asked.get("after"), limit)
    return answer(FileList(data, more, data[0].id if data else None, data[-1].id if data else None))


async def get_file(request: Request) -> Response:
    """Return the description of a file."""
    return answer(await asyncio.to_thread(batches_of(request).store.files.get, request.path_params["id"]))


async def delete_file(request: Request) -> Response:
    """Remove a file."""
    id = request.path_params["id"]
    await asyncio.to_thread(batches_of(request).store.files.delete, id)
    return answer(FileDeleted(id))


async def file_content(request: Request) -> Response:
    """Return the contents of a file."""
    files, id = batches_of(request).store.files, request.path_params["id"]
    file = await asyncio.to_thread(files.get, id)
    opened = await asyncio.to_thread(files.contents, id)
    return StreamingResponse(
        _chunks(opened), media_type="application/octet-stream", headers={"content-length": str(file.bytes)}
    )


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK):
            yield chunk
