"""One tree of errors; each knows its HTTP status and OpenAI's name for it, and says what to change."""

from __future__ import annotations


class PreheatError(Exception):
    """Base of every error that preheat raises on purpose."""

    status = 500
    kind = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class SettingsError(PreheatError):
    """An option has an unknown name, a bad value, or one that is not supported yet."""


class ModelError(PreheatError):
    """A checkpoint cannot be loaded: unsupported architecture, missing or unknown tensors, no weights."""


class NotInvariant(PreheatError):
    """Bits depend on the path by which they are computed, and the engine was told that they must not."""


class InvalidRequest(PreheatError):
    """The request cannot be served as it stands; nothing was allocated for it."""

    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Prompt and completion do not fit the model's length."""

    code = "context_length_exceeded"


class Unauthorized(InvalidRequest):
    """A valid API key is required."""

    status = 401
    code = "invalid_api_key"


class ModelNotFound(InvalidRequest):
    """No model of that name is served here."""

    status = 404
    kind = "not_found_error"
    code = "model_not_found"


class TooLarge(InvalidRequest):
    """The body is larger than the server accepts."""

    status = 413


class TooManyRequests(PreheatError):
    """More requests than ``--max-queued-requests`` are waiting."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class NotReady(PreheatError):
    """The engine is still starting or is draining; ask again later."""

    status = 503
    kind = "service_unavailable"
    code = "not_ready"


class EngineDead(PreheatError):
    """The engine stopped; the server is about to exit."""

    status = 500
    kind = "engine_dead"
    code = "engine_dead"


class StepTimeout(PreheatError):
    """A step or a hand-over took longer than its time limit."""

    status = 504
    kind = "timeout"
    code = "timeout"
