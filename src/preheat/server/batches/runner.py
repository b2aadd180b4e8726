"""The running of batches through the server's own application.

Each line of a batch is a request; it yields to the requests of clients.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing

import msgspec
from starlette.types import ASGIApp

from preheat.errors import InvalidRequest, PreheatError
from preheat.server.batches.answers import BatchAnswers
from preheat.server.batches.file_store import ANSWERS, StoredFile
from preheat.server.batches.input import check_input, missing_lines
from preheat.server.batches.lines import BatchLine, answer_of, is_full, is_no_answer
from preheat.server.batches.schema import BatchError, BatchErrors
from preheat.server.batches.store import BatchStore, Ended, StoredBatch
from preheat.server.http.local_call import post
from preheat.settings import Settings
from preheat.utils.files import why_unread

logger = logging.getLogger(__name__)

AT_ONCE = 256
"""Most requests of all batches in flight at once."""

MOST_TRIES = 3
"""Servers that may end before a batch's first answer; then the batch fails.

A line of the batch may be the reason why they end.
"""

RETRY_SECONDS = 0.5

FULL_SECONDS = 30.0
"""Seconds that a batch waits for room on a full disk."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_LATE = {"code": "batch_expired", "message": "The completion window ended before this request was answered"}


class BatchRunner:
    """Runner of the batches of ``store`` through ``app``, while ``ready`` returns true.

    ``app`` is set before :meth:`start`.
    """

    app: ASGIApp

    def __init__(self, store: BatchStore, settings: Settings, ready: Callable[[], bool]) -> None:
        self.store = store
        self._settings, self._ready = settings, ready
        self._slots = asyncio.Semaphore(max(1, min(AT_ONCE, settings.max_queued_requests // 2)))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.max_file_bytes, self.uploads = settings.max_batch_file_bytes, 0  # the uploads in progress

    def start(self) -> None:
        """Continue the batches that have not ended."""
        for stored in self.store.unended:
            self.begin(stored)

    def begin(self, stored: StoredBatch) -> None:
        """Run a batch."""
        self._tasks[stored.batch.id] = asyncio.create_task(self._run(stored))

    async def stop(self) -> None:
        """Stop all batches; another server continues the rest."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stored in self.store.unended:
            await self._tried(stored, 0)
        self.store.close()

    def cancel(self, stored: StoredBatch) -> None:
        """Stop a batch for good. Raises InvalidRequest if it has ended."""
        batch = stored.batch
        if batch.status == "cancelling":
            return
        if batch.status not in ("validating", "in_progress"):
            raise InvalidRequest(f"{batch.id} is {batch.status}: it cannot be cancelled any more")
        batch.status, batch.cancelling_at = "cancelling", int(time.time())
        before = self._tasks.get(batch.id)
        self._tasks[batch.id] = asyncio.create_task(self._run(stored, before))
        if before is not None:
            before.cancel()

    async def _run(self, stored: StoredBatch, before: asyncio.Task[None] | None = None) -> None:
        """Run a batch to its end, once the task ``before`` has ended."""
        id = stored.batch.id
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        while not stored.ended:
            try:
                await self._run_to_end(stored)
            except OSError as error:
                if error.errno not in _FULL:
                    await self._fail(stored, BatchError("server_error", f"{type(error).__name__}: {error}"))
                else:
                    logger.error("The batch %s waits: %s", id, why_unread(error))
                    await asyncio.sleep(FULL_SECONDS)
            except PreheatError as error:
                await self._fail(stored, BatchError(error.code or error.kind, error.message, error.param))
        if self._tasks.get(id) is asyncio.current_task():
            del self._tasks[id]

    async def _run_to_end(self, stored: StoredBatch) -> None:
        if stored.batch.status == "validating" and not await self._checked(stored):
            return
        if stored.batch.status == "cancelling":
            await self._finish(stored, "cancelled")
        elif stored.tries >= MOST_TRIES:
            text = f"{MOST_TRIES} servers ended before the first answer: a request of the batch may crash them"
            await self._fail(stored, BatchError("server_ended", text))
        else:
            try:
                status = await self._answer_all(stored)
            except ExceptionGroup as error:
                raise error.exceptions[0] from None
            await self._finish(stored, status)

    async def _checked(self, stored: StoredBatch) -> bool:
        """Check the input, and return whether it is valid; otherwise the batch fails."""
        batch = stored.batch
        with closing(await asyncio.to_thread(self.store.files.contents, batch.input_file_id)) as file:
            total, errors = await asyncio.to_thread(check_input, file, batch.endpoint, self._settings.max_body_bytes)
        if errors:
            await self._fail(stored, *errors)
            return False
        batch.request_counts.total = total
        batch.status, batch.in_progress_at = "in_progress", int(time.time())
        await asyncio.to_thread(self.store.save, stored)
        return True

    async def _fail(self, stored: StoredBatch, *errors: BatchError) -> None:
        stored.batch.errors = BatchErrors(list(errors))
        await self._finish(stored, "failed")

    async def _answer_all(self, stored: StoredBatch) -> Ended:
        """Answer the requests that have no answer yet, and return the batch's final status."""
        batch, files = stored.batch, self.store.files
        paths = files.path(stored.answers), files.path(stored.failures)
        answers = await asyncio.to_thread(BatchAnswers, *paths, batch.request_counts)
        try:
            try:
                async with asyncio.timeout((batch.expires_at or 0) - time.time()), asyncio.TaskGroup() as group:
                    await self._ask_all(stored, answers, group)
            except TimeoutError:
                async with aclosing(self._missing(stored, answers)) as lines:
                    async for line in lines:
                        late = {"id": f"batch_req_{line.custom_id}", "custom_id": line.custom_id, "response": None}
                        await answers.write({**late, "error": _LATE}, refused=True)
                return "expired"
        finally:
            await answers.close()
        return "completed"

    async def _ask_all(self, stored: StoredBatch, answers: BatchAnswers, group: asyncio.TaskGroup) -> None:
        """Send the unanswered requests, a few at once."""
        begun = False
        async with aclosing(self._missing(stored, answers)) as lines:
            async for line in lines:
                await self._slots.acquire()
                if not begun:
                    await self._until_ready()
                    await self._tried(stored, stored.tries + 1)
                    begun = True
                task = group.create_task(self._answer(stored, line, answers))
                task.add_done_callback(lambda _: self._slots.release())
                await asyncio.sleep(0)  # let a client's request come in between

    async def _missing(self, stored: StoredBatch, answers: BatchAnswers) -> AsyncGenerator[BatchLine]:
        """Yield the lines that have no answer."""
        batch = stored.batch
        with closing(await asyncio.to_thread(self.store.files.contents, batch.input_file_id)) as file:
            async for line in missing_lines(file, batch.endpoint, self._settings.max_body_bytes, answers.done):
                yield line

    async def _answer(self, stored: StoredBatch, line: BatchLine, answers: BatchAnswers) -> None:
        """Send one line until there is an answer, and write it."""
        body = msgspec.json.encode(line.body)
        while True:
            await self._until_ready()
            answer = await post(self.app, line.url, body, background=True)
            said = msgspec.json.decode(answer.body) if answer.status != 200 else None
            if not (is_full(answer.status, said) or is_no_answer(answer.status, said)):
                break
            await asyncio.sleep(RETRY_SECONDS)
        whole = answer_of(line, answer.status, answer.id, msgspec.Raw(answer.body))
        await answers.write(whole, refused=answer.status != 200)
        await self._tried(stored, 0)

    async def _until_ready(self) -> None:
        while not self._ready():
            await asyncio.sleep(RETRY_SECONDS)

    async def _tried(self, stored: StoredBatch, tries: int) -> None:
        """Store the number of servers that have begun the batch, if new."""
        if stored.tries != tries:
            stored.tries = tries
            await asyncio.to_thread(self.store.save, stored)

    async def _finish(self, stored: StoredBatch, status: Ended) -> None:
        """Register the files of answers, and end the batch with ``status``. Safe to repeat."""
        batch = stored.batch
        if batch.status == "in_progress":
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
            await asyncio.to_thread(self.store.save, stored)
        batch.output_file_id = await asyncio.to_thread(self._described, stored, stored.answers, "output")
        batch.error_file_id = await asyncio.to_thread(self._described, stored, stored.failures, "error")
        await asyncio.to_thread(self.store.end, stored, status)

    def _described(self, stored: StoredBatch, id: str, what: str) -> str | None:
        """Register a file of answers and return its id; None if it is empty."""
        files, now = self.store.files, int(time.time())
        path = files.path(id)
        size = path.stat().st_size if path.exists() else 0
        if not size:
            files.discard(id)
            return None
        expires = None if stored.kept_seconds is None else now + stored.kept_seconds
        name = f"{stored.batch.id}_{what}.jsonl"
        files.add(StoredFile(id=id, bytes=size, created_at=now, filename=name, purpose=ANSWERS, expires_at=expires))
        return id
