"""Grammars beside the engine's loop: compilation and masks in threads.

Grammars are compiled while their requests wait; masks are computed while the model runs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from preheat.configs.structured import (
    StructuredOutputsConfig,
    library_of,
    preloads_of,
    structured_config,
    why_none,
    with_config,
)
from preheat.core import GrammarStats, Request, Schedule, StructuredOutputsParams
from preheat.errors import InvalidRequest, PreheatError
from preheat.grammar.guidance import Guidance
from preheat.grammar.source import refused
from preheat.grammar.state import Grammar, Library, Row, State
from preheat.grammar.xgrammar import XGrammar
from preheat.schedule.slots import Slots
from preheat.settings import Settings
from preheat.utils.files import TABLE_BYTES, read_text

logger = logging.getLogger(__name__)

KEPT, KEPT_BYTES = 512, 2**26
"""Bounds of the latest compiled grammars that are kept: their number, and the bytes of their parameters."""

MOST_COMPILERS, MOST_MASK_THREADS = 8, 32

STACK = 2**29
"""Bytes of the stack of a thread that compiles; only used pages take memory. The library recurses: with the usual 8 MiB
a chain of 2,000 references would end the process."""

PATHS, PATH_TOKENS = 4, 64
"""Paths through a grammar at boot, to build its states, and their length in tokens."""

LIBRARIES: Mapping[str, Callable[[str, int, int], Library]] = MappingProxyType(
    {"llguidance": Guidance, "xgrammar": XGrammar}
)

PROBE_TOKENS, PROBES = 24, 2
"""Length and number of the paths that try each grammar when it is compiled. A grammar with masks that cost too
much is found there, before a running request waits for it."""

Arrived = tuple[Request, State | PreheatError]


@dataclass
class _Waiting:
    """A request that waits for its grammar, compiled since ``began``; 0: it waits for a thread."""

    request: Request
    grammar: Future[Grammar]
    began: float = 0.0


class _Kept(NamedTuple):
    grammar: Future[Grammar]
    bytes: int


class Grammars:
    """Grammars over the tokens of one model.

    :meth:`start` a request, and :meth:`take` it once its grammar is compiled; :meth:`fill` masks. ``seconds``: the most
    that a compilation may take. ``config``: the server's own options.
    """

    def __init__(
        self,
        backend: Library,
        preloads: Mapping[str, StructuredOutputsParams],
        config: StructuredOutputsConfig,
        seconds: float,
    ) -> None:
        self.backend, self.preloads, self.config, self._seconds = backend, preloads, config, seconds
        self.stats = GrammarStats()
        self._compilers = _deep_threads(compilers())
        self._masks = ThreadPoolExecutor(1, "grammar-masks")
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._free: Future[Grammar] = Future()  # of requests with masks by their parameters alone
        self._free.set_result(Grammar(backend, None))
        self._waiting: dict[int, _Waiting] = {}

    @property
    def pending(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    def start(self, request: Request) -> None:
        """Have the grammar of ``request`` compiled, unless it is kept."""
        params = request.params.structured_outputs
        grammar = self._free if params is None else self.grammar(params)
        self._waiting[request.id] = _Waiting(request, grammar)

    def grammar(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Return the grammar of ``params``; it may not be compiled yet."""
        everywhere = msgspec.structs.replace(
            params, after_token_id=None, start_token_id=None, call_token_ids=(), after_header=None
        )
        params = with_config(everywhere, self.config)
        made_from = msgspec.msgpack.encode(params)
        key = blake2b(made_from).digest()
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self.stats.reused += 1
            return kept.grammar
        found = self._compilers.submit(self._compile, params)
        self._kept[key] = _Kept(found, len(made_from))
        self._kept_bytes += len(made_from)
        while len(self._kept) > KEPT or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= self._kept.popitem(last=False)[1].bytes
        return found

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        began = time.monotonic()
        with _no_panic():
            grammar = self.backend.compile(params)
            try:
                grammar.explore(PROBE_TOKENS, PROBES)
            except ValueError as error:
                raise refused(params.kind, str(error)) from None
        self.stats.compiled += 1
        self.stats.compile_seconds += time.monotonic() - began
        return grammar

    def cancel(self, request_id: int) -> bool:
        """Forget a waiting request. Return False if it does not wait."""
        return self._waiting.pop(request_id, None) is not None

    def cancel_all(self) -> list[int]:
        """Forget all waiting requests. Return their ids."""
        ids = [*self._waiting]
        self._waiting.clear()
        return ids

    def take(self, timeout: float = 0.0) -> list[Arrived]:
        """Return the requests that no longer wait.

        Each comes with its first state or an error. Wait up to ``timeout`` seconds for the first one.
        """
        if timeout and self._waiting:
            wait([each.grammar for each in self._waiting.values()], timeout, FIRST_COMPLETED)
        now, found = time.monotonic(), list[Arrived]()
        for each in [*self._waiting.values()]:
            if each.grammar.running():
                each.began = each.began or now
            if each.grammar.done() or (each.began and now - each.began > self._seconds):
                del self._waiting[each.request.id]
                found.append((each.request, self._outcome(each)))
        return found

    def _outcome(self, waiting: _Waiting) -> State | PreheatError:
        if not waiting.grammar.done():
            error: BaseException | None = InvalidRequest(
                f"structured_outputs: compiling it took more than {self._seconds:g} s (--grammar-compile-timeout-s); "
                "make it smaller",
                param="structured_outputs",
            )
        elif (error := waiting.grammar.exception()) is None:
            try:
                return waiting.grammar.result().state(waiting.request)
            except PreheatError as refusal:
                error = refusal
        self.stats.refused += 1
        if isinstance(error, PreheatError):
            return error
        logger.error("A grammar could not be compiled", exc_info=error)
        return PreheatError(f"structured_outputs: {type(error).__name__}: {error}")

    def fill(self, masks: np.ndarray, slots: Slots, schedule: Schedule) -> Future[float]:
        """Begin to write the masks of a step, int32 [sampled tokens, words].

        The result is the time that it took, in seconds. All tokens of the step's rows with a grammar must be known. A
        row whose sequence has ended allows all tokens: its token is dropped.
        """
        if schedule.total_sampled > len(masks):  # libraries write without a check of bounds
            raise ValueError(f"{schedule.total_sampled} masks do not fit into {len(masks)}")
        rows, ruled, counts = list[Row](), list[Row](), schedule.num_sampled
        places = counts.cumsum() - counts
        for row in (slots.has_grammar[schedule.slots] & (counts > 0)).nonzero()[0].tolist():
            slot, count, place = int(schedule.slots[row]), int(counts[row]), int(places[row])
            state = slots.grammars.get(slot)
            if isinstance(state, State):
                end = int(schedule.ends[row])
                drafts = slots.tokens[slot, end - count + 1 : end].tolist() if count > 1 else []
                held = state.fill_free(masks[place : place + count], drafts)
                rows += [(each, place + ahead, behind) for each, ahead, behind in held]
                if state.ruled:
                    ruled.append((state, place, drafts))
            else:
                masks[place : place + count] = -1
        return self._masks.submit(self._fill, masks, rows, ruled)

    def _fill(self, masks: np.ndarray, rows: Sequence[Row], ruled: Sequence[Row]) -> float:
        began = time.perf_counter()
        with _no_panic():
            self.backend.fill(masks, rows)
        for state, place, drafts in ruled:
            state.keep_rules(masks[place : place + 1 + len(drafts)], drafts)
        took = time.perf_counter() - began
        stats = self.stats
        stats.masks += len(rows)
        stats.mask_seconds += took
        stats.slowest_mask = max(stats.slowest_mask, took)
        return took

    def wait(self, masks: Future[float]) -> None:
        """Wait until the masks of a step are written."""
        began = time.perf_counter()
        masks.result()
        self.stats.wait_seconds += time.perf_counter() - began

    def preload(self, name: str) -> int:
        """Compile the preloaded grammar ``name`` and build its states. Return the number of masks computed.

        Raises InvalidRequest, with the name, if it cannot be compiled.
        """
        try:
            return self.grammar(self.preloads[name]).result().explore(PATH_TOKENS, PATHS)
        except InvalidRequest as error:
            raise InvalidRequest(f"--preload-grammars: {name}: {error.message}", param="preload_grammars") from error

    def forget(self) -> None:
        """Reset the counters."""
        self.stats = GrammarStats()


def _deep_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool of threads with stacks of `STACK` bytes.

    The threads start here: the size of the stack is a setting of the whole process.
    """
    pool, started = ThreadPoolExecutor(count, "grammar-compiler"), threading.Barrier(count)
    before = threading.stack_size(STACK)
    try:
        wait([pool.submit(started.wait) for _ in range(count)])
    finally:
        threading.stack_size(before)
    return pool


@contextmanager
def _no_panic() -> Iterator[None]:
    """Turn a panic of the library, not an Exception, into an error of the request or step."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise PreheatError(f"the library of structured outputs failed: {error}") from error


def compilers() -> int:
    """Return the number of threads that compile: half of the cores.

    The other cores run the model and the server.
    """
    return min(max((os.cpu_count() or 1) // 2, 1), MOST_COMPILERS)


def mask_threads(*, idle: bool) -> int:
    """Return the number of threads that compute masks.

    A step waits for its masks. The number is half of the cores. On an ``idle`` host, with the model on a device, it is
    all cores but two, for the loop and the server.
    """
    cores = os.cpu_count() or 1
    return min(max(cores - 2 if idle else cores // 2, 1), MOST_MASK_THREADS)


def open_grammars(
    settings: Settings, find_tokenizer: Callable[[Settings], Path], vocab_size: int, *, idle: bool = False
) -> Grammars | str:
    """Return the grammars for the model's tokenizer, or the reason for none.

    ``find_tokenizer`` returns the tokenizer's folder. ``idle``: see :func:`mask_threads`. Raises SettingsError if the
    library is not installed.
    """
    if why := why_none(settings):
        return why
    preloads, config = preloads_of(settings), structured_config(settings.structured_outputs_config)
    library = LIBRARIES[library_of(settings)]
    try:
        tokenizer = find_tokenizer(settings)
        text = read_text(tokenizer / "tokenizer.json", most=TABLE_BYTES)
        backend = library(text, vocab_size, mask_threads(idle=idle))
        return Grammars(backend, preloads, config, settings.grammar_compile_timeout_s)
    except BaseException as error:  # the library raises many kinds, and its panic is no Exception
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        logger.warning("Structured outputs are not available: %s", reason)
        return f"the tokenizer cannot be used for grammars ({reason})"
