"""``AsyncLLM``: an engine in a thread of this process, with answers as asynchronous iterators."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from preheat.core import SamplingParams
from preheat.errors import EngineDead, PreheatError
from preheat.frontend.adapters import LoRARequest
from preheat.frontend.embedding import PoolingParams
from preheat.frontend.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from preheat.library.engine_args import EngineArgs
from preheat.library.inputs import Prompt
from preheat.library.stepping import Output
from preheat.llm import LLM, LLMEngine
from preheat.settings import Settings
from preheat.utils.refused import Refused

R = TypeVar("R")

Told = Output | PreheatError
Tell = Callable[[Told], None]


def _of_llm(name: str) -> Callable[..., Awaitable[Any]]:
    """Return a method that calls :class:`LLM`'s method in the engine's thread.

    The call comes between two steps.
    """

    async def method(self: AsyncLLM, *args: Any, **kwargs: Any) -> Any:
        return await self._call(lambda engine: getattr(engine.llm, name)(*args, **kwargs))

    method.__name__ = name
    method.__doc__ = f"Call :meth:`preheat.LLM.{name}` between two steps."
    return method


class AsyncLLM:
    """An engine that boots and runs in a thread of its own.

    The constructor waits for the boot. Methods may be called from any event loop. :meth:`shutdown` ends the thread.
    Raises the errors of :class:`LLM`.
    """

    def __init__(self, vllm_config: Settings) -> None:
        self.vllm_config = vllm_config
        self._calls: SimpleQueue[Callable[[LLMEngine], None] | None] = SimpleQueue()
        self._tells: dict[str, Tell] = {}
        self._dead: PreheatError | None = None
        self._lock = threading.Lock()  # guards the queue: a dead engine gets no calls
        booted: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(booted,), name="preheat-engine", daemon=True)
        self._thread.start()
        booted.result()
        atexit.register(self.shutdown)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> AsyncLLM:
        """Boot the engine of ``engine_args``; see :meth:`EngineArgs.create_engine_config`."""
        return cls(engine_args.create_engine_config(usage_context))

    @classmethod
    def from_vllm_config(cls, vllm_config: Settings, usage_context: object = None) -> AsyncLLM:
        """Boot the engine of a configuration from :meth:`EngineArgs.create_engine_config`."""
        return cls(vllm_config)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request, in the form of ``sampling_params.output_kind``.

        The request is aborted when the iteration stops early. Raises InvalidRequest, the error of the request, or
        EngineDead.
        """
        more: dict[str, Any] = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        more |= {"trace_headers": trace_headers, "priority": priority}
        async for output in self._outputs(request_id, prompt, sampling_params, more):
            assert isinstance(output, RequestOutput)
            yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the pooled output of a prompt, once; otherwise as :meth:`generate`."""
        more = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        async for output in self._outputs(request_id, prompt, pooling_params, more | {"trace_headers": trace_headers}):
            assert isinstance(output, PoolingRequestOutput)
            yield output

    async def _outputs(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, more: dict[str, Any]
    ) -> AsyncIterator[Output]:
        told, loop, added, over = asyncio.Queue[Told](), asyncio.get_running_loop(), threading.Event(), False

        def tell(output: Told) -> None:
            loop.call_soon_threadsafe(told.put_nowait, output)

        def add(engine: LLMEngine) -> None:
            engine.add_request(request_id, prompt, params, **more)
            self._tells[request_id] = tell
            added.set()

        try:
            await self._call(add)
            while not over:
                output = await told.get()
                if isinstance(output, PreheatError):
                    over = True
                    raise output
                over = output.finished
                yield output
        finally:
            if not over and self._dead is None:
                self._submit(lambda engine: self._abort(engine, [request_id] * added.is_set()))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their iterators yield the output so far, with reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call(lambda engine: self._abort(engine, ids))

    def _abort(self, engine: LLMEngine, ids: list[str]) -> None:
        for output in engine.abort_request(ids):
            self._tell(output.request_id, output)

    get_tokenizer = _of_llm("get_tokenizer")
    collective_rpc = _of_llm("collective_rpc")
    reset_prefix_cache = _of_llm("reset_prefix_cache")
    start_profile, stop_profile = _of_llm("start_profile"), _of_llm("stop_profile")
    sleep, wake_up = _of_llm("sleep"), _of_llm("wake_up")
    pause_generation, resume_generation = _of_llm("pause"), _of_llm("resume")
    init_weight_transfer_engine = _of_llm("init_weight_transfer_engine")
    start_weight_update, finish_weight_update = _of_llm("start_weight_update"), _of_llm("finish_weight_update")
    update_weights = _of_llm("update_weights")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the engine's tasks; see :attr:`LLM.supported_tasks`."""
        return await self._call(lambda engine: engine.llm.supported_tasks)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request names it. Raises InvalidRequest."""
        return await self._call(lambda engine: engine.add_lora(lora_request))

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return await self._call(lambda engine: engine.is_sleeping())

    async def is_paused(self) -> bool:
        """Return whether the engine is paused."""
        return await self._call(lambda engine: engine.llm.state.paused)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Return when no request runs. Raises TimeoutError after ``drain_timeout`` seconds."""
        async with asyncio.timeout(drain_timeout):
            while await self._call(lambda engine: engine.has_unfinished_requests()):
                await asyncio.sleep(0.01)

    async def check_health(self) -> None:
        """Raise EngineDead if the engine takes no requests any more."""
        if self._dead is not None:
            raise self._dead

    @property
    def is_running(self) -> bool:
        return self._dead is None

    @property
    def is_stopped(self) -> bool:
        return self._dead is not None

    errored = is_stopped

    @property
    def dead_error(self) -> PreheatError:
        """The reason why the engine takes no requests any more."""
        return self._dead or EngineDead("the engine runs, so it has no error of its death")

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread; running requests get EngineDead. Waits at most ``timeout`` seconds."""
        atexit.unregister(self.shutdown)
        self._calls.put(None)
        self._thread.join(timeout)

    async def _call(self, function: Callable[[LLMEngine], R]) -> R:
        return await asyncio.wrap_future(self._submit(function))

    def _submit(self, function: Callable[[LLMEngine], R]) -> Future[R]:
        """Have ``function`` called in the engine's thread. Raises EngineDead."""
        done: Future[R] = Future()

        def call(engine: LLMEngine) -> None:
            if not done.set_running_or_notify_cancel():  # nobody waits any more
                return
            try:
                done.set_result(function(engine))
            except Exception as error:
                done.set_exception(error)

        with self._lock:
            if self._dead is not None:
                raise self._dead
            self._calls.put(call)
        return done

    def _tell(self, request_id: str, output: Told) -> None:
        """Pass an output to its iterator, in an event loop that may be closed."""
        over = isinstance(output, PreheatError) or output.finished
        tell = self._tells.pop(request_id, None) if over else self._tells.get(request_id)
        try:
            if tell is not None:
                tell(output)
        except RuntimeError:  # the loop is closed: nobody will read the output
            self._calls.put(lambda engine: self._abort(engine, [request_id]))

    def _run(self, booted: Future[None]) -> None:
        """Boot, then run until :meth:`shutdown`.

        All of it is in one thread, since torch has settings of a thread.
        """
        try:
            engine = LLM.of(self.vllm_config).llm_engine
        except BaseException as error:
            booted.set_exception(error)
            return
        booted.set_result(None)
        try:
            while self._take(engine):
                for request_id, output in engine.advance():
                    self._tell(request_id, output)
            end: PreheatError = EngineDead("the engine was shut down")
        except Exception as cause:
            end = cause if isinstance(cause, PreheatError) else EngineDead(f"the engine died: {cause!r}")
        self._die(end)

    def _take(self, engine: LLMEngine) -> bool:
        """Make the pending calls; while no request runs, wait for the first. Return False at the end."""
        waits = not engine.has_unfinished_requests() or engine.llm.state.paused
        while True:
            try:
                call = self._calls.get(block=waits)
            except Empty:
                return True
            if call is None:
                return False
            call(engine)
            waits = False

    def _die(self, error: PreheatError) -> None:
        with self._lock:
            self._dead = error
        for request_id in list(self._tells):
            self._tell(request_id, error)
        while not self._calls.empty():  # their callers get the error
            if (call := self._calls.get()) is not None:
                call(_Dead(error))  # type: ignore[arg-type]

    get_vllm_config = Refused("get_vllm_config", "see vllm_config, the settings as one object")
    get_model_config = Refused("get_model_config", "settings are one object: see vllm_config")
    do_log_stats = Refused("do_log_stats", "statistics are not logged: see LLM.get_metrics")
    scale_elastic_ep = Refused("scale_elastic_ep", "an engine in a thread has one replica: see docs/parallel.md")
    reset_mm_cache = LLM.reset_mm_cache
    remove_lora, list_loras, pin_lora = LLMEngine.remove_lora, LLMEngine.list_loras, LLMEngine.pin_lora


class _Dead:
    """Stand-in for a dead engine: any access raises ``error``."""

    def __init__(self, error: PreheatError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


AsyncLLMEngine = AsyncLLM
"""vLLM's older name of :class:`AsyncLLM`."""
