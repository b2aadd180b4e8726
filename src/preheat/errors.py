"""The errors that preheat raises on purpose.

A class has its HTTP status and OpenAI's ``type`` and ``code``.

An error crosses processes as a :class:`WireError`. The process that answers the client raises it again, with the same
class.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class PreheatError(Exception):
    """Base class. The message gives advice; ``param`` names the option or field at fault.

    Subclasses may set the three class attributes, but must keep this constructor, so that they can be restored.
    """

    status = 500
    kind = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class SettingsError(PreheatError):
    """An option is unknown, or has a wrong or unsupported value."""


class ModelError(PreheatError):
    """A checkpoint cannot be loaded: unsupported architecture, missing or unknown tensors, no weights."""


class NotInvariant(PreheatError):
    """Results depend on the path of computation, although batch invariance is on."""


class KernelRefused(PreheatError):
    """A kernel does not compile for the card, or the card cannot hold it."""


class CheckFailed(PreheatError):
    """A boot check failed.

    Logits are not finite, or draws break the sampler's contract.
    """


class OutsideLimits(PreheatError):
    """A step exceeds the limits: a bug of the scheduler, not a request's fault."""


class ColdStep(PreheatError):
    """A step compiled or loaded something after the warm-up, with ``--on-cold raise``."""


class InvalidRequest(PreheatError):
    """The request cannot be served. Nothing was allocated for it."""

    status = 400
    kind = "invalid_request_error"


class GrammarFailed(PreheatError):
    """A grammar refused a token, or became too complex to go on.

    The request's constraint cannot be kept any longer.
    """

    code = "grammar_failed"


class NotFinite(PreheatError):
    """The model computed numbers that are not finite; the request has no answer."""

    code = "not_finite"


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt and completion together, are too long for this engine."""

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


class NotFound(InvalidRequest):
    """There is nothing of that name."""

    status = 404
    kind = "not_found_error"


class AdapterError(InvalidRequest):
    """An adapter cannot be read, or does not fit the model or the options."""

    code = "invalid_adapter"


class AlreadyThere(InvalidRequest):
    """The name is taken."""

    status = 409
    kind = "conflict_error"


class OtherContract(InvalidRequest):
    """A front's request for an engine with another contract."""

    status = 409
    kind = "conflict_error"
    code = "other_contract"


class SlowRequest(InvalidRequest):
    """The headers or the body did not arrive in time."""

    status = 408


class TooLarge(InvalidRequest):
    """The body is larger than the server accepts."""

    status = 413


class Encoded(InvalidRequest):
    """The body is compressed."""

    status = 415


class HeadersTooLarge(InvalidRequest):
    """The headers are larger than the server accepts."""

    status = 431


class TooManyRequests(PreheatError):
    """More requests than ``--max-queued-requests`` are waiting."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class TooManyServed(TooManyRequests):
    """As many requests as ``--max-concurrent-requests`` are being served."""

    code = "too_many_requests"


class TooManyFiles(TooManyRequests):
    """There are as many files as ``--max-batch-files``, or too many arrive at once."""

    code = "too_many_files"


class TooManyBatches(TooManyRequests):
    """As many batches as ``--max-batches`` have not ended."""

    code = "too_many_batches"


class NotReady(PreheatError):
    """The engine is still starting or is draining; ask again later."""

    status = 503
    kind = "service_unavailable"
    code = "not_ready"


class Asleep(NotReady):
    """The engine sleeps, and takes no requests before it is woken up."""

    code = "asleep"


class Draining(NotReady):
    """The server finishes its requests and takes no others."""

    code = "draining"


class EngineDead(PreheatError):
    """The engine stopped; the server is about to exit."""

    kind = "engine_dead"
    code = "engine_dead"


class MemoryFault(EngineDead):
    """Memory has other contents than when its digest was taken."""

    code = "memory_fault"

    @classmethod
    def at(cls, place: str) -> MemoryFault:
        """Return the error of a place in memory, or of a result."""
        return cls(
            f"The audit found a fault: {place}. Answers may be wrong, so the engine stops: start it again, and test "
            "the memory of this machine if the fault returns"
        )


class RankDied(EngineDead):
    """One of the processes that share the model has died, and so have all."""


class StepTimeout(PreheatError):
    """The engine took too long to run a step or to take a request."""

    status = 504
    kind = "timeout"
    code = "timeout"


class WireError(msgspec.Struct, array_like=True):
    """An error in transit: the name of its class, and its message."""

    name: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """Convert ``error`` for sending; a foreign error becomes a PreheatError that names its class."""
        if isinstance(error, PreheatError):
            return cls(type(error).__name__, error.message, error.param)
        return cls(PreheatError.__name__, f"{type(error).__name__}: {error}")

    @classmethod
    def answered(cls, status: int, code: str | None, message: str, param: str | None) -> WireError:
        """Return the error that another server answered with ``status`` and ``code``."""
        kinds = [kind for kind in _kinds(PreheatError) if (kind.status, kind.code) == (status, code)]
        return cls((kinds or [PreheatError])[0].__name__, message, param)

    def restore(self) -> PreheatError:
        """Return the error, or a PreheatError if this process does not know its class."""
        kind = next((kind for kind in _kinds(PreheatError) if kind.__name__ == self.name), PreheatError)
        return kind(self.message, param=self.param)


def _kinds(base: type[PreheatError]) -> Iterator[type[PreheatError]]:
    """Yield ``base`` and all its subclasses."""
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)
