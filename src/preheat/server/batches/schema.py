"""The bodies of ``/v1/files`` and ``/v1/batches``, in OpenAI's shapes; times are seconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from preheat.server.batches.file_store import StoredFile
from preheat.server.openai.schema import ForModel, Name

FIRST_EXPIRY, LAST_EXPIRY = 3600, 2_592_000
"""The shortest and longest time until a file expires, in seconds."""

_Pairs = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class FileUpload(Struct):
    """The form of POST /v1/files."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


class FileList(Struct):
    """A page of files."""

    data: list[StoredFile]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FileDeleted(Struct):
    """A file that was removed."""

    id: str
    deleted: bool = True
    object: str = "file"


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """The time that a file is kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=FIRST_EXPIRY, le=LAST_EXPIRY)]


class BatchRequest(ForModel, kw_only=True):
    """POST /v1/batches. ``completion_window``: hours or days until the batch expires, such as 24h or 7d."""

    input_file_id: Name
    endpoint: Name
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,2}[hd]$")]
    metadata: _Pairs | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(Struct):
    """An error in a line of the input; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Struct):
    """The errors of a failed batch."""

    data: list[BatchError]
    object: str = "list"


class RequestCounts(Struct):
    """The numbers of a batch's requests: all, answered, and refused."""

    total: int = 0
    completed: int = 0
    failed: int = 0


Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class BatchObject(Struct, kw_only=True):
    """OpenAI's batch object."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    object: str = "batch"
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, Any] | None = None


class BatchList(Struct):
    """A page of batches."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"
