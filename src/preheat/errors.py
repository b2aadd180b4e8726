"""Every error that preheat raises on purpose, as one tree of classes.

A class holds the HTTP status, OpenAI's ``type`` and ``code``. An error crosses processes as a :class:`WireError`: what
the loop raises is raised again, with the same class, where the client is answered.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class PreheatError(Exception):
    """Base of all. The message says what to change; ``param`` names the option or field that it is about.

    Subclasses set the three class attributes and keep this constructor, so that they can be restored after travelling.
    """

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


class OutsideLimits(PreheatError):
    """A step was put together that the limits do not allow: the scheduler's fault, not that of a request."""


class ColdStep(PreheatError):
    """A step compiled or loaded something after the warm-up, which ``--on-cold raise`` makes an error."""


class InvalidRequest(PreheatError):
    """The request cannot be served as it stands; nothing was allocated for it."""

    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt and completion together, are longer than this engine can run."""

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


class SlowBody(InvalidRequest):
    """The body did not arrive in time."""

    status = 408


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
    """The engine took longer than a time limit allows to run a step, or to take a request."""

    status = 504
    kind = "timeout"
    code = "timeout"


class WireError(msgspec.Struct, array_like=True):
    """An error in transit: the name of its class, and what it says."""

    name: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> WireError:
        """``error`` as it is sent. One that is not ours becomes a PreheatError that names its class."""
        if isinstance(error, PreheatError):
            return cls(type(error).__name__, error.message, error.param)
        return cls(PreheatError.__name__, f"{type(error).__name__}: {error}")

    def restore(self) -> PreheatError:
        """The error again; a PreheatError if this process does not know its class."""
        kind = next((kind for kind in _kinds(PreheatError) if kind.__name__ == self.name), PreheatError)
        return kind(self.message, param=self.param)


def _kinds(base: type[PreheatError]) -> Iterator[type[PreheatError]]:
    """``base`` and all its subclasses."""
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)
