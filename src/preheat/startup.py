"""The two boots: of the engine, and of the frontend (tokenizer, chat template).

The frontend's process never imports torch, so :func:`boot_engine` imports what needs it when it is called.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from preheat.backends.registry import facts_of, wake
from preheat.core import Died, ToEngine
from preheat.frontend.chat_template import ChatTemplate
from preheat.frontend.frontend import Frontend
from preheat.frontend.tokenizer import NoTokenizer, Tokenizer
from preheat.metrics import Metrics, explain, set_up_logging
from preheat.model.config import resolve_dtype
from preheat.model.families import read_spec
from preheat.model.files import find_checkpoint, read_config
from preheat.plan import commands
from preheat.settings import Settings
from preheat.transport import EngineTransport
from preheat.utils import pycache
from preheat.utils.gc import keep_imports, settle
from preheat.utils.trace import open_trace
from preheat.verify.names import check_required
from preheat.warmup.store import cache_root

if TYPE_CHECKING:
    from preheat.backends.base import Backend
    from preheat.engine.loop import EngineSide, Loop


def boot_front(
    settings: Settings, send: Callable[[ToEngine], None], metrics: Metrics | None = None
) -> tuple[Frontend, ChatTemplate]:
    """Everything that speaks text. ``send`` hands a message to the engine."""
    folder = find_checkpoint(settings.model, settings.revision, with_weights=False)
    tokens = find_checkpoint(settings.tokenizer, with_weights=False) if settings.tokenizer else folder
    tokenizer = NoTokenizer(folder) if settings.skip_tokenizer_init else Tokenizer(tokens, folder)
    frontend = Frontend(
        tokenizer,
        send,
        max_logprobs=settings.max_logprobs,
        max_queued=settings.max_queued_requests,
        metrics=metrics,
        seed=settings.seed,
    )
    return frontend, ChatTemplate(tokenizer, settings.chat_template)


def planned(settings: Settings, *, as_json: bool = False) -> str:
    """The plan of these settings, as text or as JSON, from the model's config alone: no weights, no torch.

    The device is not looked at: it counts as one that computes in bfloat16 and has room for every sequence.
    """
    spec = read_spec(read_config(find_checkpoint(settings.model, settings.revision, with_weights=False)))
    dtype, _ = resolve_dtype(settings.dtype, spec.dtype, native_bfloat16=True)
    facts = facts_of(settings.device)
    return commands.plan(settings, spec, spec.max_position_embeddings, dtype=dtype, facts=facts, as_json=as_json)


def boot_engine(
    settings: Settings,
    transport: EngineSide,
    before_ready: Callable[[], None] = lambda: None,
    backend: Backend | None = None,
) -> Loop:
    """An engine that is warm, in the steps of :mod:`preheat.boot`. Calls ``before_ready``, then tells ``transport``
    that requests may come. ``backend``: what computes; None picks one by ``settings.device``.

    Raises SettingsError or ModelError, saying what to change.
    """
    started = time.monotonic()
    check_required(settings)
    explain(settings.debug)
    trace = open_trace(settings.profiler_enabled)
    wake(settings.device)
    with trace.span("Importing torch"), pycache.kept(cache_root(settings)):
        from preheat.boot import boot
    keep_imports()
    return boot(settings, transport, before_ready, started=started, trace=trace, backend=backend)


def run_engine(settings: Settings, address: str) -> None:
    """The engine's process: boot, say so, run until drained. A fatal error is sent to the frontend, then raised.

    Nearly all objects that a boot makes stay: the garbage collector looks at them once, at the end, and never again.
    """

    def before_ready() -> None:
        settle()
        gc.enable()

    gc.disable()
    set_up_logging(settings.log_level)
    transport = EngineTransport(address)
    try:
        boot_engine(settings, transport, before_ready).run()
    except BaseException as error:
        transport.put(Died(f"{type(error).__name__}: {error}"))
        raise
    finally:
        transport.close()
